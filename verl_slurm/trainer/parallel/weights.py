"""Yields the whole parameters of a model, however it is cut. A sampler takes its weights from here."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from verl_slurm.trainer.parallel.pipeline import Stage

__all__ = ["whole_parameters"]


def whole_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter by name, whole, one after the other, on every rank. Collective, to the end.

    One at a time, so that never more than one whole parameter exists beside the model. But a model of one FSDP2 group
    is gathered at once, as for a forward pass, and stays so: the passes that score the samples need the same weights. A
    stage's parameters go to the others of its line by broadcast.
    """
    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for group in groups:
        group.reshard()  # a forward without backward leaves some gathered
    mine: dict[str, Tensor] = dict(model.named_parameters())
    if len(groups) == 1:
        mine = _gathered(model, groups[0]) or mine
    if not isinstance(model, Stage):
        yield from ((name, _whole(parameter)) for name, parameter in mine.items())
        return
    like = next(iter(mine.values()))
    for name, shape, owner in model.directory:
        if owner == model.line.index:
            tensor = _whole(mine[name]).contiguous()
        else:
            tensor = torch.empty(shape, dtype=like.dtype, device=like.device)
        dist.broadcast(tensor, group=model.line.group, group_src=owner)
        yield name, tensor


def _gathered(model: nn.Module, group: FSDPModule) -> dict[str, Tensor] | None:
    """Returns all parameters as a forward pass sees them; None: those have another precision than their own."""
    dtypes = [parameter.dtype for parameter in model.parameters()]
    group.unshard()
    same = dtypes == [parameter.dtype for parameter in model.parameters()]
    return dict(model.named_parameters()) if same else None


def _whole(parameter: Tensor) -> Tensor:
    plain = parameter.detach()
    return plain.full_tensor() if isinstance(plain, DTensor) else plain
