"""Builds the 3-D device mesh and the groups beside it, once."""

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl_slurm.checkpoint.format.specification import Topology
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer.parallel.places import Place3, data_groups, place_of, replica_groups, stage_groups


@dataclass(frozen=True, kw_only=True)
class Grid:
    """One rank's view of the shape.

    Attributes:
        mesh: axes `pp`, `dp`, `tp`; on the device's own backend.
        world: all ranks, over CPU.
        data: the ranks with the same share of the model, over CPU; its `rank` is the data-parallel index.
        replica: the ranks that hold the model together, over CPU.
        stages: the ranks of the same dp and tp index, first stage first, over CPU.
    """

    shape: Topology
    place: Place3
    mesh: DeviceMesh
    world: Collective
    data: Collective
    replica: Collective
    stages: Collective

    @property
    def is_leader(self) -> bool:
        """Returns whether this rank journals and counts for its replica."""
        return self.replica.rank == 0

    @property
    def waited_s(self) -> float:
        """Returns the seconds in the small collectives of all these groups so far (`Collective.waited_s`)."""
        groups = {id(group): group for group in (self.world, self.data, self.replica, self.stages)}
        return sum(group.waited_s for group in groups.values())

    @property
    def speaker(self) -> int:
        """Returns the rank in the replica that has the model's output: the first rank of the last stage."""
        return (self.shape.pp - 1) * self.shape.tp

    @property
    def speaks(self) -> bool:
        """Returns whether this rank is its replica's speaker, which also asks the reward."""
        return self.replica.rank == self.speaker


def make_grid(shape: Topology, device: torch.device, ranks: Collective) -> Grid:
    """Arranges all ranks. Collective: every rank makes every group, in the same order.

    Args:
        ranks: all of them, as many as `shape` says.
    """
    # A tensor cut over dp and tp is gathered in two steps, and torch would log each time that one step is faster.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    mesh = init_device_mesh(device.type, (shape.pp, shape.dp, shape.tp), mesh_dim_names=("pp", "dp", "tp"))
    return Grid(
        shape=shape,
        place=place_of(ranks.rank, shape),
        mesh=mesh,
        world=ranks,
        # Every rank makes every group in this order, also those that it is not in: making one is collective.
        data=_among(data_groups(shape), ranks),
        replica=_among(replica_groups(shape), ranks),
        stages=_among(stage_groups(shape), ranks),
    )


def _among(groups: list[list[int]], ranks: Collective) -> Collective:
    # All ranks: their group exists already.
    if len(groups) == 1:
        return ranks
    if len(groups[0]) == 1:
        return Collective(None)
    # gloo, also on GPUs: these groups carry numbers and bytes on the CPU.
    mine, _ = dist.new_subgroups_by_enumeration(groups, backend="gloo")  # type: ignore[no-untyped-call]
    return Collective(mine)
