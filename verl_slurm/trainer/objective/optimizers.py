"""AdamW over the tensors that a rank holds: all of a model's shards in one call.

torch's own optimizer steps through DTensors one by one and asks each how it is sharded: milliseconds per update for a
small model. An update is elementwise, so it needs the local shards only. State, names and the saved form are torch's:
DTensors laid out like their parameters.

Exact: the same shape and the same number of threads give the same bits every time.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from verl_slurm.config.roles import Role
from verl_slurm.config.schema import TrainConfig
from verl_slurm.save.ranks.tensors import initialise_adamw
from verl_slurm.trainer.objective.schedule import base_rates

__all__ = ["LocalAdamW", "build_optimizers"]


class LocalAdamW(AdamW):
    """torch's AdamW on the local part of every tensor.

    On a CPU it uses torch's fused kernel: one pass over memory. On a GPU it uses `foreach`: the fused kernel there
    wants AdamW's count of updates on the GPU, too, and checkpoints have it on the CPU.
    """

    def __init__(self, params: list[nn.Parameter], *, lr: float, weight_decay: float) -> None:
        on_cpu = all(parameter.device.type == "cpu" for parameter in params)
        super().__init__(params, lr=lr, weight_decay=weight_decay, fused=on_cpu, foreach=not on_cpu)

    # Not public: it collects the lists before `step` calls the kernels. torch is pinned, and a test compares with
    # torch's own.
    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> Any:
        found = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
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
        initialise_adamw(made[role], to_be_loaded=to_be_loaded)
    return made


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
