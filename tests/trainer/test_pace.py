"""When a run saves, as all its ranks decide it, and what it says of that and of its storage."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.builders import run_config
from tests.fakes.daemon import Daemon
from tests.journals import append_event
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import CheckpointConfig, StepInterval
from verl_slurm.loops.session import Session
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer.reporter import Reporter
from verl_slurm.trainer.save_pace import SavePace
from verl_slurm.trainer.state.position import Position
from verl_slurm.trainer.state.train_state import TrainState, fresh_state

pytestmark = pytest.mark.torch

TOTAL = 1000


class FollowsRankZero(Collective):
    """Another rank than the first, to whom the first says `steps`."""

    def __init__(self, steps: int) -> None:
        super().__init__(None)
        self.rank, self._steps = 1, steps
        self.mine: list[int] = []

    def max(self, values: Any) -> list[int]:
        self.mine += values
        return [self._steps]


class Run:
    """A rank that trains without work: a step takes `step_s`, a save `save_s` of it and is then durable."""

    def __init__(self, root: Path, checkpoint: CheckpointConfig, ranks: Collective | None = None) -> None:
        self.now, self.line = 0.0, Daemon()
        self.config = run_config(steps=TOTAL, checkpoint=checkpoint)
        self.state: TrainState = fresh_state(self.config)
        self.paths = RunPaths(private_dir(root / "run"))
        ranks = ranks or Collective(None)
        session = Session(self.line, rank=ranks.rank, world_size=ranks.world_size)
        reporter = Reporter(session, total_steps=TOTAL, tensorboard=root / "tb", first_step=0)
        self.pace = SavePace(
            self.config, self.paths, ranks, reporter, step=0, state_bytes=1, clock=lambda: self.now
        )

    def train(self, to: int, *, step_s: float = 1.0, save_s: float = 0.0, fails: bool = False) -> list[int]:
        """The steps at which it saved."""
        saved = []
        for step in range(self.state.position.step + 1, to + 1):
            self.now += step_s
            self.state.position = Position(step)
            if self.pace.due(self.state).save:
                saved.append(step)
                self.pace.save_starts(step)
                self.now += save_s
                if fails:
                    self.pace.save_failed("the disk is full")
                else:
                    self.pace.saved(num_bytes=10, seconds=save_s)
        return saved


def test_fixed_is_as_it_always_was_and_says_nothing_of_it(tmp_path: Path) -> None:
    run = Run(tmp_path, CheckpointConfig(every_steps=10, runtime_every_steps=4))
    assert run.train(20) == [4, 8, 10, 12, 16, 20]
    assert run.line.notices("cadence") == []


def test_the_table_is_followed_and_each_new_interval_is_said_once(tmp_path: Path) -> None:
    rows = (StepInterval(until_step=6, every=2), StepInterval(every=5))
    run = Run(tmp_path, CheckpointConfig(cadence="adaptive", intervals=rows))
    assert run.train(15) == [2, 4, 6, 10, 15]
    assert run.line.notices("cadence") == [
        "saves once in 2 steps: intervals up to step 6",
        "saves once in 5 steps: the last row of intervals",
    ]


def test_a_volatile_loss_halves_the_interval_of_the_running_training(tmp_path: Path) -> None:
    run = Run(tmp_path, CheckpointConfig(cadence="adaptive", intervals=(StepInterval(every=20),)))
    run.state.history = [
        {"policy_loss": 0.01 * (-1) ** i, "value_loss": 1.0 + 0.02 * (-1) ** i} for i in range(64)
    ]
    assert run.train(20) == [20]
    run.state.history += [{"policy_loss": 3.0, "value_loss": 1.0}] * 4
    assert run.train(40) == [30, 40]
    assert "half of 20, volatile: policy_loss" in run.line.notices("cadence")[-1]


def test_young_daly_learns_what_a_save_costs_and_then_keeps_to_the_optimum(tmp_path: Path) -> None:
    checkpoint = CheckpointConfig(cadence="young_daly", every_steps=500, expected_mtbi_h=1.0)
    run = Run(tmp_path, checkpoint)
    saved = run.train(300, save_s=2.0)
    # By hand: sqrt(2 * 2 s * 3600 s) = 120 s, a little more by Daly's terms, less the save.
    gaps = [later - earlier for earlier, later in pairwise(saved[1:])]
    assert saved[0] == 2
    assert gaps
    assert all(115 <= gap <= 130 for gap in gaps)
    assert "Young/Daly: a save costs 2 s, work is lost every 1" in run.line.notices("cadence")[-1]


def test_young_daly_counts_the_interruptions_that_the_journal_tells_of(tmp_path: Path) -> None:
    checkpoint = CheckpointConfig(cadence="young_daly", every_steps=500, expected_mtbi_h=1.0)
    paths = RunPaths(private_dir(tmp_path / "run"))
    for attempt in range(1, 5):
        append_event(paths, "started", attempt=attempt)
        append_event(paths, "crash", attempt=attempt)
        append_event(paths, "ended", attempt=attempt)
    crashing = Run(tmp_path, checkpoint).train(300, save_s=2.0)
    (tmp_path / "calm").mkdir()
    calm = Run(tmp_path / "calm", checkpoint).train(300, save_s=2.0)
    assert len(crashing) > 2 * len(calm) - 2
    assert crashing[2] - crashing[1] < 60 < calm[2] - calm[1]


def test_continuous_saves_at_each_step_where_a_save_is_durable_before_the_next(tmp_path: Path) -> None:
    run = Run(tmp_path, CheckpointConfig(cadence="continuous", every_steps=500))
    assert run.train(5) == [1, 2, 3, 4, 5]
    run.pace.save_starts(5)  # one that takes longer
    assert run.train(8) == []
    run.pace.saved(num_bytes=10, seconds=3.5)
    assert run.train(9) == [9]


def test_a_rank_takes_the_interval_of_rank_zero_whatever_it_measured_itself(tmp_path: Path) -> None:
    ranks = FollowsRankZero(7)
    run = Run(tmp_path, CheckpointConfig(cadence="young_daly", every_steps=500), ranks)
    assert run.train(30, step_s=99.0, save_s=5.0) == [7, 14, 21, 28]
    assert set(ranks.mine) == {0}
    assert run.line.told == []


def test_where_every_save_fails_not_every_step_tries(tmp_path: Path) -> None:
    run = Run(tmp_path, CheckpointConfig(cadence="adaptive", intervals=(StepInterval(every=10),)))
    assert run.train(35, fails=True) == [10, 20, 30]
    assert run.line.notices("storage") == [
        "the run's storage is FAILING: the last save failed: the disk is full"
    ]


def test_no_room_is_said_with_figures_before_the_failure_it_foretells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_slurm.checkpoint.decide.storage import FreeSpace
    from verl_slurm.checkpoint.store import medium

    monkeypatch.setattr(medium, "free_space", lambda _: FreeSpace(bytes=1000, inodes=10**6))
    run = Run(tmp_path, CheckpointConfig(every_steps=5, runtime_every_steps=5))
    run.train(5, fails=True)
    first, second = run.line.notices("storage")
    assert "no room for the next save: 0.001 MB free, 0.0328 MB needed (models and optimizers)" in first
    assert "FAILING" in second


def test_a_save_that_was_asked_for_counts_as_the_last_one(tmp_path: Path) -> None:
    checkpoint = CheckpointConfig(cadence="young_daly", every_steps=10)
    run = Run(tmp_path, checkpoint, FollowsRankZero(10))
    assert run.train(6) == []
    run.pace.save_starts(6)
    run.pace.saved(num_bytes=10, seconds=0.1)
    assert run.train(20) == [16]
