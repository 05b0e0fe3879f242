"""Computes the terms of PPO's and GRPO's objectives, by pure functions.

N samples, T response positions; `mask`, bool [N, T], is true up to and including the end-of-sequence token.

Gradient accumulation and data parallelism: FSDP averages gradients over the ranks, and token counts differ between
micro-batches and ranks. A mean over the whole mini-batch therefore needs its denominator from outside: (valid tokens of
the mini-batch over all ranks) / (number of ranks). Then the sum over a rank's micro-batches, averaged over ranks, is
the exact mean. The same holds for means over responses.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Mean = Callable[[Tensor, Tensor], Tensor]
"""Maps x float [N, T] and mask bool [N, T] to a scalar; values outside the mask do not matter."""


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
    """Sums `x` where `mask`, divided by `denominator` (default: the number of true positions, at least 1).

    Args:
        x: float [N, T].
        denominator: tokens to divide by, see the module docstring.

    Returns:
        Scalar; 0 for an empty mask. Values outside the mask do not matter, not even a NaN.
    """
    # `where`, not a product: outside the mask there may be a NaN, and 0 x NaN is NaN, in the gradient, too.
    total = torch.where(mask, x, torch.zeros_like(x)).sum()
    if denominator is None:
        return total / mask.sum().clamp(min=1)
    # From outside where there is one: ranks and micro-batches have different numbers of tokens.
    return total / max(denominator, 1.0)


def mean_of(
    how: Literal["token_mean", "sequence_mean", "fixed_length"], *, tokens: float, samples: float, length: int
) -> Mean:
    """Returns the function that reduces the per-token losses of a piece of a mini-batch to one number.

    * token_mean: sum over all tokens / tokens (DAPO, arXiv:2503.14476, eq. 8): a long response weighs more.
    * sequence_mean: mean over each response's tokens, then over responses (GRPO, arXiv:2402.03300, eq. 3): a token of
      a long response weighs less.
    * fixed_length: sum over all tokens / (samples x length) (Dr. GRPO, arXiv:2503.20783, section 3.2): the policy
      gradient itself up to a constant, since no response's own length divides it.

    Args:
        tokens: valid ones of the whole mini-batch over all ranks, divided by the number of ranks.
        samples: responses of the whole mini-batch over all ranks, divided by the number of ranks.
        length: tokens that a response may have at most.
    """
    match how:
        case "token_mean":
            return lambda x, mask: masked_mean(x, mask, tokens)
        case "sequence_mean":
            # Each response's own length first; the sum of these means is then divided by the number of responses.
            return lambda x, mask: masked_mean(x / mask.sum(dim=1, keepdim=True).clamp(min=1), mask, samples)
        case "fixed_length":
            return lambda x, mask: masked_mean(x, mask, samples * length)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio: float,
    clip_ratio_high: float | None = None,
    denominator: float | None = None,
    mean: Mean | None = None,
) -> PolicyLoss:
    """The clipped surrogate, negated (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    r = exp(logprobs - old_logprobs); loss = -mean(min(r A, clip(r, 1-e, 1+e') A)).

    Args:
        logprobs: float [N, T], of the policy under training; carries the gradient.
        old_logprobs: float [N, T], of the policy that sampled.
        advantages: float [N, T].
        clip_ratio: e.
        clip_ratio_high: e' (DAPO, arXiv:2503.14476, section 3.1); None: as e.
        denominator: see `masked_mean`.
        mean: of the loss (`mean_of`); None: over tokens, as the other two numbers always are.

    Returns:
        The loss; the share of tokens where the clip binds; KL(old || new) by Schulman's k3 estimator,
        mean((r - 1) - log r), never negative (http://joschu.net/blog/kl-approx.html).
    """
    # Masked before exp: a large difference in the padding would overflow, and its gradient would be NaN.
    log_ratio = torch.where(mask, logprobs - old_logprobs, torch.zeros_like(logprobs))
    ratio = torch.exp(log_ratio)
    plain = ratio * advantages
    high = clip_ratio if clip_ratio_high is None else clip_ratio_high
    # The upper end may be further away: DAPO's clip-higher lets rare tokens grow.
    clipped = torch.clamp(ratio, 1.0 - clip_ratio, 1.0 + high) * advantages
    objective = torch.minimum(plain, clipped)
    loss = -(masked_mean(objective, mask, denominator) if mean is None else mean(objective, mask))
    # For display: these must add nothing to the graph.
    with torch.no_grad():
        # Where the clip binds, i.e. is the smaller: beyond the range on the other side the plain term has the gradient.
        clip_fraction = masked_mean((clipped < plain).to(ratio.dtype), mask, denominator)
        # k3, for display: never negative, and it varies less than the mean of the log ratio.
        approx_kl = masked_mean(ratio - 1.0 - log_ratio, mask, denominator)
    return PolicyLoss(loss, clip_fraction, approx_kl)


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, mean: Mean) -> Tensor:
    """KL(p || p_ref) as a term of the loss: q - 1 - log q with q = p_ref / p, token by token (DeepSeekMath, eq. 4).

    Schulman's k3 (http://joschu.net/blog/kl-approx.html): never negative, and 0 only where both agree. k1 = -log q
    has the same mean, but its gradient is zero on average: the score function's mean.

    Args:
        logprobs: float [N, T], of the policy under training; carries the gradient.
        ref_logprobs: float [N, T], of the reference.

    Returns:
        Scalar, in nats a token for a mean over tokens.
    """
    log_q = torch.where(mask, ref_logprobs - logprobs, torch.zeros_like(logprobs))
    return mean(torch.exp(log_q) - 1.0 - log_q, mask)


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
        value_clip: e, in units of reward.
        denominator: see `masked_mean`.
    """
    clipped = torch.clamp(values, old_values - value_clip, old_values + value_clip)
    plain_error, clipped_error = (values - returns) ** 2, (clipped - returns) ** 2
    loss = 0.5 * masked_mean(torch.maximum(plain_error, clipped_error), mask, denominator)
    with torch.no_grad():
        clip_fraction = masked_mean((clipped_error > plain_error).to(values.dtype), mask, denominator)
    return ValueLoss(loss, clip_fraction)
