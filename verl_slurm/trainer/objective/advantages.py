"""Turns a score for each sample into an advantage for each token, with the penalty for the distance to the reference.
Pure.

N samples, T response positions; `mask`, bool [N, T], is true up to and including the end-of-sequence token.
`estimate` chooses by the algorithm; `AdaptiveKL` moves the penalty's coefficient from step to step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from verl_slurm.config.schema import RunConfig


def token_kl(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: Literal["k1", "k3"] = "k1"
) -> Tensor:
    """Estimates KL(p || p_ref) at each token; 0 outside the mask.

    k1 = log p - log p_ref. Its sum over a sample's tokens, averaged over samples, estimates the KL of whole responses
    in nats without bias. k3 = q - 1 - log q with q = p_ref / p is never negative and varies less
    (http://joschu.net/blog/kl-approx.html).

    Args:
        logprobs: float [N, T], of the policy that sampled.
        ref_logprobs: float [N, T], of the reference, at the same temperature.
    """
    # `where`, not a product with the mask: padding may hold an inf, and 0 x inf is NaN.
    kl = torch.where(mask, logprobs - ref_logprobs, torch.zeros_like(logprobs))
    # expm1: for a small kl, exp(-kl) - 1 would lose its digits to the 1.
    return kl if estimator == "k1" else torch.expm1(-kl) + kl


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """r_t = -beta * KL_t, plus the sample's score at its last token (Ziegler et al. 2019, arXiv:1909.08593).

    Args:
        scores: float [N], one for each whole response.
        kl: float [N, T], from `token_kl`.
        mask: bool [N, T]; every sample has at least one true position.

    Returns:
        float [N, T], 0 outside the mask.
    """
    rewards = torch.where(mask, -kl_coef * kl, torch.zeros_like(kl))
    # Responses are right-padded, so the count of tokens is the place of the last one.
    last = mask.sum(dim=1) - 1
    # The whole score at the last token: the reward judges the response and no part of it.
    rewards[torch.arange(len(scores), device=scores.device), last] += scores.to(rewards.dtype)
    return rewards


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16).

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lambda A_{t+1}; V after the last token is 0.

    Args:
        rewards: float [N, T].
        values: float [N, T]; V_t is the value before token t is chosen.
        gamma: discount a token.
        gae_lambda: 0: one-step; 1: Monte Carlo.

    Returns:
        advantages and returns (= advantages + values), float [N, T], both 0 outside the mask.
    """
    advantages = torch.zeros_like(rewards)
    next_value = torch.zeros_like(rewards[:, 0])
    running = torch.zeros_like(next_value)
    for t in reversed(range(rewards.shape[1])):
        valid = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        # Padding resets both to 0, so the value after the last token is 0: the response ends there.
        running = torch.where(valid, delta + gamma * gae_lambda * running, torch.zeros_like(running))
        advantages[:, t] = running
        next_value = torch.where(valid, values[:, t], torch.zeros_like(next_value))
    returns = torch.where(mask, advantages + values, torch.zeros_like(values))
    return advantages, returns


def penalised_scores(scores: Tensor, kl: Tensor, kl_coef: float) -> Tensor:
    """Subtracts beta times the whole response's KL from its score: the reward of a response as one action.

    Source: Ahmadian et al. 2024 (arXiv:2402.14740, eq. 4).

    Args:
        scores: float [N].
        kl: float [N, T], from `token_kl`, 0 outside the mask.
    """
    # An advantage for whole responses leaves no token to charge a token's KL to.
    return scores - kl_coef * kl.sum(dim=1)


def group_advantages(
    rewards: Tensor, mask: Tensor, *, group: int, scale: Literal["std", "none"], eps: float = 1e-4
) -> Tensor:
    """Computes how much better a response is than the others to its prompt, the same for each of its tokens.

    A = (r - mean(r)) / (std(r) + eps) over the group (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.2).
    Without the division (Liu et al. 2025, Dr. GRPO, arXiv:2503.20783, section 3.1) a prompt that is nearly always or
    nearly never solved weighs no more than another.

    Args:
        rewards: float [N], the responses to a prompt consecutive, N a multiple of `group`.
        group: responses to a prompt, at least 2.
        scale: divide by the standard deviation or not. It is the unbiased one (n - 1), as in TRL.
        eps: keeps a group of equal rewards at 0, as in TRL.

    Returns:
        float [N, T], 0 outside the mask.
    """
    # float64: nearly equal rewards leave a small difference, which is then divided by a small deviation.
    groups = rewards.to(torch.float64).reshape(-1, group)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    if scale == "std":
        advantages = advantages / (groups.std(dim=1, keepdim=True) + eps)
    flat = advantages.reshape(-1, 1).to(rewards.dtype)
    return torch.where(mask, flat, torch.zeros_like(flat))


def masked_moments(x: Tensor, mask: Tensor) -> Tensor:
    """Returns count, sum and sum of squares where `mask`, float64 [3]: all-reduce it by SUM, then `whiten`."""
    # Sums, not means: ranks have different numbers of tokens, and sums can be added.
    valid = torch.where(mask, x, torch.zeros_like(x)).to(torch.float64)
    return torch.stack([mask.sum().to(torch.float64), valid.sum(), (valid * valid).sum()])


def whiten(x: Tensor, mask: Tensor, moments: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Returns (x - mean) / sqrt(var + eps) where `mask`, 0 elsewhere.

    Args:
        x: float [N, T], this rank's share.
        moments: float64 [3], of all ranks together (`masked_moments`).
        eps: keeps a constant batch finite.
    """
    count = moments[0].clamp(min=1.0)
    mean = moments[1] / count
    # Clamped: of a constant batch, rounding leaves a difference slightly below 0.
    # Moments are float64, because the variance is a difference of two sums.
    variance = (moments[2] / count - mean * mean).clamp(min=0.0)
    white = (x.to(torch.float64) - mean) * torch.rsqrt(variance + eps)
    return torch.where(mask, white, torch.zeros_like(white)).to(x.dtype)


def estimate(
    scored: Mapping[str, Tensor],
    mask: Tensor,
    *,
    kl_coef: float,
    config: RunConfig,
    total: Callable[[Sequence[float]], list[float]],
) -> dict[str, Tensor]:
    """Returns advantages and, with a critic, its targets.

    Args:
        scored: scores [N], old_logprobs, ref_logprobs, with a critic old_values [N, T]: this rank's, of a whole step,
            with the responses to a prompt consecutive.
        kl_coef: of the penalty; unused where the KL is in the loss.
        total: sums numbers over all ranks; collective, called by PPO alone.

    Returns:
        advantages float32 [N, T]; with a critic whitened over all ranks, and returns float32 [N, T].
    """
    train = config.train
    kl = token_kl(
        scored["old_logprobs"], scored["ref_logprobs"], mask, "k3" if train.kl_estimator == "k3" else "k1"
    )
    # In the loss it is charged there; both would count it twice.
    kl_coef = kl_coef if train.kl_in == "reward" else 0.0
    if train.algorithm == "grpo":
        totals = penalised_scores(scored["scores"], kl, kl_coef)
        group = config.rollout.samples_per_prompt
        return {"advantages": group_advantages(totals, mask, group=group, scale=train.advantage_scale)}
    rewards = token_rewards(scored["scores"], kl, mask, kl_coef)
    advantages, returns = gae(
        rewards, scored["old_values"], mask, gamma=train.gamma, gae_lambda=train.gae_lambda
    )
    # Over all ranks: whitened by its own share, a rank's advantages would depend on how many ranks there are.
    moments = total(masked_moments(advantages, mask).tolist())
    white = whiten(advantages, mask, torch.tensor(moments, dtype=torch.float64))
    return {"advantages": white, "returns": returns}


# Ziegler et al. 2019 (arXiv:1909.08593, section 2.2): e = clip(KL / target - 1, -0.2, 0.2) and
# beta <- beta (1 + K e) with K = 0.1. The mean of a window replaces the single step's KL: one lucky batch
# of a small run must not swing the coefficient.
_MAX_ERROR = 0.2
_GAIN = 0.1


@dataclass(frozen=True, kw_only=True)
class AdaptiveKL:
    """The controller's whole state; a checkpoint keeps `coef` and `window`.

    Attributes:
        coef: the present coefficient, beta. 0 stays 0: the penalty is off.
        target: KL of whole responses to steer to, in nats per sample. None: the coefficient never changes, and
            the window is kept.
        size: steps in the window.
        window: KL of the last steps, oldest first, at most `size`.
    """

    coef: float
    target: float | None
    size: int
    window: tuple[float, ...] = ()

    def update(self, kl: float) -> "AdaptiveKL":
        """Returns the state after a step with a mean KL of `kl` nats. Raises ValueError for NaN and infinity."""
        # The coefficient is a product of all former ones, so one NaN would stay in it.
        if kl != kl or kl in (float("inf"), float("-inf")):
            raise ValueError(f"KL is not finite: {kl}")
        window = (*self.window, kl)[-self.size :]
        # The window is kept even so: it is a part of the state, and shown.
        if self.target is None:
            return replace(self, window=window)
        error = sum(window) / len(window) / self.target - 1.0
        error = min(max(error, -_MAX_ERROR), _MAX_ERROR)
        return replace(self, coef=self.coef * (1.0 + _GAIN * error), window=window)
