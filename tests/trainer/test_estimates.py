"""Which advantages an algorithm has, from the same scores."""

from collections.abc import Sequence

import pytest
import torch

from tests.builders import run_config
from verl_slurm.config.schema import RunConfig
from verl_slurm.trainer.objective.advantages import estimate

pytestmark = pytest.mark.torch

MASK = torch.tensor([[True, True], [True, False]])
SCORED = {
    "scores": torch.tensor([1.0, 0.0]),
    "old_logprobs": torch.tensor([[-1.0, -1.0], [-1.0, -1.0]]),
    "ref_logprobs": torch.tensor([[-1.5, -2.0], [-1.0, 9.0]]),
}


def _config(**train: object) -> RunConfig:
    return run_config(samples_per_prompt=2, **train)


def _alone(numbers: Sequence[float]) -> list[float]:
    return list(numbers)


def _never(_: Sequence[float]) -> list[float]:
    raise AssertionError("groups need no other rank")


def test_grpo_asks_neither_the_critic_nor_the_other_ranks() -> None:
    config = _config(algorithm="grpo", advantage_scale="none")
    found = estimate(SCORED, MASK, kl_coef=0.2, config=config, total=_never)
    # KL of the first response 0.5 + 1.0: rewards 1 - 0.2 * 1.5 = 0.7 and 0, their mean 0.35
    assert found.keys() == {"advantages"}
    torch.testing.assert_close(found["advantages"], torch.tensor([[0.35, 0.35], [-0.35, 0.0]]))


def test_a_penalty_in_the_loss_is_none_in_the_reward() -> None:
    config = _config(algorithm="grpo", advantage_scale="none", kl_in="loss")
    found = estimate(SCORED, MASK, kl_coef=0.2, config=config, total=_never)
    torch.testing.assert_close(found["advantages"], torch.tensor([[0.5, 0.5], [-0.5, 0.0]]))


def test_ppo_has_returns_and_whitened_advantages() -> None:
    scored = SCORED | {"old_values": torch.zeros(2, 2)}
    found = estimate(scored, MASK, kl_coef=0.2, config=_config(gae_lambda=1.0), total=_alone)
    # rewards -0.1, -0.2 + 1 and 0; summed from the end
    torch.testing.assert_close(found["returns"], torch.tensor([[0.7, 0.8], [0.0, 0.0]]))
    assert found["advantages"][MASK].mean().abs() < 1e-6
