"""What a lead does last."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from verl_slurm_daemon.allocation.contract import Outlook
from verl_slurm_daemon.allocation.local import LocalAllocation
from verl_slurm_daemon.decide.inputs import CauseKnown
from verl_slurm_daemon.lead import attempt_start, lead_loop, tier_child
from verl_slurm_daemon.lead.lead_loop import Lead

from tests.builders import cold_tier, run_config, write_config
from tests.checkpoint.conftest import manifest_of, owns_it, stage
from tests.fakes.faulty_mount import faulty_mount
from tests.journals import append_event, read_events
from verl_slurm.base.errors import Fenced
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.fence import RunOwner, take_attempt
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.commit import commit
from verl_slurm.config.schema import RunConfig
from verl_slurm.dataset.fingerprint.data_record import check_dataset
from verl_slurm.journal.causes import CauseKind
from verl_slurm.journal.events import StartOverruled
from verl_slurm.journal.history import History


class OfACancelledJob(LocalAllocation):
    """Follows a job that was cancelled: over before it began."""

    def __init__(self, config: RunConfig, paths: RunPaths, *, owned: str = "") -> None:
        super().__init__(config, paths)
        self.withdrawn, self._owned = 0, owned

    async def cancelled_before(self) -> str:
        return "job 7, which this one follows, is CANCELLED"

    async def still_alive(self, owner: RunOwner) -> str:
        return self._owned

    async def withdraw(self) -> str:
        self.withdrawn += 1
        return "Requeue=0: the job ends here"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    for directory in (paths.root, paths.control, paths.logs):
        private_dir(directory)
    return paths


def test_a_run_that_ends_for_good_takes_its_requeue_back_first(paths: RunPaths) -> None:
    config = RunConfig()
    allocation = OfACancelledJob(config, paths)
    assert asyncio.run(Lead(paths, config, allocation).run()) is ExitCode.CANCELLED
    assert allocation.withdrawn == 1
    events = read_events(paths)
    assert [event["event"] for event in events] == ["started", "notice", "ended"]
    assert events[1]["text"] == "Requeue=0: the job ends here"


class OfAJournalWithAnything(OfACancelledJob):
    async def learn(self, history: History) -> StartOverruled | None:
        raise ValueError("Invalid isoformat string: 'soon'")


def test_a_start_time_in_the_journal_that_is_none_keeps_no_attempt_from_its_start(paths: RunPaths) -> None:
    config = RunConfig()
    lead = Lead(paths, config, OfAJournalWithAnything(config, paths))
    assert asyncio.run(lead.run()) is ExitCode.CANCELLED


class OfASlowLook(OfACancelledJob):
    """A signal comes during the look at the start, which ends once Slurm has given each of `answers`, if it may."""

    def __init__(self, config: RunConfig, paths: RunPaths, answers: list[CauseKind]) -> None:
        super().__init__(config, paths)
        self._answers, self._all_given = answers, asyncio.Event()
        self._ends = answers[-1] in ("operator", "suspended")

    async def cause(self, trigger: str) -> CauseKnown:
        kind = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if self._ends and len(self._answers) == 1:
            self._all_given.set()
        return CauseKnown(kind, trigger, None)

    async def cancelled_before(self) -> str:
        signal.raise_signal(signal.SIGUSR1)
        await self._all_given.wait()
        return await super().cancelled_before()


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        (["operator", "none", "operator"], ExitCode.CANCELLED),
        (["suspended", "none", "suspended"], ExitCode.CANCELLED),
        (["unknown", "none", "operator"], ExitCode.CANCELLED),
        (["preemption"], ExitCode.REQUEUED),
        (["unknown", "preemption"], ExitCode.REQUEUED),
    ],
)
def test_a_slow_look_at_the_start_is_given_up_for_what_slurm_confirms_and_not_for_a_signal(
    paths: RunPaths, answers: list[CauseKind], code: ExitCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("_LOOK_S", 0.01), ("_ASK_AGAIN_S", 0.0), ("_LAST_WAIT_S", 0.1)):
        monkeypatch.setattr(attempt_start, name, seconds)
    config = RunConfig()
    lead = Lead(paths, config, OfASlowLook(config, paths, answers))
    assert asyncio.run(lead.run()) is code
    has_failed = "start_failed" in [event["event"] for event in read_events(paths)]
    assert has_failed is (code is ExitCode.REQUEUED)


def test_a_slow_run_directory_is_waited_for_though_an_operator_signals_before_the_lead_listens(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("_LOOK_S", 0.01), ("_ASK_AGAIN_S", 0.0), ("_LAST_WAIT_S", 0.1)):
        monkeypatch.setattr(attempt_start, name, seconds)
    write_config(paths)
    asked, explained, load_own = [], threading.Event(), attempt_start.load_own

    def slowly(path: Path) -> RunConfig:
        explained.wait(60)
        return load_own(path)

    async def cause(_: LocalAllocation, trigger: str) -> CauseKnown:
        asked.append(trigger)
        if len(asked) > 1:
            explained.set()
        return CauseKnown("operator", trigger, None)

    monkeypatch.setattr(attempt_start, "load_own", slowly)
    monkeypatch.setattr(LocalAllocation, "cause", cause)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, attempt_start.SIGNALS)
    try:
        signal.raise_signal(signal.SIGUSR1)
        assert asyncio.run(attempt_start.prepare(paths.root, None)).failed is None
    finally:
        signal.sigwait([signal.SIGUSR1])
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert set(asked) == {"SIGUSR1 to lead"}


class OnStorageThatIsAway(LocalAllocation):
    async def cancelled_before(self) -> str:
        raise OSError(5, "Input/output error")


def test_a_journal_that_cannot_be_read_at_the_start_costs_one_start_and_not_the_run(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_start, "IN_PLACE_S", (0.01, 0.02))
    config = RunConfig()
    lead = Lead(paths, config, OnStorageThatIsAway(config, paths))
    assert asyncio.run(lead.run()) is ExitCode.REQUEUED
    assert "start_failed" in [event["event"] for event in read_events(paths)]


def test_a_job_that_comes_second_does_not_wait_held_for_the_run(paths: RunPaths) -> None:
    take_attempt(paths, job_id="7", restart=0, cluster="slurm")
    config = RunConfig()
    allocation = OfACancelledJob(config, paths, owned="job 7 is RUNNING")
    with pytest.raises(Fenced):
        asyncio.run(Lead(paths, config, allocation).run())
    assert allocation.withdrawn == 1


def test_a_run_that_was_put_back_from_a_snapshot_gives_no_number_twice(paths: RunPaths) -> None:
    take_attempt(paths, job_id="1", restart=0)
    append_event(paths, "saved", attempt=2, name="step_000003")  # it lives on, and its claim is gone
    config = RunConfig()
    asyncio.run(Lead(paths, config, OfACancelledJob(config, paths)).run())
    assert read_events(paths)[-1]["attempt"] == 3


@pytest.fixture
def done(paths: RunPaths, tmp_path: Path) -> RunConfig:
    """Of a run that has done its two steps; the tier has nothing of it yet."""
    (private_dir(tmp_path / "data") / "a.jsonl").write_text("{}\n")
    check_dataset(paths, tmp_path / "data")
    tier = cold_tier(private_dir(tmp_path / "cold"))
    config = write_config(paths, root=tmp_path / "data", steps=2, tiers=(tier,))
    staging = stage(paths, 2)
    commit(staging, manifest_of(staging), attempt_check=owns_it)
    return config


def said_of_tiers(paths: RunPaths) -> list[str]:
    kinds = {"notice": "text", "tiers": "detail", "tier_copied": "name"}
    found = [event for event in read_events(paths) if event["event"] in kinds]
    return [event[kinds[event["event"]]] for event in found if event.get("topic", "tiers") == "tiers"]


class AsItIsDone(LocalAllocation):
    """Calls `act` as the lead asks how long it may wait for the tiers."""

    act: Callable[[], object | None]

    async def outlook(self) -> Outlook:
        if any(event["event"] == "done" for event in read_events(self._paths)):
            self.act()
        return await super().outlook()


def of_pass(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A shell's script in place of the mover's pass; `"$@"` is that pass. A start asks no tier."""
    real = tier_child._command

    def command(what: str, paths: RunPaths) -> list[str]:
        return ["sh", "-c", script, "sh", *real(what, paths)] if what == "sync" else ["true"]

    monkeypatch.setattr(tier_child, "_command", command)


