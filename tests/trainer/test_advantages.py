"""Advantages against numbers worked out by hand."""

import math

import pytest
import torch

from verl_slurm.trainer.objective.advantages import (
    gae,
    group_advantages,
    masked_moments,
    penalised_scores,
    token_kl,
    token_rewards,
    whiten,
)

pytestmark = pytest.mark.torch

MASK = torch.tensor([[True, True, True], [True, True, False]])


def test_the_score_lands_on_the_last_valid_token_and_the_penalty_on_each() -> None:
    kl = token_kl(torch.tensor([[0.0, -1.0, -2.0], [-1.0, -1.0, 9.0]]), torch.full((2, 3), -1.0), MASK)
    assert kl.tolist() == [[1.0, 0.0, -1.0], [0.0, 0.0, 0.0]]
    rewards = token_rewards(torch.tensor([1.0, 0.5]), kl, MASK, kl_coef=0.1)
    expected = torch.tensor([[-0.1, 0.0, 1.1], [0.0, 0.5, 0.0]])
    torch.testing.assert_close(rewards, expected)


def test_gae_of_two_samples_by_hand() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 2.0, 50.0]])
    values = torch.tensor([[0.5, 0.4, 0.6], [1.0, 1.0, 70.0]])
    advantages, returns = gae(rewards, values, MASK, gamma=0.9, gae_lambda=0.5)
    # sample 1, from the end: d2 = 1 - .6 = .4; d1 = .9*.6 - .4 = .14; d0 = .9*.4 - .5 = -.14
    #   A2 = .4; A1 = .14 + .45*.4 = .32; A0 = -.14 + .45*.32 = .004
    # sample 2: d1 = 2 - 1 = 1; d0 = .9*1 - 1 = -.1; A1 = 1; A0 = -.1 + .45 = .35; padding is nothing
    expected = torch.tensor([[0.004, 0.32, 0.4], [0.35, 1.0, 0.0]])
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, torch.tensor([[0.504, 0.72, 1.0], [1.35, 2.0, 0.0]]))


def test_gae_with_lambda_one_is_the_discounted_return_less_the_value() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(4, 5, generator=generator) for _ in range(2))
    mask = torch.ones(4, 5, dtype=torch.bool)
    _, returns = gae(rewards, values, mask, gamma=1.0, gae_lambda=1.0)
    torch.testing.assert_close(returns, rewards.flip(1).cumsum(1).flip(1))


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


def test_a_group_is_what_lies_together_and_no_other_group_moves_it() -> None:
    scores = torch.tensor([1.0, 0.0, 0.2, 0.6])
    mask = torch.ones(4, 1, dtype=torch.bool)
    alone = group_advantages(scores[:2], mask[:2], group=2, scale="std")
    assert torch.equal(group_advantages(scores, mask, group=2, scale="std")[:2], alone)


def test_the_penalty_of_a_whole_response_is_that_of_its_tokens_together() -> None:
    kl = torch.tensor([[1.0, -0.5, 0.5], [2.0, 1.0, 0.0]])
    assert penalised_scores(torch.tensor([1.0, 0.5]), kl, 0.1).tolist() == pytest.approx([0.9, 0.2])


def test_both_estimators_of_the_kl_by_hand() -> None:
    p, q, mask = torch.tensor([[0.5, 0.25]]), torch.tensor([[0.25, 0.5]]), torch.tensor([[True, True]])
    assert token_kl(p.log(), q.log(), mask).tolist() == [pytest.approx([math.log(2), -math.log(2)])]
    k3 = token_kl(p.log(), q.log(), mask, "k3")
    assert k3.tolist() == [pytest.approx([0.5 - 1 + math.log(2), 2 - 1 - math.log(2)])]
    assert not token_kl(p.log(), q.log(), ~mask, "k3").any()
