"""The terms of PPO and GRPO by hand, where no other library says them (`test_against_others.py`)."""

import math
from collections.abc import Sequence

import pytest
import torch

from tests.builders import run_config
from verl_slurm.config.schema import RunConfig
from verl_slurm.trainer.objective.advantages import (
    AdaptiveKL,
    estimate,
    group_advantages,
    masked_moments,
    penalised_scores,
    token_kl,
    token_rewards,
    whiten,
)
from verl_slurm.trainer.objective.losses import masked_mean, mean_of, policy_loss, value_loss

pytestmark = pytest.mark.torch


def test_masked_mean_counts_only_what_is_valid_and_survives_a_nan_outside() -> None:
    x = torch.tensor([[1.0, 2.0, float("nan")], [6.0, float("inf"), float("nan")]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert masked_mean(x, mask).item() == 3.0
    assert masked_mean(x, mask, denominator=4.5).item() == 2.0
    assert masked_mean(x, torch.zeros_like(mask)).item() == 0.0


def test_a_nan_outside_the_mask_does_not_reach_the_gradient() -> None:
    x = torch.tensor([[1.0, float("nan")]], requires_grad=True)
    masked_mean(x, torch.tensor([[True, False]])).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[1.0, 0.0]]


def test_the_policy_loss_of_four_tokens_by_hand() -> None:
    # ratios 1.5, 0.5, 1.5, 1.1 with clip 0.2; the fifth token is masked
    ratios = torch.tensor([[1.5, 0.5, 1.5, 1.1, 99.0]])
    advantages = torch.tensor([[2.0, 1.0, -1.0, 4.0, 7.0]])
    mask = torch.tensor([[True, True, True, True, False]])
    result = policy_loss(ratios.log(), torch.zeros(1, 5), advantages, mask, clip_ratio=0.2)
    # min(3.0, 2.4) = 2.4; min(0.5, 0.8) = 0.5; min(-1.5, -1.2) = -1.5; min(4.4, 4.4) = 4.4
    assert result.loss.item() == pytest.approx(-(2.4 + 0.5 - 1.5 + 4.4) / 4)
    assert result.clip_fraction.item() == pytest.approx(1 / 4)
    by_hand = [r - 1 - math.log(r) for r in (1.5, 0.5, 1.5, 1.1)]
    assert result.approx_kl.item() == pytest.approx(sum(by_hand) / 4, rel=1e-5)


def test_the_value_loss_takes_the_worse_of_plain_and_clipped() -> None:
    values = torch.tensor([[1.0, 0.1, 5.0]])
    old = torch.tensor([[0.0, 0.0, 0.0]])
    returns = torch.tensor([[1.0, 1.0, 0.0]])
    mask = torch.tensor([[True, True, False]])
    result = value_loss(values, old, returns, mask, value_clip=0.2)
    # token 1: max((1-1)^2, (0.2-1)^2) = 0.64; token 2: both (0.1-1)^2 = 0.81
    assert result.loss.item() == pytest.approx(0.5 * (0.64 + 0.81) / 2)
    assert result.clip_fraction.item() == pytest.approx(0.5)


@pytest.mark.parametrize("how", ["token_mean", "sequence_mean", "fixed_length"])
def test_pieces_of_a_mini_batch_on_two_ranks_add_up_to_its_mean(how: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    mask = torch.arange(4) < torch.tensor([1, 4, 2, 3, 3, 1, 4, 2]).unsqueeze(1)
    whole = mean_of(how, tokens=20.0, samples=8.0, length=4)(x, mask)  # type: ignore[arg-type]
    share = mean_of(how, tokens=20.0 / 2, samples=8.0 / 2, length=4)  # type: ignore[arg-type]
    ranks = [
        sum(share(x[rows], mask[rows]) for rows in pieces) for pieces in (([0, 1], [2, 3]), ([4, 5, 6, 7],))
    ]
    torch.testing.assert_close(torch.stack(ranks).mean(), whole)  # type: ignore[arg-type]


MASK = torch.tensor([[True, True, True], [True, True, False]])


def test_the_score_lands_on_the_last_valid_token_and_the_penalty_on_each() -> None:
    kl = token_kl(torch.tensor([[0.0, -1.0, -2.0], [-1.0, -1.0, 9.0]]), torch.full((2, 3), -1.0), MASK)
    assert kl.tolist() == [[1.0, 0.0, -1.0], [0.0, 0.0, 0.0]]
    rewards = token_rewards(torch.tensor([1.0, 0.5]), kl, MASK, kl_coef=0.1)
    expected = torch.tensor([[-0.1, 0.0, 1.1], [0.0, 0.5, 0.0]])
    torch.testing.assert_close(rewards, expected)


def test_whitening_by_shares_equals_whitening_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, generator=generator) * 5 + 3
    mask = torch.rand(6, 3, generator=generator) < 0.7
    moments = masked_moments(x[:2], mask[:2]) + masked_moments(x[2:], mask[2:])
    white = whiten(x, mask, moments)
    valid = x[mask].double()
    expected = (valid - valid.mean()) / valid.std(correction=0)
    torch.testing.assert_close(white[mask].double(), expected, rtol=1e-5, atol=1e-5)
    assert (white[~mask] == 0).all()
    assert torch.equal(torch.cat([whiten(x[:2], mask[:2], moments), whiten(x[2:], mask[2:], moments)]), white)


def test_whitening_a_constant_or_an_empty_batch_stays_finite() -> None:
    x = torch.full((2, 2), 3.0)
    for mask in (torch.ones(2, 2, dtype=torch.bool), torch.zeros(2, 2, dtype=torch.bool)):
        assert whiten(x, mask, masked_moments(x, mask)).abs().max() < 1e-3


def test_two_groups_of_three_by_hand() -> None:
    scores = torch.tensor([1.0, 0.0, 2.0, 0.5, 0.5, 0.5])
    mask = torch.tensor([[True, True], [True, False], [True, True]] * 2)
    centred = group_advantages(scores, mask, group=3, scale="none")
    assert centred.tolist() == [[0.0, 0.0], [-1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    # mean 1, unbiased variance (0 + 1 + 1) / 2 = 1
    scaled = group_advantages(scores, mask, group=3, scale="std", eps=0.25)
    assert scaled[:3, 0].tolist() == pytest.approx([0.0, -1 / 1.25, 1 / 1.25])
    assert not scaled[3:].any(), "a group that agrees teaches nothing, and divides by no zero"


def test_the_penalty_of_a_whole_response_is_that_of_its_tokens_together() -> None:
    kl = torch.tensor([[1.0, -0.5, 0.5], [2.0, 1.0, 0.0]])
    assert penalised_scores(torch.tensor([1.0, 0.5]), kl, 0.1).tolist() == pytest.approx([0.9, 0.2])


TWO_RESPONSES = torch.tensor([[True, True], [True, False]])
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
    found = estimate(SCORED, TWO_RESPONSES, kl_coef=0.2, config=config, total=_never)
    # KL of the first response 0.5 + 1.0: rewards 1 - 0.2 * 1.5 = 0.7 and 0, their mean 0.35
    assert found.keys() == {"advantages"}
    torch.testing.assert_close(found["advantages"], torch.tensor([[0.35, 0.35], [-0.35, 0.0]]))


def test_a_penalty_in_the_loss_is_none_in_the_reward() -> None:
    config = _config(algorithm="grpo", advantage_scale="none", kl_in="loss")
    found = estimate(SCORED, TWO_RESPONSES, kl_coef=0.2, config=config, total=_never)
    torch.testing.assert_close(found["advantages"], torch.tensor([[0.5, 0.5], [-0.5, 0.0]]))


def test_ppo_has_returns_and_whitened_advantages() -> None:
    scored = SCORED | {"old_values": torch.zeros(2, 2)}
    found = estimate(scored, TWO_RESPONSES, kl_coef=0.2, config=_config(gae_lambda=1.0), total=_alone)
    # rewards -0.1, -0.2 + 1 and 0; summed from the end
    torch.testing.assert_close(found["returns"], torch.tensor([[0.7, 0.8], [0.0, 0.0]]))
    assert found["advantages"][TWO_RESPONSES].mean().abs() < 1e-6


def test_the_coefficient_follows_the_mean_of_the_window() -> None:
    kl = AdaptiveKL(coef=0.5, target=1.0, size=2)
    kl = kl.update(1.1)  # mean 1.1, error 0.1: 0.5 * 1.01
    assert kl.coef == pytest.approx(0.505)
    kl = kl.update(0.9)  # mean 1.0, error 0
    assert kl.coef == pytest.approx(0.505)
    kl = kl.update(0.8)  # 1.1 has left: mean 0.85, error -0.15: * 0.985
    assert kl.window == (0.9, 0.8)
    assert kl.coef == pytest.approx(0.505 * 0.985)


def test_one_step_changes_the_coefficient_by_two_percent_at_most() -> None:
    kl = AdaptiveKL(coef=1.0, target=0.1, size=1)
    assert kl.update(1e9).coef == pytest.approx(1.02)
    assert kl.update(-5.0).coef == pytest.approx(0.98)


def test_a_penalty_that_is_off_or_fixed_stays_and_its_window_is_kept() -> None:
    assert AdaptiveKL(coef=0.0, target=0.1, size=4).update(7.0).coef == 0.0
    kl = AdaptiveKL(coef=0.5, target=None, size=2).update(9.0).update(7.0).update(8.0)
    assert (kl.coef, kl.window) == (0.5, (7.0, 8.0))


def test_continuing_from_coef_and_window_is_the_same_as_never_stopping() -> None:
    whole = AdaptiveKL(coef=0.02, target=0.1, size=3)
    history = [0.05, 0.3, 0.11, 0.02, 0.4]
    for value in history:
        whole = whole.update(value)
    part = AdaptiveKL(coef=0.02, target=0.1, size=3)
    for value in history[:3]:
        part = part.update(value)
    part = AdaptiveKL(coef=part.coef, target=0.1, size=3, window=part.window)
    for value in history[3:]:
        part = part.update(value)
    assert part == whole


@pytest.mark.parametrize("kl", [float("nan"), float("inf"), float("-inf")])
def test_a_kl_that_is_not_finite_is_refused(kl: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        AdaptiveKL(coef=0.1, target=0.1, size=2).update(kl)
