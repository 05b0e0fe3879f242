"""Defines the common interface of the rollout engines, which sample from the policy, and selects a run's engine.

An engine holds its own copy of the weights and receives them anew each step (`sync`). For every engine the noise of a
sample depends on the run's seed, the step and the sample alone (`counter_rng`). So a sample that is taken again, after
an interruption or in another batch, is the same sample.
"""

from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import nn

from verl_slurm.base.bounded import read_model_config
from verl_slurm.config.checks.rollout import check_engine, require_engine, sampling_dtype
from verl_slurm.config.schema import RunConfig
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer.data import Batch
from verl_slurm.trainer.objective.counter_rng import Purpose
from verl_slurm.trainer.rollout.sampling import HFRollout

__all__ = ["RolloutEngine", "build_engine"]


class RolloutEngine(Protocol):
    """A sampler. Runs on every rank."""

    @property
    def collective(self) -> bool:
        """Returns whether all ranks must call `generate` together; a rank that needs nothing passes prompts of no
        rows.
        """

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
    config: RunConfig, model: Path, *, eos_id: int, pad_id: int, device: torch.device, ranks: Collective
) -> RolloutEngine:
    """Builds the engine that `rollout.engine` names. Collective.

    Args:
        model: the directory to read the model's shape from.

    Raises:
        ConfigError: it is not installed, or cannot sample from this model.
    """
    require_engine(config)
    if config.rollout.engine == "hf":
        return HFRollout(
            model,
            config.rollout,
            seed=config.seed,
            eos_id=eos_id,
            pad_id=pad_id,
            dtype=sampling_dtype(config),
            attention=config.model.attn_implementation,
            device=device,
        )
    settled = msgspec.structs.replace(config.distributed, device=device.type)  # it may be auto
    described = read_model_config(model)
    check_engine(msgspec.structs.replace(config, distributed=settled), str(model), described)
    # Imported here because it imports vLLM (seconds, and an extra).
    from verl_slurm.trainer.rollout.vllm_rollout import VLLMRollout

    return VLLMRollout(model, config, eos_id=eos_id, pad_id=pad_id, device=device, ranks=ranks)
