"""PPO's terms against numbers worked out by hand."""

import math

import pytest
import torch

from verl_slurm.trainer.losses import masked_mean, policy_loss, value_loss

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


def test_a_clipped_token_has_no_gradient_and_a_pessimistic_one_keeps_it() -> None:
    logprobs = torch.tensor([[1.5, 1.5]]).log().requires_grad_()
    mask = torch.ones(1, 2, dtype=torch.bool)
    policy_loss(
        logprobs, torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), mask, clip_ratio=0.2
    ).loss.backward()
    assert logprobs.grad is not None
    # d(-min(r A, ...) / 2) / d log r = -r A / 2, and 0 where the clip binds
    assert logprobs.grad.tolist() == [[0.0, pytest.approx(0.75)]]


def test_the_value_loss_takes_the_worse_of_plain_and_clipped() -> None:
    values = torch.tensor([[1.0, 0.1, 5.0]])
    old = torch.tensor([[0.0, 0.0, 0.0]])
    returns = torch.tensor([[1.0, 1.0, 0.0]])
    mask = torch.tensor([[True, True, False]])
    result = value_loss(values, old, returns, mask, value_clip=0.2)
    # token 1: max((1-1)^2, (0.2-1)^2) = 0.64; token 2: both (0.1-1)^2 = 0.81
    assert result.loss.item() == pytest.approx(0.5 * (0.64 + 0.81) / 2)
    assert result.clip_fraction.item() == pytest.approx(0.5)


def test_micro_batches_with_a_shared_denominator_add_up_to_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, old, advantages = (torch.randn(6, 4, generator=generator) for _ in range(3))
    mask = torch.rand(6, 4, generator=generator) < 0.6
    whole = policy_loss(logprobs, old, advantages, mask, clip_ratio=0.2).loss
    parts = [
        policy_loss(
            *(x[rows] for x in (logprobs, old, advantages, mask)),
            clip_ratio=0.2,
            denominator=float(mask.sum()),
        )
        for rows in (slice(0, 2), slice(2, 6))
    ]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.item(), rel=1e-5)
