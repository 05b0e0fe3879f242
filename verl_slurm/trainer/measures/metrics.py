"""Computes the columns of a step that describe it: the spread of scores, the quality of the critic, and what it cost.

Training does not depend on them. The costs (`step_costs`) never go into the history.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from verl_slurm.save.ranks.collective import Collective


def step_measures(
    scored: Mapping[str, Tensor],
    estimates: Mapping[str, Tensor],
    mask: Tensor,
    ranks: Collective,
    *,
    group: int | None = None,
) -> dict[str, float]:
    """Returns columns of the step's row, the same bits on every rank. Collective, once a step.

    Args:
        scored: scores [N]; old_values [N, T] where there is a critic.
        estimates: returns [N, T] where there is a critic.
        mask: bool [N, T], true on response tokens.
        group: consecutive responses whose rewards are compared with each other; None: all of the step.
    """
    scores = scored["scores"].double()
    mine = [float(len(scores)), float(scores.sum()), float((scores * scores).sum())]
    groups = scores.reshape(-1, group or 1)
    mine += [float(len(groups)), float((groups == groups[:, :1]).all(dim=1).sum())]
    has_critic = "old_values" in scored and "returns" in estimates
    if has_critic:
        mine += _value_sums(estimates["returns"], scored["old_values"], mask)
    # One collective for all columns; sums in rank order give the same bits on every rank.
    sums = ranks.sum(mine)
    row = {"reward_std": math.sqrt(_variance(*sums[:3]))}
    # Rounding leaves about 1e-16 of the mean square.
    no_spread = _variance(*sums[:3]) <= 1e-12 * sums[2] / max(sums[0], 1.0)
    row["equal_rewards"] = float(no_spread) if group is None else sums[4] / max(sums[3], 1.0)
    if has_critic:
        row["explained_variance"] = explained_variance(*sums[5:])
    return row


def explained_variance(
    count: float, returns: float, squares: float, errors: float, error_squares: float
) -> float:
    """Returns 1 - Var(returns - values) / Var(returns) over tokens; 0 where all returns are the same.

    1 is a perfect critic, 0 one that predicts no better than the mean, and a negative number one that misleads.

    Args:
        count: tokens.
        returns, squares: sums of the returns and of their squares.
        errors, error_squares: the same of returns - values.
    """
    variance = _variance(count, returns, squares)
    # Without variance, rounding leaves about 1e-16 of the mean square.
    if count == 0 or variance <= 1e-12 * squares / count:
        return 0.0
    return 1.0 - _variance(count, errors, error_squares) / variance


def _value_sums(returns_NT: Tensor, values_NT: Tensor, mask: Tensor) -> list[float]:
    # Outside the mask the values are meaningless.
    returns = torch.where(mask, returns_NT, torch.zeros_like(returns_NT)).double()
    errors = torch.where(mask, returns_NT - values_NT, torch.zeros_like(returns_NT)).double()
    columns = (mask.double(), returns, returns * returns, errors, errors * errors)
    return [float(column.sum()) for column in columns]


def _variance(count: float, total: float, squares: float) -> float:
    if count == 0:
        return 0.0
    mean = total / count
    # Clamped: of equal numbers, rounding leaves a difference slightly below 0.
    return max(squares / count - mean * mean, 0.0)


def step_costs(
    phases: Mapping[str, float],
    parts: Mapping[str, float],
    *,
    step_s: float,
    waited_s: float,
    new_tokens: int,
    trained_tokens: int,
    memory: int,
) -> dict[str, float]:
    """Returns the timings of a whole step of this rank in seconds, tokens a second, and bytes.

    Args:
        phases: seconds of `generate`, `score`, `update`, and of `evaluate` if the step was evaluated.
        parts: `actor_update_s`, `critic_update_s`, `communication_s` (`trainer.measures.stopwatch`).
        step_s: since the previous step or the begin of training, with saves and all waiting.
        waited_s: in small collectives between the ranks (`Collective.waited_s`).
        new_tokens: sampled over all ranks; replayed rollouts do not count.
        trained_tokens: that the actor was updated on, over all ranks and epochs.
    """
    timings = {f"{name}_s": phases.get(name, 0.0) for name in ("generate", "score", "update")}
    if "evaluate" in phases:
        timings["eval_s"] = phases["evaluate"]
    sampled_s = timings["generate_s"]
    communication_s = parts.get("communication_s", 0.0) + waited_s
    actor_s = parts.get("actor_update_s", 0.0)
    return {
        **timings,
        **parts,
        "tokens_per_second": new_tokens / sampled_s if sampled_s else 0.0,
        "communication_s": communication_s,
        "step_s": step_s,
        # At most 1: on a GPU collectives overlap, so their times add up to more than the step.
        "communication_share": min(communication_s / step_s, 1.0) if step_s > 0.0 else 0.0,
        "actor_tokens_per_second": trained_tokens / actor_s if actor_s > 0.0 else 0.0,
        "memory_bytes": float(memory),
    }
