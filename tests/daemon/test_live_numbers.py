"""What ranks say, as numbers."""

import pytest
from verl_slurm_daemon.metrics.live_numbers import LiveNumbers, queue_length

from tests.builders import run_config
from verl_slurm.trainer.state.position import Position, StepShape, rollout_offset
from verl_slurm.wire.messages import Finished, Progress, RankStarted


def progress(rank: int, **fields: object) -> Progress:
    facts: dict[str, object] = {
        "step": 1,
        "phase": "generate",
        "index": 2,
        "safe_points": 3,
        "new_rollouts": 0,
    }
    return Progress(rank=rank, **(facts | fields))  # type: ignore[arg-type]


CONFIG = run_config(batch_size_per_device=64, sampled_at_once=16, dp_size=4, tp_size=2)


@pytest.mark.parametrize(
    ("phase", "index", "waiting"),
    [("step_end", 0, 0), ("generate", 0, 0), ("generate", 3, 192), ("score", 0, 256), ("update", 9, 256)],
)
def test_the_queue_holds_what_is_sampled_until_the_step_is_done(phase: str, index: int, waiting: int) -> None:
    assert queue_length(CONFIG, phase, index) == waiting


@pytest.mark.torch
def test_the_queue_agrees_with_the_trainers_own_count() -> None:
    shape = StepShape.of(CONFIG)
    for index in range(shape.generations):
        consumed = rollout_offset(Position(5, "generate", index), shape) - rollout_offset(Position(5), shape)
        assert queue_length(CONFIG, "generate", index) == consumed


def test_the_rank_that_is_furthest_behind_gives_the_age() -> None:
    live = LiveNumbers(range(3))
    assert live.safe_point_age(0.0) is None
    live.feed(RankStarted(rank=0, pid=1), 10.0)
    live.feed(progress(1), 12.0)
    live.feed(progress(0), 15.0)
    live.feed(Finished(rank=2, step=1), 3.0)
    assert live.safe_point_age(20.0) == 8.0


def test_new_rollouts_are_added_up_over_ranks_and_starts() -> None:
    live = LiveNumbers(range(2))
    for message, now in ((progress(0, new_rollouts=4), 1.0), (progress(1, new_rollouts=4), 2.0)):
        live.feed(message, now)
    live.feed(progress(0, new_rollouts=4), 3.0)
    assert (live.num_rollouts, live.rollouts_at) == (8, 2.0)
    live.new_restart()
    live.feed(progress(0, new_rollouts=3), 9.0)
    assert (live.num_rollouts, live.rollouts_at) == (11, 9.0)


def test_memory_is_what_a_rank_said_and_no_other_has_a_number() -> None:
    live = LiveNumbers(range(2))
    live.feed(progress(0), 1.0)
    assert live.gpu_percent == {}
    live.feed(progress(0, gpu_memory_percent=91.5), 1.0)
    live.feed(progress(0), 2.0)
    assert live.gpu_percent == {0: 91.5}
    live.new_restart()
    assert (live.gpu_percent, live.heard) == ({}, {})
    live = LiveNumbers(range(2))
    for rank in (-1, 2, 10**9):
        live.feed(progress(rank, gpu_memory_percent=1.0, new_rollouts=5), 1.0)
    assert (live.heard, live.gpu_percent, live.num_rollouts) == ({}, {}, 0)
