"""Many runs followed at once: woken by their journals, and by nothing else."""

import errno
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.journals import append_event, make_event
from tests.many_runs import make_run
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.journal.events import Event, kind_of
from verl_slurm.runs import follow_many as fleet_follow
from verl_slurm.runs.follow_many import FleetWatch, Followed, Watches, state_after
from verl_slurm.slurm.client import SlurmClient

Act = Callable[[], object]


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[str, str, str]]:
    """Slurm's jobs."""
    states = dict.fromkeys(range(1, 9), ("RUNNING", "", ""))

    async def answer(_: SlurmClient, users: set[int]) -> dict[int, tuple[str, str, str]]:
        return states

    monkeypatch.setattr(SlurmClient, "states", answer)
    return states


class Script:
    """What happens to the runs: the next act whenever the follower would wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *acts: Act) -> None:
        self.left = list(acts)
        self.waits: list[set[Path] | None] = []
        real = Watches.wait

        def wait(watches: Watches, timeout_s: float) -> set[Path] | None:
            assert self.left, "it waits although nothing is to come"
            quiet = self.left.pop(0)() is QUIET
            self.waits.append(real(watches, 0.0 if quiet else 5.0))
            return self.waits[-1]

        monkeypatch.setattr(Watches, "wait", wait)


QUIET = object()
"""Of an act: nobody writes anything."""


def end(paths: RunPaths, code: int = 0) -> Act:
    return lambda: append_event(paths, "ended", attempt=1, job_id="1", exit_code=code)


def follow(place: Path) -> tuple[int, list[tuple[str, str]], FleetWatch]:
    told: list[tuple[str, str]] = []

    def on_event(run: Followed, event: Event) -> None:
        told.append((run.root.name, kind_of(event)))

    watch = FleetWatch([place], on_event)
    return int(watch.follow(lambda: None)), told, watch


def test_news_of_many_runs_is_told_as_it_comes_and_history_is_not(
    tmp_path: Path, alive: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (make_run(tmp_path / name, job_id=number) for name, number in (("a", "1"), ("b", "2")))
    make_run(tmp_path / "over", "done")
    save = {"name": "step_9", "emergency": False}
    Script(monkeypatch, lambda: append_event(b, "saved", **save), end(a), end(b, 22))
    code, told, watch = follow(tmp_path)
    assert told == [("b", "saved"), ("a", "ended"), ("b", "ended")]
    assert code == 22
    assert {run.root.name: run.state for run in watch.runs.values()} == {
        "a": "done",
        "b": "failed with 22",
        "over": "done",
    }


def test_a_requeue_is_no_end_and_snapshots_wake_nobody(
    tmp_path: Path, alive: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = make_run(tmp_path / "a", job_id="1")

    def snapshots() -> object:
        for _ in range(5):
            a.status.with_suffix(".tmp").write_bytes(a.status.read_bytes())
            a.status.with_suffix(".tmp").rename(a.status)
        return QUIET

    script = Script(monkeypatch, end(a, 25), snapshots, end(a))
    code, told, _ = follow(tmp_path)
    assert (code, [kind for _, kind in told]) == (0, ["ended", "ended"])
    assert script.waits[1] == set()


def test_a_run_that_comes_later_is_followed_too(
    tmp_path: Path, alive: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = make_run(tmp_path / "team" / "a", job_id="1")
    new = RunPaths(tmp_path / "team" / "new")

    def submit() -> None:
        append_event(new, "submitted", job_id="2", cluster="slurm")

    script = Script(
        monkeypatch,
        new.root.mkdir,
        lambda: new.run_yaml.write_text("name: new\n"),
        submit,
        lambda: append_event(new, "started", attempt=1, job_id="2", cluster="slurm"),
        end(a),
        end(new),
    )
    _, told, watch = follow(tmp_path)
    assert told[0] == ("new", "started")
    assert {run.root.name for run in watch.runs.values()} == {"a", "new"}
    assert not script.left


def test_who_is_silent_is_asked_for_and_a_killed_lead_is_told(
    tmp_path: Path, alive: dict[int, tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "a", job_id="1")

    def kill() -> object:
        alive.clear()
        return QUIET

    Script(monkeypatch, lambda: QUIET, kill)
    code, told, _ = follow(tmp_path)
    assert told == [("a", "gone")]
    assert code == 22


def test_a_run_whose_directory_is_removed_is_not_waited_for(
    tmp_path: Path, alive: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (make_run(tmp_path / name, job_id=number) for name, number in (("a", "1"), ("b", "2")))

    def remove() -> object:
        shutil.rmtree(a.root)
        return QUIET

    script = Script(monkeypatch, remove, lambda: QUIET, end(b))
    code, told, watch = follow(tmp_path)
    assert (code, told) == (0, [("b", "ended")])
    assert watch.runs[a.root].state == "removed"
    assert not script.left


@pytest.mark.parametrize("what", ["lines", "hole"])
def test_of_a_journal_that_suddenly_is_huge_the_newest_events_are_told_at_once(
    tmp_path: Path, alive: object, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    a, b = (make_run(tmp_path / name, job_id=number) for name, number in (("a", "1"), ("b", "2")))

    def swell() -> None:
        append_event(a, "saved", name="step_9", emergency=False)
        if what == "lines":
            with a.events.open("ab") as file:
                file.write(b"\n" * 400_000)
        else:
            os.truncate(a.events, 1 << 40)
        append_event(a, "verified", name="step_9")

    Script(monkeypatch, swell, end(b), end(a))
    assert follow(tmp_path)[1] == [("a", "verified"), ("b", "ended"), ("a", "ended")]


def test_what_came_in_the_place_of_a_journal_is_named_and_holds_no_other_run_up(
    tmp_path: Path, alive: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (make_run(tmp_path / name, job_id=number) for name, number in (("a", "1"), ("b", "2")))
    make_run(circle := tmp_path / "circle", "done")
    (circle / "events.jsonl").unlink()
    (circle / "events.jsonl").symlink_to("events.jsonl")

    def swap() -> None:
        append_event(a, "verified", name="step_9")
        a.events.unlink()
        os.mkfifo(a.events)

    Script(monkeypatch, swap, end(b))
    code, told, watch = follow(tmp_path)
    assert (code, told) == (ExitCode.PERMISSION, [("b", "ended")])
    assert {run.root.name: run.state for run in watch.runs.values()} == {
        "a": "events.jsonl: no regular file, but a pipe",
        "b": "done",
        "circle": "events.jsonl: no regular file, but a link",
    }


def test_where_the_kernel_watches_no_more_for_us_sizes_are_looked_at(
    tmp_path: Path, alive: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Watches, path: Path, mask: int) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Watches, "_add", full)
    a = make_run(tmp_path / "a", job_id="1")
    waits: list[float] = []

    def wait(_: Watches, timeout_s: float) -> set[Path]:
        waits.append(timeout_s)
        end(a)()
        return set()

    monkeypatch.setattr(Watches, "wait", wait)
    _, told, _ = follow(tmp_path)
    assert (told, waits) == ([("a", "ended")], [5.0])


def test_nothing_that_lives_means_nothing_to_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "a", "done")
    make_run(tmp_path / "b", cluster="local", job_id="999999999", host=socket.gethostname())
    Script(monkeypatch)
    code, told, _ = follow(tmp_path)
    assert told == [("b", "gone")]
    assert code == 22


def test_where_inotify_is_silent_the_journals_are_looked_at(
    tmp_path: Path, alive: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_follow, "is_remote", lambda _: True)
    monkeypatch.setattr(fleet_follow, "_LOOK_S", 0.01)
    a = make_run(tmp_path / "a", job_id="1")
    turns: list[float] = []

    def silent(_: Watches, timeout_s: float) -> set[Path]:
        turns.append(timeout_s)
        if len(turns) == 3:
            end(a)()
        return set()

    monkeypatch.setattr(Watches, "wait", silent)
    _, told, _ = follow(tmp_path)
    assert told == [("a", "ended")]
    assert turns == [0.01] * 3


@pytest.mark.parametrize("remote", [True, False])
def test_a_killed_lead_is_told_where_only_sizes_are_looked_at_and_where_others_are_never_silent(
    tmp_path: Path, alive: dict[int, tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    monkeypatch.setattr(fleet_follow, "is_remote", lambda _: remote)
    make_run(tmp_path / "a", job_id="1")
    b = make_run(tmp_path / "b", job_id="2")
    turns: list[float] = []

    def wait(_: Watches, timeout_s: float) -> set[Path]:
        turns.append(timeout_s)
        match len(turns):
            case 1:
                del alive[1]
                monkeypatch.setattr(fleet_follow, "_ASK_S", 0.0)  # a minute later
                append_event(b, "saved", name="step_9", emergency=False)
            case 2:
                end(b)()
            case _:
                pytest.fail("a is gone, and nobody has asked")
        return set() if remote else {b.events}

    monkeypatch.setattr(Watches, "wait", wait)
    code, told, _ = follow(tmp_path)
    assert told == [("b", "saved"), ("a", "gone"), ("b", "ended")]
    assert code == 22


@pytest.mark.parametrize(
    ("event", "after"),
    [
        (make_event("submitted"), "queued"),
        (make_event("started"), "starting"),
        (make_event("training"), "running"),
        (make_event("save", stop=True), "saving"),
        (make_event("save", stop=False), "running"),
        (make_event("crash"), "paused"),
        (make_event("ended", exit_code=25), "queued"),
        (make_event("ended", exit_code=23), "cancelled"),
        (make_event("verified"), "running"),
    ],
)
def test_an_event_changes_the_state(event: Event, after: str) -> None:
    assert state_after(event, "running") == after
