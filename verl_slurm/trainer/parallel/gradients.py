"""Computes the joint norm of gradients on any number of meshes and stages."""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl_slurm.base.errors import Diverged
from verl_slurm.trainer.parallel.grid import Grid


def clip_over_grid(model: nn.Module, max_norm: float, grid: Grid) -> float:
    """Scales all gradients to a joint norm of at most `max_norm`; returns the norm before. Collective.

    Every rank sums the squares of the pieces that it counts, in float64; the sums are added in rank order. So
    the norm has the same bits on every rank.
    """
    # Not torch's function, which is for one mesh: norms are cut over dp, projections over dp and tp, layers
    # over stages.
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    counted = [_local(gradient) for gradient in gradients if _counts_here(gradient, grid)]
    # float64: a norm over a whole model is a sum of very many squares.
    norms = torch._foreach_norm(counted, 2, dtype=torch.float64) if counted else []
    mine = float(torch.stack(list(norms)).square().sum()) if counted else 0.0
    # Added in rank order, so every rank scales by the same bits, in every run.
    norm = math.sqrt(grid.world.sum([mine])[0])
    if gradients:
        # By this rank's own gradients, counted here or not: each copy of a tensor is scaled.
        torch._foreach_mul_([_local(g) for g in gradients], min(max_norm / (norm + 1e-6), 1.0))
    return norm


def require_finite(norm: float, role: str, step: int) -> float:
    """Returns a model's gradient norm, the same on every rank. Raises `Diverged` if it is not finite."""
    # The norm is not finite if one gradient is not, so it is the one number to look at.
    if math.isfinite(norm):
        return norm
    raise Diverged(
        "a gradient is not finite",
        where=f"step {step + 1}, {role}",
        found=f"norm {norm}",
        remedy=f"lower train.{role}_lr or train.max_grad_norm, look at the rewards in steps.jsonl, and submit again, "
        "from an earlier checkpoint if need be (checkpoint.resume_from)",
    )


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _counts_here(gradient: Tensor, grid: Grid) -> bool:
    """Returns whether no earlier rank holds the same piece."""
    if not isinstance(gradient, DTensor):
        return grid.place.tp == grid.place.dp == 0
    mesh = gradient.device_mesh
    # A parameter that is not cut over tp is on each of its ranks.
    if "tp" not in (mesh.mesh_dim_names or ()) and grid.place.tp != 0:
        return False
    place = mesh.get_coordinate() or ()
    copies = (index for index, kind in zip(place, gradient.placements, strict=True) if kind.is_replicate())
    return not any(copies)
