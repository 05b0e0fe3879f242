"""Our terms against those of TRL and verl, on the same numbers: value and gradient (`tests/trainer/others.py`)."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.others import RECORD, Settings, batch, of_trl
from verl_slurm.trainer.objective.advantages import gae, group_advantages, masked_moments, token_kl, whiten
from verl_slurm.trainer.objective.losses import Mean, kl_loss, mean_of, policy_loss, value_loss

pytestmark = pytest.mark.torch

THEIRS: dict[str, Any] = json.loads(RECORD.read_text())
# The name each has for the same mean.
TOKENS, SEQUENCES, LENGTH = "token_mean", "sequence_mean", "fixed_length"
OF_TRL = {"grpo": SEQUENCES, "bnpo": TOKENS, "dapo": TOKENS, "dr_grpo": LENGTH}
OF_VERL = {"token-mean": TOKENS, "seq-mean-token-mean": SEQUENCES, "seq-mean-token-sum-norm": LENGTH}


def _mean(how: Any, mask: Tensor) -> Mean:
    return mean_of(how, tokens=float(mask.sum()), samples=float(len(mask)), length=Settings.LENGTH)


def _group_advantages(scale: Any) -> Tensor:
    given = batch()
    return group_advantages(given["scores"], given["mask"], group=Settings.GROUP, scale=scale)


def _policy(leaf: Tensor, advantages: Tensor, how: str) -> Tensor:
    given = batch()
    return policy_loss(
        leaf,
        given["old_logprobs"],
        advantages,
        given["mask"],
        clip_ratio=Settings.LOW,
        clip_ratio_high=Settings.HIGH,
        mean=_mean(how, given["mask"]),
    ).loss


def _same(ours: Tensor, theirs: Any) -> None:
    # Not nearer: TRL's n / (n - 1) is float32, and verl adds 1e-8 to a response's length.
    torch.testing.assert_close(ours, torch.tensor(theirs, dtype=torch.float64), rtol=1e-6, atol=1e-8)


def _same_loss(loss: Tensor, leaf: Tensor, theirs: Any) -> None:
    _same(loss.detach(), theirs["loss"])
    _same(torch.autograd.grad(loss, leaf)[0], theirs["grad"])
    assert any(any(row) for row in theirs["grad"])


@pytest.mark.parametrize("loss_type", OF_TRL)
def test_the_loss_of_grpo_with_the_kl_in_it_is_that_of_trl(loss_type: str) -> None:
    given, how = batch(), OF_TRL[loss_type]
    leaf = given["logprobs"].requires_grad_()
    kl = kl_loss(leaf, given["ref_logprobs"], given["mask"], _mean(how, given["mask"]))
    loss = _policy(leaf, _group_advantages("std"), how) + Settings.KL_COEF * kl
    _same_loss(loss, leaf, THEIRS[f"trl loss {loss_type}"])


@pytest.mark.parametrize("scale", ["std", "none"])
def test_the_advantages_of_a_group_are_those_of_trl(scale: str) -> None:
    _same(_group_advantages(scale), THEIRS[f"trl advantages {scale}"]["advantages"])


@pytest.mark.parametrize("mode", OF_VERL)
def test_the_policy_loss_of_ppo_in_each_of_its_means_is_that_of_verl(mode: str) -> None:
    given = batch()
    leaf = given["logprobs"].requires_grad_()
    loss = _policy(leaf, given["advantages"], OF_VERL[mode])
    _same_loss(loss, leaf, THEIRS[f"verl policy {mode}"])


def test_the_value_loss_of_ppo_is_that_of_verl() -> None:
    given = batch()
    leaf = given["values"].requires_grad_()
    arguments = leaf, given["old_values"], given["returns"], given["mask"]
    _same_loss(value_loss(*arguments, value_clip=Settings.VALUE_CLIP).loss, leaf, THEIRS["verl value"])


def test_advantages_by_gae_and_their_whitening_are_those_of_verl() -> None:
    given, theirs = batch(), THEIRS["verl gae"]
    mask = given["mask"]
    rewards = given["token_rewards"] * mask
    advantages, returns = gae(
        rewards, given["values"], mask, gamma=Settings.GAMMA, gae_lambda=Settings.LAMBDA
    )
    _same(returns, theirs["returns"])
    # Theirs divides by the unbiased deviation, ours by that of the batch itself.
    num = int(mask.sum())
    white = whiten(advantages, mask, masked_moments(advantages, mask)) * ((num - 1) / num) ** 0.5
    _same(white, theirs["advantages"])


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_estimates_of_the_kl_are_those_of_verl(estimator: Any) -> None:
    given = batch()
    kl = token_kl(given["logprobs"], given["ref_logprobs"], given["mask"], estimator)
    _same(kl, THEIRS[f"verl kl {estimator}"]["kl"])


def test_what_trl_is_recorded_to_say_it_says_here_too() -> None:
    pytest.importorskip("trl", reason="TRL is not installed; its answers of 1.16.0 are recorded")
    for name, answer in of_trl().items():
        for part, value in answer.items():
            _same(torch.tensor(value, dtype=torch.float64), THEIRS[name][part])
