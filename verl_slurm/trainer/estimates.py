"""Computes the advantages of the configured algorithm from the scores of a step."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from verl_slurm.config.schema import RunConfig
from verl_slurm.trainer.data import Batch
from verl_slurm.trainer.objective.advantages import (
    gae,
    group_advantages,
    masked_moments,
    penalised_scores,
    token_kl,
    token_rewards,
    whiten,
)

__all__ = ["estimate"]


def estimate(
    scored: Mapping[str, Tensor],
    mask: Tensor,
    *,
    kl_coef: float,
    config: RunConfig,
    total: Callable[[Sequence[float]], list[float]],
) -> Batch:
    """Returns advantages and, with a critic, its targets.

    Args:
        scored: scores [N], old_logprobs, ref_logprobs, with a critic old_values [N, T]: this rank's, of a whole step,
            with the responses to a prompt consecutive.
        mask: bool [N, T].
        kl_coef: of the penalty; unused where the KL is in the loss.
        total: sums numbers over all ranks; collective, called by PPO alone.

    Returns:
        advantages float32 [N, T]; with a critic whitened over all ranks, and returns float32 [N, T].
    """
    train = config.train
    kl = token_kl(
        scored["old_logprobs"], scored["ref_logprobs"], mask, "k3" if train.kl_estimator == "k3" else "k1"
    )
    kl_coef = kl_coef if train.kl_in == "reward" else 0.0
    if train.algorithm == "grpo":
        totals = penalised_scores(scored["scores"], kl, kl_coef)
        group = config.rollout.samples_per_prompt
        return {"advantages": group_advantages(totals, mask, group=group, scale=train.advantage_scale)}
    rewards = token_rewards(scored["scores"], kl, mask, kl_coef)
    advantages, returns = gae(
        rewards, scored["old_values"], mask, gamma=train.gamma, gae_lambda=train.gae_lambda
    )
    moments = total(masked_moments(advantages, mask).tolist())
    white = whiten(advantages, mask, torch.tensor(moments, dtype=torch.float64))
    return {"advantages": white, "returns": returns}
