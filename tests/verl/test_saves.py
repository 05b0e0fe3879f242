"""What verl's PPO loop does between two of its steps: when it asks, what it saves, and how its end is judged."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.daemon import Daemon
from verl_slurm.base.errors import Fenced, VerlSlurmError
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.loops.session import Session
from verl_slurm.verl.tracker import tracker_file
from verl_slurm.wire.messages import (
    Finished,
    FromRank,
    Progress,
    RankSaved,
    RankSaveFailed,
    SaveRequest,
    SaveStarted,
    Stopped,
)

pytestmark = pytest.mark.torch


def saves_of(session: Session) -> Any:
    from verl_slurm.loops.step_end import StepEndSaver
    from verl_slurm.loops.verl.verl_ppo_saves import Saves
    from verl_slurm.save.ranks.collective import Collective

    ranks = Collective(None)
    return Saves(StepEndSaver(session, ranks, guest="verl", world_size=2, texts=tracker_file, beside=True))


class Run:
    """A run whose verl is a function that writes one file."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(private_dir(root / "run"))
        private_dir(self.paths.checkpoints)
        private_dir(self.paths.control)
        write_file(self.paths.run_yaml, b"name: run\n")
        self.attempt = take_attempt(self.paths, job_id="1", restart=0).attempt
        self.line = Daemon()
        self.now_s = 0.0
        self.session = Session(
            self.line,
            rank=0,
            world_size=1,
            paths=self.paths,
            attempt=self.attempt,
            clock=lambda: self.now_s,
        )
        self.saves = saves_of(self.session)
        self.calls: list[int] = []

    def writes(self, step: int) -> Callable[[], None]:
        def write() -> None:
            self.calls.append(step)
            directory = self.paths.work(self.attempt) / f"global_step_{step}"
            directory.mkdir(parents=True)
            (directory / "data.pt").write_bytes(b"state")

        return write

    def step(self, step: int, *, periodic: bool = False) -> bool:
        self.saves.numbers({"actor/loss": 0.5, "text": "none"})
        if periodic:
            self.saves.save(step, self.writes(step))
        left: bool = self.saves.step_end(step, self.writes(step))
        self.saves.step_done(step, {"actor/loss": 0.5})
        return left

    def ask(self, *, stop: bool = True, seconds_left: float | None = None) -> None:
        self.line.asked = SaveRequest(request_id=1, stop=stop, seconds_left=seconds_left)

    def leaves_in_sampling(self, step: int, *, steps_s: float = 300.0, save_s: float | None = None) -> bool:
        """A look at the request while the step after `step` is being sampled."""
        self.session._steps_s.append(steps_s)
        self.session.save_s = self.session.save_s if save_s is None else save_s
        self.saves.saver.leaves_early = True
        self.saves.numbers({"actor/loss": 0.125})
        left: bool = self.saves.leave_early(step, self.writes(step))
        return left

    def saved(self) -> list[tuple[str, int]]:
        return [(message.name, message.request_id) for message in self.line.heard(RankSaved)]

    def story(self) -> list[type]:
        return [type(m) for m in self.line.told if isinstance(m, SaveStarted | RankSaved | Stopped)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.saves.saver._watch.stop()


def test_a_periodic_save_is_committed_with_verls_tracker_beside_it(run: Run) -> None:
    run.saves.begin(0, 2)
    assert not run.step(1, periodic=True)
    assert not run.step(2, periodic=True)
    run.saves.end(2)
    assert run.saved() == [("step_000001", 0), ("step_000002", 0)]
    assert [message.reason for message in run.line.heard(RankSaved)] == [
        "trainer.save_freq",
        "all steps are done",
    ]
    assert run.line.heard(Finished)
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
    assert run.saved() == [("step_000002", 1)]
    assert run.story() == [SaveStarted, RankSaved, Stopped]
    rows = run.paths.steps.read_bytes().splitlines()
    assert [b'"step":1' in rows[0], b'"step":2' in rows[1], len(rows)] == [True, True, 2]
    said = [type(m) for m in run.line.told if isinstance(m, Progress | SaveStarted)]
    assert said[-1] is SaveStarted, "behind it the daemon has patience with storage until the next safe point"
    assert not run.line.heard(Finished)


def test_a_request_before_the_periodic_save_of_the_same_step_is_answered_with_that_one(run: Run) -> None:
    run.saves.begin(0, 9)
    run.ask()
    assert run.step(1, periodic=True)
    run.saves.end(1)
    assert run.calls == [1]
    assert run.saved() == [("step_000001", 1)]
    assert run.story() == [SaveStarted, RankSaved, Stopped]
    assert len(run.paths.steps.read_bytes().splitlines()) == 1


def test_a_request_behind_the_periodic_save_of_the_same_step_is_answered_with_that_one(run: Run) -> None:
    run.saves.begin(0, 9)
    run.saves.save(1, run.writes(1))
    run.ask()
    assert run.saves.step_end(1, run.writes(1))
    assert run.calls == [1], "verl would have written into the directory that was moved away"
    assert run.saved() == [("step_000001", 0), ("step_000001", 1)]


def test_an_operators_request_is_a_save_and_the_loop_goes_on(run: Run) -> None:
    run.saves.begin(0, 2)
    run.ask(stop=False)
    assert not run.step(1)
    assert not run.step(2, periodic=True)
    run.saves.end(2)
    assert run.saved() == [("step_000001", 1), ("step_000002", 0)]
    assert run.line.heard(Finished)


def test_a_request_whose_save_fails_is_answered_too_and_the_loop_leaves(run: Run) -> None:
    run.saves.begin(0, 9)
    run.ask()
    assert run.saves.step_end(1, lambda: None), "verl wrote nothing"
    (failed,) = run.line.heard(RankSaveFailed)
    assert failed.request_id == 1


def test_a_run_that_somebody_else_owns_is_not_trained_on(run: Run) -> None:
    run.saves.begin(0, 9)
    take_attempt(run.paths, job_id="2", restart=0)
    run.step(1, periodic=True)
    with pytest.raises(Fenced):
        run.step(2, periodic=True)


def test_a_run_that_is_resumed_behind_its_last_step_is_done(run: Run) -> None:
    run.session.resume = run.paths.checkpoints / "step_000009"
    run.saves.begin(9, 9)
    run.saves.end(9)
    assert [message.step for message in run.line.heard(Finished)] == [9]


def test_a_run_whose_last_step_was_not_committed_is_not_done(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_slurm.loops.step_end.LAST_TRIES_S", (0.01, 0.02))
    run.session.resume = run.paths.checkpoints / "step_000007"
    run.saves.begin(7, 9)
    run.step(8, periodic=True)
    run.saves.save(9, lambda: None)
    assert "No such file" in run.line.heard(RankSaveFailed)[0].reason
    with pytest.raises(VerlSlurmError, match="could not be saved"):
        run.saves.end(9)
    assert not run.line.heard(Finished)


def test_without_a_daemon_verl_saves_and_nothing_is_committed(tmp_path: Path) -> None:
    saves = saves_of(Session.open({}))
    wrote: list[int] = []
    saves.begin(0, 1)
    saves.save(1, lambda: wrote.append(1))
    assert not saves.step_end(1, lambda: wrote.append(2))
    saves.end(1)
    assert wrote == [1]


# ---- the end, PPO's and SFT's


def ended(step: int, *, saved: int, began: int = 0, stopping: SaveRequest | None = None) -> list[FromRank]:
    from verl_slurm.loops.verl.verl_ppo_saves import last_words

    line = Daemon()
    session = Session(line, rank=1, world_size=2, paths=RunPaths("/runs/one"))
    saver: Any = SimpleNamespace(
        session=session, saved_step=saved, stopping=stopping, leave=lambda: session.stopped(3)
    )
    last_words(saver, step=step, total=16, began=began)
    return line.told


STOP = SaveRequest(request_id=3, stop=True)


def test_the_last_step_done_and_committed_is_the_end() -> None:
    assert ended(16, saved=16) == [Finished(rank=1, step=16)]
    assert ended(16, saved=16, stopping=STOP) == [Finished(rank=1, step=16)], "a request changes nothing"


def test_it_leaves_as_asked() -> None:
    assert ended(7, saved=7, stopping=STOP) == [Stopped(rank=1, request_id=3)]
    assert ended(7, saved=5, stopping=STOP) == [Stopped(rank=1, request_id=3)]


@pytest.mark.parametrize(
    ("step", "saved", "began", "words"),
    [
        (8, 8, 8, r"without a single step.*found step 8, expected step 16"),
        (12, 8, 8, r"before its last step.*found step 12, expected step 16"),
        (16, 8, 8, r"could not be saved.*newest save is of step 8"),
    ],
    ids=["an epoch of no steps", "too few epochs", "the last save failed"],
)
def test_anything_else_is_a_crash_with_words(step: int, saved: int, began: int, words: str) -> None:
    with pytest.raises(VerlSlurmError, match=words):
        ended(step, saved=saved, began=began)


def test_a_long_step_is_left_while_it_is_sampled_with_a_save_of_the_one_before(run: Run) -> None:
    run.saves.begin(0, 9)
    run.step(1)
    run.step(2)
    assert not run.leaves_in_sampling(2), "nobody has asked"
    run.ask(seconds_left=30.0)
    assert run.leaves_in_sampling(2)
    run.saves.end(2)
    assert (run.calls, run.saved()) == ([2], [("step_000002", 1)])
    assert run.story() == [SaveStarted, RankSaved, Stopped]
    assert not run.line.heard(RankSaveFailed), "the watch refuses nothing that the loop answers"


def test_a_step_whose_end_comes_in_time_is_not_left(run: Run) -> None:
    run.saves.begin(0, 9)
    run.step(1)
    run.ask(seconds_left=30.0)
    assert not run.leaves_in_sampling(1, steps_s=2.0)
    assert run.step(2)
    run.saves.end(2)
    assert run.saved() == [("step_000002", 1)]


def test_what_is_saved_already_is_the_answer_at_once(run: Run) -> None:
    run.saves.begin(0, 9)
    run.step(1, periodic=True)
    run.saves.saver.settle()
    run.ask(seconds_left=30.0)
    assert run.leaves_in_sampling(1)
    run.saves.end(1)
    assert (run.calls, run.saved()) == ([1], [("step_000001", 0), ("step_000001", 1)])


def test_a_save_that_does_not_fit_is_not_begun_and_the_loop_leaves_all_the_same(run: Run) -> None:
    run.saves.begin(0, 9)
    run.step(1)
    run.ask(seconds_left=30.0)
    assert run.leaves_in_sampling(1, save_s=45.0)
    run.saves.end(1)
    [failed] = run.line.heard(RankSaveFailed)
    assert (run.calls, failed.request_id) == ([], 1)
    assert "step 1 is not saved: a save takes 45.0 s, and 30.0 s are left" in failed.reason


def test_a_validation_lives_by_the_prompts_that_are_answered_and_not_by_the_wait(run: Run) -> None:
    run.saves.begin(0, 9)
    run.step(1)
    run.line.told.clear()
    for num_running in (8, 8, 8, 7, 7, 7, 6):
        run.now_s += 100.0
        run.saves.validates(0, num_running)
    assert [(m.step, m.phase) for m in run.line.heard(Progress)] == [(1, "evaluate")] * 3


def test_a_validation_before_the_first_step_belongs_to_the_start(run: Run) -> None:
    run.now_s += 100.0
    run.saves.validates(0, 8)
    assert run.line.kinds() == ["RankStarted"], "a loop that has not begun cannot be asked to save"
    run.saves.begin(0, 9)


def test_before_the_first_step_is_done_there_is_nothing_to_save(run: Run) -> None:
    run.saves.begin(0, 9)
    run.ask(seconds_left=30.0)
    assert run.leaves_in_sampling(0)
    run.saves.end(0)
    assert (run.calls, [m.reason for m in run.line.heard(RankSaveFailed)]) == ([], ["no step is done yet"])


def test_an_operators_save_does_not_end_a_step(run: Run) -> None:
    run.saves.begin(0, 9)
    run.step(1)
    run.ask(stop=False, seconds_left=30.0)
    assert not run.leaves_in_sampling(1)
