"""What is done between two of verl's steps: who is asked, what is committed, and what is said."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from verl_slurm.checkpoint.catalog import list_checkpoints
from verl_slurm.checkpoint.storage import FreeSpace, Need, Room
from verl_slurm.checkpoint.verify import read_manifest
from verl_slurm.config.schema import CheckpointConfig
from verl_slurm.errors import Fenced, VerlSlurmError
from verl_slurm.fence import take_epoch
from verl_slurm.files import private_dir, write_file
from verl_slurm.guest.keeping import Keeper
from verl_slurm.guest.session import Session
from verl_slurm.guest.tree import SavedTree, commit_tree
from verl_slurm.paths import RunPaths
from verl_slurm.verl import saves as saves_module
from verl_slurm.verl.saves import EndNotSaved, NothingDone, Saves
from verl_slurm.wire.messages import (
    Finished,
    FromRank,
    Notice,
    Saved,
    SaveFailed,
    SaveRequest,
    SaveStarted,
    Stopped,
)


class Line:
    """An agent that a test plays."""

    def __init__(self) -> None:
        self.said: list[FromRank] = []
        self.asked: SaveRequest | None = None

    def send(self, message: FromRank) -> None:
        self.said.append(message)

    def request(self) -> SaveRequest | None:
        return self.asked

    def of(self, kind: type[FromRank]) -> list[FromRank]:
        return [message for message in self.said if isinstance(message, kind)]


class Run:
    """A run whose verl is a function that writes one file."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(private_dir(root / "run"))
        private_dir(self.paths.checkpoints)
        private_dir(self.paths.control)
        write_file(self.paths.run_yaml, b"name: run\n")
        self.epoch = take_epoch(self.paths, job_id="1", restart=0).epoch
        self.line, self.now = Line(), 1000.0
        self.session = Session(
            self.line, rank=0, world_size=1, paths=self.paths, epoch=self.epoch, clock=lambda: self.now
        )
        self.saves = Saves(self.session, 2, clock=lambda: self.now)
        self.calls: list[int] = []

    def write(self, step: int) -> None:
        self.calls.append(step)
        self.saves.writing()
        directory = self.paths.work(self.epoch) / f"global_step_{step}"
        directory.mkdir(parents=True)
        (directory / "data.pt").write_bytes(b"state")
        self.saves.written(step, directory)

    def step(self, step: int, *, periodic: bool = False) -> bool:
        self.saves.numbers({"actor/loss": 0.5, "text": "none"})
        if periodic:
            self.write(step)
        left = self.saves.step_end(step, lambda: self.write(step))
        self.saves.step_done(step, {"actor/loss": 0.5})
        return left

    def ask(self, *, stop: bool = True, seconds_left: float | None = None, number: int = 1) -> None:
        self.line.asked = SaveRequest(request_id=number, stop=stop, seconds_left=seconds_left)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_periodic_save_is_committed_with_verls_tracker_beside_it(run: Run) -> None:
    run.saves.begin(0, 2)
    assert not run.step(1, periodic=True)
    assert not run.step(2, periodic=True)
    run.saves.end(2)
    assert [message.name for message in run.line.of(Saved)] == ["step_000001", "step_000002"]
    assert run.line.of(Finished)
    step = run.paths.checkpoints / "step_000002"
    assert (step / "latest_checkpointed_iteration.txt").read_bytes() == b"2"
    manifest = read_manifest(step)
    assert (manifest.guest, manifest.world_size, manifest.step) == ("verl", 2, 2)
    assert manifest.metrics == {"actor/loss": 0.5}
    assert "global_step_2/data.pt" in {entry.path for entry in manifest.files}


def test_a_request_to_stop_is_answered_with_a_save_of_this_step_and_its_numbers(run: Run) -> None:
    run.saves.begin(0, 9)
    run.step(1)
    run.ask()
    assert run.step(2)
    run.saves.end(2)
    assert run.calls == [2]
    (saved,) = run.line.of(Saved)
    assert (saved.name, saved.request_id) == ("step_000002", 1)
    kinds = [type(m) for m in run.line.said if isinstance(m, SaveStarted | Saved | Stopped)]
    assert kinds == [SaveStarted, Saved, Stopped]
    rows = run.paths.steps.read_bytes().splitlines()
    assert [b'"step":1' in rows[0], b'"step":2' in rows[1], len(rows)] == [True, True, 2]
    assert not run.line.of(Finished)


