"""Many runs followed at once, by the sizes of their journals."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.journals import append_event, make_event
from tests.many_runs import make_run
from verl_slurm.base.errors import SlurmMissing
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.journal.events import Event, kind_of
from verl_slurm.runs import follow as fleet_follow
from verl_slurm.runs.follow import FleetWatch, Followed, state_after
from verl_slurm.slurm.slurm_client import SlurmClient

Act = Callable[[], object]


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[str, str, str, str, str]]:
    """Slurm's jobs."""
    states = dict.fromkeys(range(1, 9), ("RUNNING", "", "", "", ""))

    async def answer(_: SlurmClient, users: set[int]) -> dict[int, tuple[str, str, str, str, str]]:
        return states

    monkeypatch.setattr(SlurmClient, "states", answer)
    return states


def end(paths: RunPaths, code: int = 0) -> Act:
    return lambda: append_event(paths, "ended", attempt=1, job_id="1", exit_code=code)


def follow(place: Path, *acts: Act) -> tuple[int, list[tuple[str, str]], FleetWatch]:
    """Follows while something happens to the runs: the next act whenever the follower waits."""
    told: list[tuple[str, str]] = []
    left = list(acts)

    def on_event(run: Followed, event: Event) -> None:
        told.append((run.root.name, kind_of(event)))

    def sleep(seconds: float) -> None:
        assert seconds > 0
        assert left, "it waits although nothing is to come"
        left.pop(0)()

    watch = FleetWatch([place], on_event)
    code = int(watch.follow(lambda: None, sleep))
    assert not left
    return code, told, watch


def test_news_of_many_runs_is_told_as_it_comes_and_history_is_not(tmp_path: Path, alive: object) -> None:
    a, b = (make_run(tmp_path / name, job_id=number) for name, number in (("a", "1"), ("b", "2")))
    make_run(tmp_path / "over", "done")
    save = {"name": "step_9", "emergency": False}
    code, told, watch = follow(tmp_path, lambda: append_event(b, "saved", **save), end(a), end(b, 22))
    assert told == [("b", "saved"), ("a", "ended"), ("b", "ended")]
    assert code == 22
    assert {run.root.name: run.state for run in watch.runs.values()} == {
        "a": "done",
        "b": "failed with 22",
        "over": "done",
    }


