"""Did the rollout engine sample from the policy that is trained? Pure.

PPO takes the actor's own log probabilities as those of the behaviour policy. If the engine had other weights (a sync
that was lost, or lost a tensor), training would go on, on the wrong gradient, and only look like bad luck. Two programs
never agree to the last bit; what a lost sync changes is orders of magnitude more.
"""

import torch
from torch import Tensor

from verl_slurm.errors import RolloutMismatch

__all__ = ["gap_and_tokens", "require_small_gap"]


def gap_and_tokens(engine: Tensor, actor: Tensor, mask: Tensor) -> tuple[float, float]:
    """The sum of |engine - actor| over the valid tokens, and their number.

    Args:
        engine, actor: log probabilities of the same tokens, float32 [N, T].
        mask: bool [N, T].
    """
    gap = torch.where(mask, (actor - engine).abs(), torch.zeros_like(actor))
    return float(gap.double().sum()), float(mask.double().sum())


def require_small_gap(total: float, tokens: float, *, limit: float, step: int) -> None:
    """Refuse a step's rollouts whose mean gap is above `limit`, or no number.

    Args:
        total, tokens: `gap_and_tokens`, summed over all ranks: then all refuse alike.
        limit: nats.
        step: counted from 0.

    Raises:
        RolloutMismatch: with both numbers.

    Called by: trainer.step, before the rollouts are learned from.
    """
    gap = total / max(tokens, 1.0)
    if gap <= limit:  # not so for NaN
        return
    raise RolloutMismatch(
        "the rollout engine's log probabilities are not the policy's",
        where=f"step {step + 1}",
        found=f"a mean difference of {gap:.3g} nats a token",
        expected=f"at most rollout.max_logprob_gap={limit:g}",
        remedy=(
            "if the two computing differently explains it (bfloat16, other kernels), raise rollout.max_logprob_gap;"
            " else its weights are not the actor's: set rollout.engine=hf, and report it"
        ),
    )
