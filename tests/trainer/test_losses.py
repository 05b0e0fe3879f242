"""PPO's and GRPO's terms against numbers worked out by hand."""

import math

import pytest
import torch

from verl_slurm.trainer.objective.losses import kl_loss, masked_mean, mean_of, policy_loss, value_loss

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


def test_three_ways_to_average_two_responses_by_hand() -> None:
    x = torch.tensor([[3.0, 5.0, 1.0, 3.0], [8.0, float("nan"), 7.0, 7.0]])
    mask = torch.tensor([[True, True, True, True], [True, False, False, False]])
    found = {
        how: mean_of(how, tokens=5.0, samples=2.0, length=10)(x, mask).item()
        for how in ("token_mean", "sequence_mean", "fixed_length")
    }
    # (3 + 5 + 1 + 3 + 8) / 5 = 4; (12 / 4 + 8 / 1) / 2 = 5.5; (12 + 8) / (2 * 10) = 1
    assert found == pytest.approx({"token_mean": 4.0, "sequence_mean": 5.5, "fixed_length": 1.0})


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


def test_a_higher_upper_bound_lets_good_tokens_rise_further_and_leaves_the_lower_one() -> None:
    ratios = torch.tensor([[1.5, 0.5, 0.5]])
    advantages = torch.tensor([[1.0, -1.0, 1.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    loss = policy_loss(
        ratios.log(), torch.zeros(1, 3), advantages, mask, clip_ratio=0.2, clip_ratio_high=0.4
    ).loss
    # min(1.5, 1.4) = 1.4; min(-0.5, -0.8) = -0.8; min(0.5, 0.8) = 0.5
    assert loss.item() == pytest.approx(-(1.4 - 0.8 + 0.5) / 3)


def test_the_kl_in_the_loss_of_two_tokens_by_hand() -> None:
    logprobs = torch.tensor([[0.5, 0.25, 0.9]]).log().requires_grad_()
    reference = torch.tensor([[0.25, 0.5, 0.1]]).log()
    mask = torch.tensor([[True, True, False]])
    loss = kl_loss(logprobs, reference, mask, masked_mean)
    # q = 1/2: 1/2 - 1 + log 2; q = 2: 2 - 1 - log 2; together 1/2
    assert loss.item() == pytest.approx(0.5 / 2)
    loss.backward()
    assert logprobs.grad is not None
    # d/dlogp (q - 1 - log q) = 1 - q: pulled back where p is larger than p_ref, pushed where it is smaller
    assert logprobs.grad.tolist() == [pytest.approx([0.5 / 2, -1.0 / 2, 0.0])]