def test_a_requeue_is_no_end_and_what_has_not_grown_is_not_read(
    tmp_path: Path, alive: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = make_run(tmp_path / "a", job_id="1")
    real, reads = fleet_follow.read_events_after, list[Path]()

    def read(paths: RunPaths, offset: int, **how: bool) -> tuple[list[Event], int]:
        reads.append(paths.root)
        return real(paths, offset, **how)

    monkeypatch.setattr(fleet_follow, "read_events_after", read)
    code, told, _ = follow(tmp_path, end(a, 25), *[lambda: None] * 5, end(a))
    assert (code, [kind for _, kind in told]) == (0, ["ended", "ended"])
    assert len(reads) == 2


def test_a_run_that_comes_later_is_followed_too(tmp_path: Path, alive: object) -> None:
    a = make_run(tmp_path / "team" / "a", job_id="1")
    new = RunPaths(tmp_path / "team" / "new")

    def submit() -> None:
        append_event(new, "submitted", job_id="2", cluster="slurm")

    _, told, watch = follow(
        tmp_path,
        new.root.mkdir,
        lambda: new.run_yaml.write_text("name: new\n"),
        submit,
        lambda: append_event(new, "started", attempt=1, job_id="2", cluster="slurm"),
        end(a),
        end(new),
    )
    assert told[0] == ("new", "started")
    assert {run.root.name for run in watch.runs.values()} == {"a", "new"}


@pytest.mark.parametrize("last", ["killed", "cancelled while it waited"])
def test_who_is_gone_is_asked_for_and_told_though_others_are_never_silent(
    tmp_path: Path,
    alive: dict[int, tuple[str, str, str, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    last: str,
) -> None:
    a, b = (make_run(tmp_path / name, job_id=number) for name, number in (("a", "1"), ("b", "2")))

    def go() -> None:
        del alive[1]
        if last != "killed":
            append_event(a, "cancel_asked")
        monkeypatch.setattr(fleet_follow, "_ASK_S", 0.0)  # a minute later
        append_event(b, "saved", name="step_9", emergency=False)

    code, told, watch = follow(tmp_path, go, end(b))
    assert [one for one in told if one[1] != "cancel_asked"] == [
        ("b", "saved"),
        ("a", "gone"),
        ("b", "ended"),
    ]
    assert code == (22 if last == "killed" else 23)
    assert watch.runs[a.root].state == ("gone" if last == "killed" else "cancelled")


def test_a_run_whose_job_is_held_is_told_once(
    tmp_path: Path, alive: dict[int, tuple[str, str, str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (make_run(tmp_path / name, job_id=number) for name, number in (("a", "1"), ("b", "2")))
    monkeypatch.setattr(fleet_follow, "_ASK_S", 0.0)  # a minute each
    alive[1] = ("PENDING", "JobHeldUser", "", "", "")
    _, told, _ = follow(tmp_path, lambda: None, lambda: None, end(b), end(a))
    assert told == [("a", "warning"), ("b", "ended"), ("a", "ended")]


def test_a_run_whose_last_start_could_not_begin_is_told_once(
    tmp_path: Path, alive: dict[int, tuple[str, str, str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (make_run(tmp_path / name, job_id=number) for name, number in (("a", "1"), ("b", "2")))
    monkeypatch.setattr(fleet_follow, "_ASK_S", 0.0)  # a minute each
    alive[1] = (
        "PENDING",
        "BeginTime",
        "",
        "",
        "verl-slurm: 2099-11-27T09:00 n1: python fails",
    )
    _, told, _ = follow(tmp_path, lambda: None, lambda: None, end(b), end(a))
    assert told == [("a", "warning"), ("b", "ended"), ("a", "ended")]


@pytest.mark.parametrize("last", ["it trains", "cancelled while it waits", "Slurm is silent"])
def test_a_run_whose_job_was_requeued_after_its_end_is_followed(
    tmp_path: Path,
    alive: dict[int, tuple[str, str, str, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    last: str,
) -> None:
    a, b = (make_run(tmp_path / name, kind, job_id="1") for name, kind in (("a", "failed"), ("b", "done")))
    (private_dir(tmp_path / "bin") / "squeue").write_text("")
    (tmp_path / "bin/squeue").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(fleet_follow, "_ASK_S", 0.0)  # a minute each
    alive[1] = ("PENDING", "BeginTime", f"{a.logs}/1.sh", "/", "")

    def start() -> None:
        append_event(a, "started", attempt=9, job_id="1", cluster="slurm")
        alive[1] = ("RUNNING", "", f"{a.logs}/1.sh", "/", "")

    def cancel() -> None:
        del alive[1]
        append_event(a, "cancel_asked")

    async def no_answer(_: SlurmClient, users: set[int]) -> dict[int, tuple[str, str, str, str, str]]:
        raise SlurmMissing("Slurm does not answer")

    real = SlurmClient.states
    acts: dict[str, list[Act]] = {
        "it trains": [lambda: None, start, end(a)],
        "cancelled while it waits": [lambda: None, cancel],
        "Slurm is silent": [
            lambda: monkeypatch.setattr(SlurmClient, "states", no_answer),
            lambda: monkeypatch.setattr(SlurmClient, "states", real),
            start,
            end(a),
        ],
    }
    code, told, watch = follow(tmp_path, *acts[last])
    rest = {"cancelled while it waits": [("a", "cancel_asked"), ("a", "gone")]}
    assert told == [("a", "warning"), *rest.get(last, [("a", "started"), ("a", "ended")])]
    assert code == (23 if last == "cancelled while it waits" else 0)
    assert watch.runs[b.root].state == "done"


def test_a_run_whose_directory_is_removed_is_not_waited_for(tmp_path: Path, alive: object) -> None:
    a, b = (make_run(tmp_path / name, job_id=number) for name, number in (("a", "1"), ("b", "2")))

    code, told, watch = follow(tmp_path, lambda: shutil.rmtree(a.root), lambda: None, end(b))
    assert (code, told) == (0, [("b", "ended")])
    assert watch.runs[a.root].state == "removed"


@pytest.mark.parametrize("what", ["lines", "hole"])
def test_of_a_journal_that_suddenly_is_huge_the_newest_events_are_told_at_once(
    tmp_path: Path, alive: object, what: str
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

    assert follow(tmp_path, swell, end(b), end(a))[1] == [("a", "verified"), ("b", "ended"), ("a", "ended")]


def test_what_came_in_the_place_of_a_journal_is_named_and_holds_no_other_run_up(
    tmp_path: Path, alive: object
) -> None:
    a, b = (make_run(tmp_path / name, job_id=number) for name, number in (("a", "1"), ("b", "2")))
    make_run(circle := tmp_path / "circle", "done")
    (circle / "events.jsonl").unlink()
    (circle / "events.jsonl").symlink_to("events.jsonl")

    def swap() -> None:
        append_event(a, "verified", name="step_9")
        a.events.unlink()
        os.mkfifo(a.events)

    code, told, watch = follow(tmp_path, swap, end(b))
    assert (code, told) == (ExitCode.PERMISSION, [("b", "ended")])
    assert {run.root.name: run.state for run in watch.runs.values()} == {
        "a": "events.jsonl: no regular file, but a pipe",
        "b": "done",
        "circle": "events.jsonl: no regular file, but a link",
    }


def test_nothing_that_lives_means_nothing_to_wait_for(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "done")
    make_run(tmp_path / "b", cluster="local", job_id="999999999", host=socket.gethostname())
    code, told, _ = follow(tmp_path)
    assert told == [("b", "gone")]
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
