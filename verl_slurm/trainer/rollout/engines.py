"""Defines the common interface of the rollout engines, which sample from the policy; selects a run's, and checks it.

An engine holds its own copy of the weights and receives them anew each step (`sync`). In each the noise of a
sample depends on the run's seed, the step and the sample alone (`counter_rng`).

The check: PPO takes the actor's own log probabilities as those of the behaviour policy. An engine with other
weights (a sync was lost) would give the wrong gradient. A lost sync changes far more than rounding does.

Measured with configs/quickstart.yaml (learning rate 5e-4, 8 updates a step) on a CPU, mean over a step's tokens:

    both engines, float32     2e-7 to 4e-7
    hf, bfloat16              0.0011 to 0.0015
    vllm, bfloat16            0.0035 to 0.0058
    one sync left out         0.06 (hf, float32, step 23) to 0.17 (vllm, bfloat16, step 3)

With much smaller steps one lost sync moves less than the rounding of bfloat16, and shows once more are lost.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor, nn

from verl_slurm.base.bounded import read_model_config
from verl_slurm.base.errors import RolloutMismatch
from verl_slurm.config.checks.rollout import check_engine, require_engine, sampling_dtype
from verl_slurm.config.schema import RunConfig
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer.data import Batch
from verl_slurm.trainer.objective.counter_rng import Purpose
from verl_slurm.trainer.rollout.sampling import HFRollout


class RolloutEngine(Protocol):
    """A sampler. Runs on every rank."""

    @property
    def collective(self) -> bool:
        """Returns whether all ranks must call `generate` together, if need be with prompts of no rows."""

    def sync(self, actor: nn.Module) -> None:
        """Copies the actor's weights. Collective where the actor is sharded; once a step."""

    def generate(
        self,
        prompts: Batch,
        step: int,
        *,
        temperature: float | None = None,
        purpose: Purpose = Purpose.SAMPLE_TOKEN,
    ) -> Batch:
        """Samples one response for each prompt; arguments, columns and conventions as `HFRollout.generate`."""


def build_engine(
    config: RunConfig,
    model: Path,
    *,
    eos_ids: Sequence[int],
    pad_id: int,
    device: torch.device,
    ranks: Collective,
) -> RolloutEngine:
    """Builds the engine that `rollout.engine` names. Collective.

    Raises:
        ConfigError: it is not installed, or cannot sample from this model.
    """
    # Again here, though `submit` has asked: the ranks may have another environment than the login node.
    require_engine(config)
    if config.rollout.engine == "hf":
        return HFRollout(
            model,
            config.rollout,
            seed=config.seed,
            eos_ids=eos_ids,
            pad_id=pad_id,
            # The actor's own: samples of another precision come from another policy.
            dtype=sampling_dtype(config),
            attention=config.model.attn_implementation,
            device=device,
        )
    settled = msgspec.structs.replace(config.distributed, device=device.type)  # it may be auto
    described = read_model_config(model)
    # Asked again: `submit` did not know what `auto` is on the node, nor which config.json the job finds.
    check_engine(msgspec.structs.replace(config, distributed=settled), str(model), described)
    # Imported here because it imports vLLM (seconds, and an extra).
    from verl_slurm.trainer.rollout.vllm_rollout import VLLMRollout

    return VLLMRollout(model, config, eos_ids=eos_ids, pad_id=pad_id, device=device, ranks=ranks)


def gap_limit(set_to: float | None, dtype: str) -> float:
    """Returns `rollout.max_logprob_gap`, or if unset its default for the `dtype` that both compute in."""
    if set_to is not None:
        return set_to
    # Well above what two programs differ by, well below what one lost sync changes: see the table above.
    return 0.002 if dtype == "float32" else 0.02


def gap_and_tokens(engine: Tensor, actor: Tensor, mask: Tensor) -> tuple[float, float]:
    """Returns the sum of |engine - actor| over the valid tokens, and their number.

    Args:
        engine, actor: log probabilities of the same tokens, float32 [N, T].
    """
    # The padding has no log probability of its own.
    gap = torch.where(mask, (actor - engine).abs(), torch.zeros_like(actor))
    # float64, and a sum with its count: ranks have different numbers of tokens.
    return float(gap.double().sum()), float(mask.double().sum())


def require_small_gap(total: float, tokens: float, *, limit: float, step: int) -> None:
    """Refuses a step's rollouts if their mean gap is above `limit` or NaN.

    Args:
        total, tokens: `gap_and_tokens`, summed over all ranks.
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
