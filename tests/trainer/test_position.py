"""The state machine of a step: its order, its names, and what has been consumed where."""

from dataclasses import replace

import pytest

from tests.builders import run_config
from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.base.paths import CHECKPOINT_NAME, RunPaths
from verl_slurm.trainer.state.position import (
    Position,
    StepShape,
    after,
    check_position,
    rollout_offset,
    safe_point,
)

SHAPE = StepShape.of(run_config(ranks=2, sampled_at_once=4, sizes=(12, 6, 6), ppo_epochs=2))


def _walk(steps: int) -> list[Position]:
    positions = [Position()]
    while positions[-1] != Position(steps):
        positions.append(after(positions[-1], SHAPE))
    return positions


def test_a_step_goes_through_its_phases_in_order() -> None:
    assert [str(position) for position in _walk(1)] == [
        "step 0 step_end 0",
        "step 0 generate 1",
        "step 0 generate 2",
        "step 0 score 0",
        "step 0 score 1",
        "step 0 advantage 0",
        "step 0 update 0",
        "step 0 update 1",
        "step 0 update 2",
        "step 0 update 3",
        "step 1 step_end 0",
    ]


def test_safe_points_count_up_by_one_and_prompts_consumed_are_exact_at_each() -> None:
    assert [safe_point(position, SHAPE) for position in _walk(2)] == [*range(10), *range(10), 0]
    assert SHAPE.prompts == 24
    offsets = [rollout_offset(position, SHAPE) for position in _walk(2)]
    assert offsets == [0, 8, 16, *[24] * 8, 32, 40, *[48] * 8]


def test_entering_a_step_and_its_first_generation_are_the_same_place() -> None:
    at_end, at_first = Position(3), Position(3, "generate")
    assert after(at_end, SHAPE) == after(at_first, SHAPE)
    assert safe_point(at_end, SHAPE) == safe_point(at_first, SHAPE) == 0
    assert rollout_offset(at_end, SHAPE) == rollout_offset(at_first, SHAPE)


def test_an_evaluation_is_one_place_between_the_last_update_and_the_steps_end() -> None:
    shape = replace(SHAPE, eval_every=3, total_steps=8)
    assert [step for step in range(8) if shape.evaluates(step)] == [2, 5, 7]
    last = Position(2, "update", 3)
    there = after(last, shape)
    assert str(there) == "step 2 evaluate 0"
    assert after(there, shape) == Position(3)
    assert safe_point(there, shape) == safe_point(last, shape) + 1
    assert rollout_offset(there, shape) == rollout_offset(Position(3), shape)
    check_position(there, SHAPE, where="a run whose evaluation was switched off since")
    with pytest.raises(CheckpointCorrupt):
        check_position(Position(2, "evaluate", 1), shape, where="here")
    assert after(Position(3, "update", 3), shape) == Position(4)
    assert after(last, SHAPE) == Position(3)


def test_every_position_has_a_checkpoint_name_that_sorts_like_it() -> None:
    names = [RunPaths("/r").checkpoint(p.step, safe_point(p, SHAPE)).name for p in _walk(2)]
    assert len(set(names)) == len(names)
    assert all(CHECKPOINT_NAME.fullmatch(name) for name in names)
    assert sorted(names) == names


@pytest.mark.parametrize(
    "position", [Position(1, "generate", 3), Position(1, "update", 4), Position(1, "step_end", 1)]
)
def test_a_position_outside_its_phase_is_refused(position: Position) -> None:
    with pytest.raises(CheckpointCorrupt):
        check_position(position, SHAPE, where="x")


def test_what_is_consumed_counts_responses_and_whole_groups_of_them() -> None:
    config = run_config(ranks=2, sampled_at_once=8, samples_per_prompt=4, algorithm="grpo", sizes=(24, 12, 6))
    shape = StepShape.of(config)
    offsets = [rollout_offset(Position(1, "generate", index), shape) for index in range(3)]
    assert offsets == [48, 64, 80]
    assert not any(offset % shape.samples_per_prompt for offset in offsets)