def test_a_request_before_the_periodic_save_of_the_same_step_is_answered_with_that_one(run: Run) -> None:
    run.saves.begin(0, 9)
    run.ask()
    assert run.step(1, periodic=True)
    assert run.calls == [1]
    assert [(m.name, m.request_id) for m in run.line.of(Saved)] == [("step_000001", 1)]
    kinds = [type(m) for m in run.line.said if isinstance(m, SaveStarted | Saved | Stopped)]
    assert kinds == [SaveStarted, Saved, Stopped]
    assert len(run.paths.steps.read_bytes().splitlines()) == 1


def test_a_request_behind_the_periodic_save_of_the_same_step_is_answered_with_that_one(run: Run) -> None:
    run.saves.begin(0, 9)
    run.write(1)
    run.ask()
    assert run.saves.step_end(1, lambda: run.write(1))
    assert run.calls == [1], "verl would have written into the directory that was moved away"
    assert [(m.name, m.request_id) for m in run.line.of(Saved)] == [("step_000001", 0), ("step_000001", 1)]


def test_an_operators_request_is_a_save_and_the_loop_goes_on(run: Run) -> None:
    run.saves.begin(0, 2)
    run.ask(stop=False)
    assert not run.step(1)
    assert not run.step(2, periodic=True)
    run.saves.end(2)
    assert [(m.name, m.request_id) for m in run.line.of(Saved)] == [("step_000001", 1), ("step_000002", 0)]
    assert run.line.of(Finished)


def test_a_step_whose_end_cannot_be_reached_is_said_at_once_and_nothing_is_saved(run: Run) -> None:
    run.saves.begin(0, 9)
    for step in (1, 2):
        run.now += 100.0
        run.step(step)
    run.ask(seconds_left=30.0)
    deadline = time.monotonic() + 10
    while not run.line.of(SaveFailed):  # the watcher's
        assert time.monotonic() < deadline
    (failed,) = run.line.of(SaveFailed)
    assert failed.request_id == 1
    assert "cannot be reached: steps take up to 100.0 s" in failed.reason
    assert not run.step(3), "the job is on its way out; what it does until then is nobody's business"
    assert run.calls == []
    run.step(9, periodic=True)
    run.saves.end(9)


