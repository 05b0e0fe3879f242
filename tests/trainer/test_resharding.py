"""The running step of N ranks, dealt out to M."""

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.builders import run_config
from verl_slurm.base.errors import ConfigError
from verl_slurm.config.elastic import keep_step, require_same_step
from verl_slurm.config.schema import DistributedConfig, RunConfig
from verl_slurm.runtime_state.format import RuntimeState
from verl_slurm.save.ranks.rng import capture
from verl_slurm.trainer.state.position import Position, StepShape, check_position, rollout_offset, safe_point
from verl_slurm.trainer.state.resharding import reshard
from verl_slurm.trainer.state.train_state import UPDATE_METRICS, restore_state

pytestmark = pytest.mark.torch

PROMPTS, SIZE = 48, 2


def _config(ranks: int) -> RunConfig:
    return run_config(
        sampled_at_once=SIZE, sizes=(PROMPTS // ranks, PROMPTS // ranks // 2, 2), ppo_epochs=2, ranks=ranks
    )


def _saved(ranks: int, position: Position) -> list[RuntimeState]:
    """What `ranks` ranks have at `position`: sample ids in the rollouts, ten times these in what is scored."""
    config = _config(ranks)
    shape = StepShape.of(config)
    generations = {"step_end": 0, "generate": position.index}.get(position.phase, shape.generations)
    states = []
    for rank in range(ranks):
        blocks = [np.arange(SIZE) + (index * ranks + rank) * SIZE for index in range(generations)]
        ids = np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.int64)
        rewards: dict[str, Any] = {}
        if position.phase == "score":
            rewards = {"scores": ids[: 2 * position.index] * 10.0}
        if position.phase in {"advantage", "update", "evaluate"}:
            rewards = {"scores": ids * 10.0}
        if position.phase in {"update", "evaluate"}:
            done = shape.updates if position.phase == "evaluate" else position.index
            rewards |= {"advantages": np.stack([ids, ids], axis=1) * 100.0, "returns": ids * 1.0}
            rewards["updates"] = np.full((done, len(UPDATE_METRICS)), float(rank + 1))
        states.append(
            RuntimeState(
                rank=rank,
                world_size=ranks,
                step=position.step,
                phase=position.phase,
                index=position.index,
                safe_point=safe_point(position, shape),
                rollout_offset=rollout_offset(position, shape),
                episode_id=0,
                kl_coef=0.1,
                kl_window=[0.5],
                rng=capture() if rank else {"python": b"of rank 0"},
                rollouts={"sample_id": ids, "ids": np.stack([ids] * 3, axis=1)} if len(ids) else {},
                rewards={name: value for name, value in rewards.items() if len(value)},
                history=[],
            )
        )
    return states


@pytest.mark.parametrize(
    "position",
    [
        Position(3),
        Position(3, "generate", 2),
        Position(3, "generate", 3),
        Position(3, "score", 0),
        Position(3, "score", 2),
        Position(3, "advantage"),
        Position(3, "update"),
        Position(3, "update", 3),
        Position(3, "evaluate"),
    ],
    ids=str,
)
@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4), (4, 3), (3, 4), (4, 1), (1, 4), (2, 3)])
def test_every_sample_is_dealt_to_the_rank_that_would_have_made_it(
    old: int, new: int, position: Position
) -> None:
    saved = _saved(old, position)
    shape = StepShape.of(_config(new))
    dealt = [reshard(saved, StepShape.of(_config(old)), shape, rank) for rank in range(new)]
    assert len({(state.phase, state.index, state.safe_point, state.rollout_offset) for state in dealt}) == 1
    for rank, state in enumerate(dealt):
        now = Position(state.step, state.phase, state.index)
        check_position(now, shape, where="here")
        if not state.rollouts:
            assert position.phase in {"step_end", "generate"}
            assert now == Position(3)
            continue
        ids = state.rollouts["sample_id"]
        assert {int(i) // SIZE % new for i in ids} == {rank}, "the rank that this global micro-batch is of"
        assert ids.tolist() == sorted(ids.tolist())
        assert np.array_equal(state.rollouts["ids"][:, 2], ids)
        if "scores" in state.rewards:
            assert np.array_equal(state.rewards["scores"], ids * 10.0)
        if "advantages" in state.rewards:
            assert np.array_equal(state.rewards["advantages"][:, 1], ids * 100.0)
        restore_state(msgspec.structs.replace(state, rng=capture()), _config(new), shape, where="here")
    num = sum(len(state.rollouts.get("sample_id", ())) for state in dealt)
    had = sum(len(state.rollouts.get("sample_id", ())) for state in saved)
    assert num == had if position.phase != "generate" else had - num < new * SIZE


def test_the_mean_of_the_updates_metrics_over_ranks_stays() -> None:
    saved = _saved(4, Position(0, "update", 2))
    dealt = [reshard(saved, StepShape.of(_config(4)), StepShape.of(_config(2)), rank) for rank in range(2)]
    assert sum(state.rewards["updates"][0, 0] for state in dealt) / 2 == (1 + 2 + 3 + 4) / 4


def test_what_was_scored_in_part_is_scored_again() -> None:
    (state,) = (
        reshard(_saved(2, Position(0, "score", 1)), StepShape.of(_config(2)), StepShape.of(_config(1)), 0),
    )
    assert (state.phase, state.index, state.rewards) == ("score", 0, {})


def test_sizes_per_device_follow_the_number_of_ranks() -> None:
    old = _config(4)
    for ranks in (1, 2, 3):
        wider = msgspec.structs.replace(old, distributed=DistributedConfig(dp_size=ranks, nodes=1))
        kept = keep_step(old, wider)
        require_same_step(old, kept, where="run.yaml")
        assert kept.train.batch_size_per_device * ranks == PROMPTS
        assert kept.train.mini_batch_size_per_device % kept.train.micro_batch_size_per_device == 0
        assert StepShape.of(kept).updates == StepShape.of(old).updates


def test_a_number_of_ranks_that_does_not_divide_the_batch_is_refused_with_the_numbers() -> None:
    old = _config(4)
    odd = keep_step(old, msgspec.structs.replace(old, distributed=DistributedConfig(dp_size=5, nodes=1)))
    with pytest.raises(ConfigError, match=r"4 ranks so far, and with 5 .*train.batch_size_per_device=9.6"):
        require_same_step(old, odd, where="run.yaml")
