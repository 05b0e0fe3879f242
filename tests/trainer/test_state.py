"""A rank's state goes to disk form and back whole, from any position, and nonsense is refused."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.builders import run_config
from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.runtime_state.codec import decode, encode
from verl_slurm.trainer.state.position import Position, StepShape, after
from verl_slurm.trainer.state.train_state import (
    UPDATE_METRICS,
    Buffers,
    TrainState,
    capture_state,
    fresh_state,
    restore_state,
    stacked,
    update_metrics,
)

pytestmark = pytest.mark.torch

CONFIG = run_config(ranks=2, sampled_at_once=4, sizes=(12, 6, 3), ppo_epochs=2, kl_window=3)
SHAPE = StepShape.of(CONFIG)


def _numbers(rows: int, width: int = 5) -> Any:
    return torch.randn(rows, width)


def _grow(state: TrainState) -> None:
    """Do to the buffers what the work of the present position does."""
    buffers, position = state.buffers, state.position
    match position.phase:
        case "step_end" | "generate":
            start = position.index * 4
            buffers.rollouts.append(
                {"sample_id": torch.arange(start, start + 4), "response_mask": _numbers(4) > 0}
            )
        case "score":
            buffers.scored.append({"scores": torch.randn(3), "old_logprobs": _numbers(3)})
        case "advantage":
            buffers.estimates = {"advantages": _numbers(12), "returns": _numbers(12)}
        case "update":
            buffers.updates.append(torch.randn(len(UPDATE_METRICS)).double().tolist())
    state.position = after(position, SHAPE)
    if state.position.phase == "step_end":
        state.kl = state.kl.update(0.3)
        state.remember({"reward": 0.25, "step": float(state.position.step)})
        state.buffers = Buffers()


def _states() -> list[TrainState]:
    """One state at each position of two steps."""
    states = []
    for length in range(2 * 13):
        state = fresh_state(CONFIG)
        for _ in range(length):
            _grow(state)
        states.append(state)
    return states


def _same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("state", _states(), ids=lambda state: str(state.position))
def test_what_is_restored_is_what_was_captured(state: TrainState) -> None:
    saved = decode(encode(capture_state(state, SHAPE, rank=1)))
    restored = restore_state(saved, CONFIG, SHAPE, where="x")
    assert (restored.position, restored.kl, restored.history) == (state.position, state.kl, state.history)
    assert _same(stacked(restored.buffers.rollouts), stacked(state.buffers.rollouts))
    assert _same(stacked(restored.buffers.scored), stacked(state.buffers.scored))
    assert _same(restored.buffers.estimates, state.buffers.estimates)
    assert restored.buffers.updates == state.buffers.updates


def _at(position: Position) -> TrainState:
    return next(state for state in _states() if state.position == position)


@pytest.mark.parametrize(
    "changes",
    [
        {"index": 3},
        {"index": 0},
        {"phase": "score"},
        {"phase": "step_end", "index": 0},
        {"safe_point": 9},
        {"rollout_offset": 1},
        {"rollouts": {}},
        {"rollouts": {"sample_id": np.arange(8), "response_mask": np.zeros((7, 5), dtype=bool)}},
        {"rewards": {"scores": np.zeros(3)}},
        {"rng": {}},
    ],
    ids=str,
)
def test_parts_that_do_not_fit_each_other_are_refused(changes: dict[str, Any]) -> None:
    saved = capture_state(_at(Position(1, "generate", 2)), SHAPE, rank=0)
    restore_state(saved, CONFIG, SHAPE, where="x")
    with pytest.raises(CheckpointCorrupt):
        restore_state(msgspec.structs.replace(saved, **changes), CONFIG, SHAPE, where="x")


def test_update_metrics_of_another_layout_are_refused() -> None:
    saved = capture_state(_at(Position(0, "update", 2)), SHAPE, rank=0)
    rewards = saved.rewards | {"updates": np.zeros((2, 3))}
    with pytest.raises(CheckpointCorrupt, match="update metrics"):
        restore_state(msgspec.structs.replace(saved, rewards=rewards), CONFIG, SHAPE, where="x")


def test_the_columns_of_an_update_are_those_of_its_algorithm() -> None:
    grpo = msgspec.structs.replace(CONFIG.train, algorithm="grpo", kl_in="loss")
    names = update_metrics(grpo)
    assert update_metrics(CONFIG.train) == UPDATE_METRICS
    assert names == ("policy_loss", "entropy", "policy_kl", "policy_clip", "actor_grad_norm", "kl_loss")
    saved = capture_state(_at(Position(0, "update", 2)), SHAPE, rank=0)
    config = msgspec.structs.replace(CONFIG, train=grpo)
    with pytest.raises(CheckpointCorrupt, match="update metrics"):
        restore_state(saved, config, SHAPE, where="x")
    rewards = saved.rewards | {"updates": np.ones((2, len(names)))}
    restored = restore_state(msgspec.structs.replace(saved, rewards=rewards), config, SHAPE, where="x")
    assert restored.buffers.updates == [[1.0] * len(names)] * 2


def test_a_fixed_coefficient_is_fixed_in_the_next_life_too() -> None:
    config = msgspec.structs.replace(CONFIG, train=msgspec.structs.replace(CONFIG.train, kl_target=None))
    state = fresh_state(config)
    state.kl = state.kl.update(9.0)
    restored = restore_state(capture_state(state, SHAPE, rank=0), config, SHAPE, where="x")
    assert restored.kl == state.kl
    assert restored.kl.update(9.0).coef == CONFIG.train.kl_coef