def test_a_save_that_is_under_way_is_not_thrown_away_with_the_step(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who gives up is ended at once; so the commit of the step before is waited for."""
    may_commit = threading.Event()

    def slow(*args: Any, **named: Any) -> SavedTree:
        assert may_commit.wait(10)
        return commit_tree(*args, **named)

    monkeypatch.setattr(saves_module, "commit_tree", slow)
    run.saves.begin(0, 9)
    for step in (1, 2, 3):
        run.now += 100.0
        run.step(step, periodic=step == 3)
    run.ask(seconds_left=30.0)
    run.saves._look()
    assert not run.line.of(SaveFailed)
    may_commit.set()
    run.saves._wait()
    run.saves._look()
    assert [m.name for m in run.line.of(Saved)] == ["step_000003"]  # type: ignore[union-attr]
    assert len(run.line.of(SaveFailed)) == 1
    run.saves.left_at = 3
    run.saves.end(3)


def test_while_verl_writes_the_watcher_gives_nothing_up(run: Run) -> None:
    run.saves.begin(0, 9)
    for step in (1, 2, 3):
        run.now += 100.0
        run.step(step)
    run.saves.writing()
    run.ask(seconds_left=1.0)
    run.saves._look()
    assert not run.line.of(SaveFailed)
    run.saves.left_at = 3
    run.saves.end(3)


def test_the_first_step_of_a_start_tells_nothing_of_the_next(run: Run) -> None:
    run.saves.begin(4, 9)
    run.now += 100.0
    run.step(5)
    run.ask(seconds_left=30.0)
    assert run.saves._reach(run.line.asked).ok
    run.line.asked = None
    run.now += 3.0
    run.step(6)
    run.ask(seconds_left=30.0)
    verdict = run.saves._reach(run.line.asked)
    assert verdict.ok
    assert verdict.needed_s == pytest.approx(3.3)


def test_a_save_that_is_not_committed_is_said_and_the_next_one_is_tried(run: Run) -> None:
    run.saves.begin(0, 2)
    directory = run.paths.work(run.epoch) / "global_step_1"
    directory.mkdir(parents=True)
    (directory / "link").symlink_to("/etc/passwd")
    run.saves.written(1, directory)
    run.saves.step_end(1, lambda: None)
    run.step(2, periodic=True)
    run.saves.end(2)
    assert [message.name for message in run.line.of(Saved)] == ["step_000002"]
    assert any("step 1 was not committed" in getattr(message, "text", "") for message in run.line.said)


def test_a_request_whose_save_fails_is_answered_too_and_the_loop_leaves(run: Run) -> None:
    run.saves.begin(0, 9)
    run.ask()
    assert run.saves.step_end(1, lambda: None), "verl wrote nothing"
    (failed,) = run.line.of(SaveFailed)
    assert failed.request_id == 1


def test_a_run_that_somebody_else_owns_is_not_trained_on(run: Run) -> None:
    run.saves.begin(0, 9)
    take_epoch(run.paths, job_id="2", restart=0)
    run.write(1)
    with pytest.raises(Fenced):
        run.write(2)


def test_a_loop_that_ends_before_its_last_step_is_a_crash_with_words(run: Run) -> None:
    run.saves.begin(4, 9)
    with pytest.raises(NothingDone, match="step 4 of 9, no step at all"):
        run.saves.end(4)
    assert not run.line.of(Finished)


def test_a_run_that_is_resumed_behind_its_last_step_is_done(run: Run) -> None:
    run.saves.begin(9, 9)
    run.saves.end(9)
    assert [message.step for message in run.line.of(Finished)] == [9]


def test_a_run_whose_last_step_was_not_committed_is_not_done(run: Run) -> None:
    run.saves.begin(7, 9)
    run.step(8, periodic=True)
    run.step(9, periodic=True)
    run.saves.end(9)
    assert [message.step for message in run.line.of(Finished)] == [9]

    run.saves.begin(9, 11)
    run.step(10, periodic=True)
    link = run.paths.work(run.epoch) / "global_step_11"
    link.mkdir()
    (link / "data.pt").symlink_to("/etc/hostname")
    run.saves.written(11, link)
    with pytest.raises(EndNotSaved, match="no checkpoint of step 11"):
        run.saves.end(11)
    assert len(run.line.of(Finished)) == 1


def test_without_a_daemon_nothing_is_committed_and_nothing_asked(tmp_path: Path) -> None:
    saves = Saves(Session.open({}), 2)
    saves.begin(0, 1)
    directory = tmp_path / "global_step_1"
    directory.mkdir()
    saves.written(1, directory)
    assert not saves.step_end(1, lambda: None)
    saves.end(1)
    assert directory.is_dir()


def test_nothing_done_is_an_error_of_ours() -> None:
    assert issubclass(NothingDone, VerlSlurmError)


def keeping(run: Run, keep_last: int = 2) -> None:
    config = CheckpointConfig(keep_last=keep_last)
    run.saves = Saves(run.session, 2, keeper=Keeper(run.session, config))


def names(run: Run) -> list[str]:
    return [info.name for info in list_checkpoints(run.paths) if info.kind == "committed"]


def test_older_checkpoints_go_as_checkpoint_keep_last_says_also_those_of_former_lives(run: Run) -> None:
    run.saves.begin(0, 9)
    for step in (1, 2, 3):
        run.step(step, periodic=True)
    run.saves._wait()
    assert len(names(run)) == 3  # nobody was there to let any go
    keeping(run)
    run.saves.begin(3, 9)
    run.step(4, periodic=True)
    run.step(5, periodic=True)
    run.saves._wait()
    assert names(run) == ["step_000005", "step_000004"]


def test_a_periodic_save_that_would_not_fit_is_not_begun_and_is_said(run: Run) -> None:
    def full(_: Path, need: Need) -> Room:
        return Room(enough=False, reason="1 MB free", free=FreeSpace(), need=need)

    run.saves = Saves(run.session, 2, room=full)
    run.saves.begin(0, 9)
    assert run.saves.may_write(1)  # nobody knows yet how large one is
    run.step(1, periodic=True)
    run.saves._wait()
    assert not run.saves.may_write(2)
    assert "1 MB free" in str(run.line.of(Notice))
    run.ask()
    assert run.saves.may_write(2)  # all that is left is to try
    run.line.asked = None
    assert run.saves.may_write(9)


def test_what_was_resumed_from_tells_how_large_the_next_one_will_be(run: Run) -> None:
    run.saves.begin(0, 9)
    run.step(1, periodic=True)
    run.saves._wait()
    asked: list[Need] = []

    def ask(_: Path, need: Need) -> Room:
        asked.append(need)
        return Room(enough=None, reason="", free=FreeSpace(), need=need)

    run.session.resume = run.paths.checkpoint(1)
    saves = Saves(run.session, 2, room=ask)
    saves.begin(1, 9)
    assert saves.may_write(2)
    assert asked[0].bytes > 0