def test_a_run_that_is_done_waits_until_its_last_checkpoint_is_in_its_tier(
    paths: RunPaths, done: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "go")
    gate = os.open(tmp_path / "go", os.O_RDWR)
    of_pass(monkeypatch, f'read go < {tmp_path}/go; exec "$@"')
    allocation = AsItIsDone(done, paths)
    allocation.act = lambda: os.write(gate, b"\n")
    assert asyncio.run(Lead(paths, done, allocation).run()) is ExitCode.OK
    os.close(gate)
    assert said_of_tiers(paths)[-1] == "step_000002"


def test_a_wait_for_a_tier_outlasts_a_signal_that_ends_no_job(
    paths: RunPaths, done: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "go")
    gate = os.open(tmp_path / "go", os.O_RDWR)
    of_pass(monkeypatch, f'read go < {tmp_path}/go; exec "$@"')

    class OnceItIsExplained(AsItIsDone):
        async def cause(self, trigger: str) -> CauseKnown:
            os.write(gate, b"\n")
            return await super().cause(trigger)

    allocation = OnceItIsExplained(done, paths)
    allocation.act = lambda: signal.raise_signal(signal.SIGUSR1)
    assert asyncio.run(Lead(paths, done, allocation).run()) is ExitCode.OK
    os.close(gate)
    assert said_of_tiers(paths)[-1] == "step_000002"


