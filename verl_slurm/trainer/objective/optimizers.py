"""AdamW over the tensors that a rank holds, all of a model's shards in one call, and the course of its learning rate.

State, names and the saved form are torch's: DTensors laid out like their parameters. Exact: the same shape
and the same number of threads give the same bits every time.

The learning rate is a function of whole steps done, so it has no state to lose. `scheduler.json` in a checkpoint
records its rates, and a resume refuses when it would compute different ones. Every schedule begins with the same linear
warm-up, from base / warmup_steps in step 0 to base in the last step of the warm-up. Then it multiplies base by a factor
that begins at 1. A schedule that falls to a floor reaches it after the last step.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from verl_slurm.config.roles import Role, trained_roles
from verl_slurm.config.schema import TrainConfig
from verl_slurm.save.ranks.tensors import initialise_adamw

# For inverse_sqrt without a warm-up, as in transformers: the schedule needs some scale.
_TIMESCALE = 10_000


def learning_rate(base: float, config: TrainConfig, step: int) -> float:
    """Returns the rate for the updates of the step that follows `step` whole ones.

    Args:
        base: the highest rate.
        step: whole steps done, from 0.
    """
    # step + 1: a rate of 0 would make the first step of a run train nothing.
    if step < config.warmup_steps:
        return base * (step + 1) / config.warmup_steps
    return base * _FACTORS[config.lr_schedule](config, step)


def base_rates(config: TrainConfig) -> dict[Role, float]:
    """Returns the rate after warm-up of each model that trains."""
    rates: dict[Role, float] = {"actor": config.actor_lr, "critic": config.critic_lr}
    return {role: rates[role] for role in trained_roles(config)}


def schedule_record(config: TrainConfig, step: int) -> dict[str, dict[str, float | int | str]]:
    """Returns the content of `scheduler.json` for each optimizer after `step` whole steps."""
    return {
        role: {
            "schedule": config.lr_schedule,
            "warmup_steps": config.warmup_steps,
            "decay_steps": config.lr_decay_steps,
            "min_ratio": config.lr_min_ratio,
            "base_lr": base,
            "step": step,
            # The rate itself, beside what it follows from: a resume compares what was used.
            "lr": learning_rate(base, config, step),
        }
        for role, base in base_rates(config).items()
    }


def _constant(config: TrainConfig, step: int) -> float:
    del config, step
    return 1.0


def _linear(config: TrainConfig, step: int) -> float:
    return _floored(config, 1.0 - _done(config, step))


def _cosine(config: TrainConfig, step: int) -> float:
    """Half a cosine (Loshchilov & Hutter 2016, arXiv:1608.03983, without restarts)."""
    return _floored(config, 0.5 * (1.0 + math.cos(math.pi * _done(config, step))))


def _inverse_sqrt(config: TrainConfig, step: int) -> float:
    """1 / sqrt(time), in units of the warm-up (Vaswani et al. 2017, arXiv:1706.03762). Needs no last step."""
    scale = config.warmup_steps or _TIMESCALE
    return max(math.sqrt(scale / (step - config.warmup_steps + scale)), config.lr_min_ratio)


def _warmup_stable_decay(config: TrainConfig, step: int) -> float:
    """Constant, and in the last `lr_decay_steps` linear to the floor (Hu et al. 2024, arXiv:2404.06395)."""
    # At least 0: a finished run that is looked at has no steps left.
    left = max(config.steps - step, 0)
    return _floored(config, min(left / max(config.lr_decay_steps, 1), 1.0))


def _done(config: TrainConfig, step: int) -> float:
    """Returns the finished fraction of the time after warm-up, 0 to 1."""
    # At most 1, and never a division by 0: a run may be all warm-up, or be asked for beyond its end.
    return min((step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1), 1.0)


def _floored(config: TrainConfig, factor: float) -> float:
    """Maps 1 to 1 and 0 to the floor."""
    return config.lr_min_ratio + (1.0 - config.lr_min_ratio) * factor


_FACTORS: dict[str, Callable[[TrainConfig, int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "inverse_sqrt": _inverse_sqrt,
    "wsd": _warmup_stable_decay,
}


class LocalAdamW(AdamW):
    """torch's AdamW on the local part of every tensor: its fused kernel on a CPU, `foreach` on a GPU."""

    def __init__(self, params: list[nn.Parameter], *, lr: float, weight_decay: float) -> None:
        on_cpu = all(parameter.device.type == "cpu" for parameter in params)
        # On a GPU the fused kernel wants its count of updates there, too, and checkpoints have it on the CPU.
        super().__init__(params, lr=lr, weight_decay=weight_decay, fused=on_cpu, foreach=not on_cpu)

    # Not public: it collects the lists before `step` calls the kernels. torch is pinned, and a test compares with
    # torch's own.
    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> Any:
        found = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        # An update is elementwise, so it needs the local shards only. torch would ask each DTensor how it is
        # sharded: milliseconds per update for a small model.
        for tensors in lists:
            # In place: `step` holds these lists. The kernels then see plain tensors, all of a model in one call.
            tensors[:] = [_local(tensor) for tensor in tensors]
        return found


def build_optimizers(
    trained: Mapping[Role, nn.Module], train: TrainConfig, *, to_be_loaded: bool
) -> dict[Role, torch.optim.Optimizer]:
    """Builds an optimizer for each model, with its state allocated (`initialise_adamw`)."""
    rates = base_rates(train)
    made: dict[Role, torch.optim.Optimizer] = {}
    for role, model in trained.items():
        parameters = [p for p in model.parameters() if p.requires_grad]
        made[role] = LocalAdamW(parameters, lr=rates[role], weight_decay=train.weight_decay)
        # Now, not in the first update: a load fills the moments in place, and a save before that update has them, too.
        initialise_adamw(made[role], to_be_loaded=to_be_loaded)
    return made


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
