"""Checks that the rollout engine sampled from the policy that is trained. Pure.

PPO takes the actor's own log probabilities as those of the behaviour policy. An engine with other weights (a sync was
lost, or lost a tensor) would give the wrong gradient, and that would look like bad luck. Two programs never agree to
the last bit, but a lost sync changes far more.

Measured with configs/quickstart.yaml (learning rate 5e-4, 8 updates a step) on a CPU, mean over a step's tokens:

    both engines, float32     2e-7 to 4e-7
    hf, bfloat16              0.0011 to 0.0015
    vllm, bfloat16            0.0035 to 0.0058
    one sync left out         0.06 (hf, float32, step 23) to 0.17 (vllm, bfloat16, step 3)

With much smaller steps one lost sync moves less than the rounding of bfloat16, and shows once more are lost.
"""

import torch
from torch import Tensor

from verl_slurm.base.errors import RolloutMismatch

__all__ = ["gap_and_tokens", "gap_limit", "require_small_gap"]


def gap_limit(set_to: float | None, dtype: str) -> float:
    """Returns `rollout.max_logprob_gap`, or its default if unset.

    Args:
        dtype: what both compute in.
    """
    if set_to is not None:
        return set_to
    return 0.002 if dtype == "float32" else 0.02


def gap_and_tokens(engine: Tensor, actor: Tensor, mask: Tensor) -> tuple[float, float]:
    """Returns the sum of |engine - actor| over the valid tokens, and their number.

    Args:
        engine, actor: log probabilities of the same tokens, float32 [N, T].
        mask: bool [N, T].
    """
    gap = torch.where(mask, (actor - engine).abs(), torch.zeros_like(actor))
    return float(gap.double().sum()), float(mask.double().sum())


def require_small_gap(total: float, tokens: float, *, limit: float, step: int) -> None:
    """Refuses a step's rollouts if their mean gap is above `limit` or NaN.

    Args:
        total, tokens: `gap_and_tokens`, summed over all ranks, so that all refuse alike.
        limit: nats.
        step: counted from 0.

    Raises:
        RolloutMismatch: with both numbers.
    """
    gap = total / max(tokens, 1.0)
    if gap <= limit:  # false for NaN
        return
    raise RolloutMismatch(
        "the rollout engine's log probabilities are not the policy's",
        where=f"step {step + 1}",
        found=f"a mean difference of {gap:.3g} nats a token",
        expected=f"at most rollout.max_logprob_gap={limit:g}",
        remedy=(
            "if the two computing differently explains it (bfloat16, other kernels), raise rollout.max_logprob_gap;"
            " else the engine's weights are not the actor's: report it. Submitted again, the run samples this step anew"
        ),
    )