@pytest.mark.parametrize("limit_s", [0.01, 600.0], ids=["limit", "signal"])
def test_a_wait_for_a_tier_ends_at_its_limit_or_a_signal_and_says_what_is_missing(
    paths: RunPaths, done: RunConfig, monkeypatch: pytest.MonkeyPatch, limit_s: float
) -> None:
    monkeypatch.setattr(lead_loop, "_LAST_PASS_S", limit_s)
    of_pass(monkeypatch, "exec sleep 600")
    allocation = AsItIsDone(done, paths)
    allocation.act = (lambda: signal.raise_signal(signal.SIGTERM)) if limit_s > 1 else (lambda: None)
    assert asyncio.run(Lead(paths, done, allocation).run()) is ExitCode.OK
    assert said_of_tiers(paths) == [
        f"step_000002 is not whole in tier cold: waits for it, {limit_s:.0f} s at most",
        f"step_000002 is not whole in tier cold: verl-slurm tiers {paths.root} --offload",
    ]


@contextlib.contextmanager
def away(place: Path, how: str) -> Iterator[None]:
    """Takes a file or a folder away for a moment."""
    if how == "moved":
        aside = place.rename(place.parents[2] / "aside")
        yield
        aside.rename(place)
    elif how == "not mounted":  # the mount point stays
        aside = place.rename(place.parents[2] / "aside")
        place.mkdir()
        yield
        place.rmdir()
        aside.rename(place)
    else:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(faulty_mount(place, "dead" if how == "dead" else "EIO"))
            except OSError as error:
                pytest.skip(f"NOT RUN: mounting a file system needs root and FUSE: {error}")
            yield


class UntilItIsBack(LocalAllocation):
    """Storage is away at the first try of a start, and back at the second one; then the test ends the start."""

    def __init__(self, config: RunConfig, paths: RunPaths, trouble: contextlib.ExitStack) -> None:
        super().__init__(config, paths)
        self._trouble, self._tries = trouble, 0

    async def cancelled_before(self) -> str:
        self._tries += 1
        if self._tries == 2:
            self._trouble.close()
        return ""

    async def address(self) -> str:
        raise Fenced("all inputs were found whole")


@pytest.mark.parametrize("again", [False, True], ids=["first start", "second start"])
@pytest.mark.parametrize(
    ("place", "how", "named"),
    [
        (".", "dead", "data"),
        ("part", "dead", "part"),
        ("part", "EIO", "part"),
        ("part", "not mounted", "part/b.jsonl"),
        ("a.jsonl", "moved", "1 removed (a.jsonl)"),
        ("part/b.jsonl", "moved", "part/b.jsonl"),
        ("link.jsonl", "blob", "link.jsonl"),
    ],
)
def test_data_that_is_away_at_a_start_is_waited_for_by_name(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, place: str, how: str, named: str, again: bool
) -> None:
    monkeypatch.setattr(attempt_start, "IN_PLACE_S", (0.0,))
    data = paths.root.parent / "data"
    for name in ("a.jsonl", "part/b.jsonl", "../blobs/one"):
        private_dir((data / name).parent)
        (data / name).write_text("{}\n")
    (data / "link.jsonl").symlink_to(data.parent / "blobs/one")
    check_dataset(paths, data)
    if again:
        append_event(paths, "restart", number=1, progress="start+0")
    config = run_config(root=str(data), no_progress_limit=9)
    with contextlib.ExitStack() as trouble:
        gone = data.parent / "blobs/one" if how == "blob" else data / place
        trouble.enter_context(away(gone, "moved" if how == "blob" else how))
        code = asyncio.run(Lead(paths, config, UntilItIsBack(config, paths, trouble)).run())
    said = [event["text"] for event in read_events(paths) if event["event"] == "warning"]
    assert len(said) == 1, said
    assert named in said[0]
    assert said[0].endswith("tries again in 0 s")
    assert code is ExitCode.FENCED, "the second try found all of it"
