"""The terms of PPO's objective: pure functions, shapes in the docstrings, worked by hand in the tests.

N samples, T response positions; `mask` is true up to and including the end-of-sequence token.

Gradient accumulation and data parallelism: FSDP averages gradients over the ranks, and token counts differ
between micro-batches and ranks. A mean over the whole mini-batch therefore needs its denominator from
outside: (valid tokens of the mini-batch over all ranks) / (number of ranks). Then the sum over a rank's
micro-batches, averaged over ranks, is the exact mean.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["PolicyLoss", "ValueLoss", "masked_mean", "policy_loss", "value_loss"]


class PolicyLoss(NamedTuple):
    """Scalars. Only `loss` carries a gradient."""

    loss: Tensor
    clip_fraction: Tensor
    approx_kl: Tensor


class ValueLoss(NamedTuple):
    """Scalars. Only `loss` carries a gradient."""

    loss: Tensor
    clip_fraction: Tensor


def masked_mean(x: Tensor, mask: Tensor, denominator: float | None = None) -> Tensor:
    """Sum of `x` where `mask`, over `denominator` (default: the number of true positions, at least 1).

    Args:
        x: float [N, T].
        mask: bool [N, T].
        denominator: tokens to divide by, see the module docstring.

    Returns:
        Scalar; 0 for an empty mask. What lies outside the mask does not matter, not even a NaN.
    """
    total = torch.where(mask, x, torch.zeros_like(x)).sum()
    if denominator is None:
        return total / mask.sum().clamp(min=1)
    return total / max(denominator, 1.0)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio: float,
    denominator: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate, negated (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    r = exp(logprobs - old_logprobs); loss = -mean(min(r A, clip(r, 1-e, 1+e) A)).

    Args:
        logprobs: float [N, T], of the policy under training; carries the gradient.
        old_logprobs: float [N, T], of the policy that sampled.
        advantages: float [N, T].
        mask: bool [N, T].
        clip_ratio: e.
        denominator: see `masked_mean`.

    Returns:
        The loss; the share of tokens where the clip binds; KL(old || new) by Schulman's k3 estimator,
        mean((r - 1) - log r), never negative (http://joschu.net/blog/kl-approx.html).
    """
    log_ratio = torch.where(mask, logprobs - old_logprobs, torch.zeros_like(logprobs))
    ratio = torch.exp(log_ratio)
    plain = ratio * advantages
    clipped = torch.clamp(ratio, 1.0 - clip_ratio, 1.0 + clip_ratio) * advantages
    loss = -masked_mean(torch.minimum(plain, clipped), mask, denominator)
    with torch.no_grad():
        clip_fraction = masked_mean((clipped < plain).to(ratio.dtype), mask, denominator)
        approx_kl = masked_mean(ratio - 1.0 - log_ratio, mask, denominator)
    return PolicyLoss(loss, clip_fraction, approx_kl)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    value_clip: float,
    denominator: float | None = None,
) -> ValueLoss:
    """The critic's squared error, clipped around the values it gave at sampling time.

    loss = 1/2 mean(max((V - R)^2, (clip(V, V_old - e, V_old + e) - R)^2)), as in OpenAI's baselines
    (`ppo2/model.py`) and TRL. Not in the paper; it keeps one update from moving the baseline far.

    Args:
        values: float [N, T]; carries the gradient.
        old_values: float [N, T], of the critic at sampling time.
        returns: float [N, T], the regression targets.
        mask: bool [N, T].
        value_clip: e, in units of reward.
        denominator: see `masked_mean`.
    """
    clipped = torch.clamp(values, old_values - value_clip, old_values + value_clip)
    plain_error, clipped_error = (values - returns) ** 2, (clipped - returns) ** 2
    loss = 0.5 * masked_mean(torch.maximum(plain_error, clipped_error), mask, denominator)
    with torch.no_grad():
        clip_fraction = masked_mean((clipped_error > plain_error).to(values.dtype), mask, denominator)
    return ValueLoss(loss, clip_fraction)
