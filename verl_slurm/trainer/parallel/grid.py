"""Builds the 3-D device mesh and the groups beside it, once, and makes the ranks of one replica act as one: they find,
sample and score the same rows, bit for bit.

For a replica of one rank (dp alone) this adds nothing. In a larger one

* one rank, the leader, reads the ledger, journals and counts; the others receive what it found;
* every rank has a whole copy of the policy and samples an equal part of the prompts; parts are exchanged;
* one rank (the last pipeline stage's first) sends the output of a forward pass, and the reward, to all.

So all of them hold the same buffers however their kernels round. Samples equal those of a data-parallel run to its
rounding, and have the same bits in the same shape.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl_slurm.checkpoint.format.specification import Topology
from verl_slurm.runtime_state.record import pack, unpack
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer.data import Batch
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
    """Arranges all ranks, as many as `shape` says. Collective."""
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


class Sampler(Protocol):
    """Samples responses (`trainer.rollout.engines.RolloutEngine`)."""

    @property
    def collective(self) -> bool:
        """Returns whether every rank must call `generate`, even with prompts of no rows."""
        ...

    def generate(self, prompts: Batch, step: int) -> Batch:
        """Samples one response for each prompt."""
        ...


def _encoded(batch: Batch) -> bytes:
    return pack(None, {name: column.detach().contiguous().numpy() for name, column in batch.items()})


def _decoded(data: bytes) -> Batch:
    arrays = unpack(data, type(None), where="rows of this replica")[1]
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


class Replica:
    """The ranks of one data-parallel index. Every method is collective among them."""

    def __init__(self, grid: Grid) -> None:
        self._ranks, self._speaker = grid.replica, grid.speaker
        self.is_leader = grid.is_leader
        self.speaks = grid.speaks

    def found(self, look: Callable[[], Batch | None]) -> Batch | None:
        """Returns what the leader finds, or None, on all ranks alike."""
        # Data parallelism alone: no copy, no collective.
        if self._ranks.world_size == 1:
            return look()
        # One rank reads for all: two nodes may see different ends of one ledger file for a moment.
        mine = look() if self.is_leader else None
        data = self._ranks.share(_encoded(mine) if mine is not None else b"", source=0)
        return _decoded(data) if data else None

    def sample(self, sampler: Sampler, prompts: Batch, step: int) -> Batch:
        """Returns one response for each prompt; each rank samples its part."""
        size = self._ranks.world_size
        if size == 1:
            return sampler.generate(prompts, step)
        num = len(prompts["sample_id"])
        # Consecutive parts, gathered in rank order: the rows are in the order of the prompts again.
        mine = slice(self._ranks.rank * num // size, (self._ranks.rank + 1) * num // size)
        # A rank without a prompt sends nothing, and comes to a collective sampler all the same.
        part = b""
        if mine.start < mine.stop or sampler.collective:
            part = _encoded(sampler.generate({k: v[mine] for k, v in prompts.items()}, step))
        parts = [_decoded(data) for data in self._ranks.gather(part) if data]
        return {name: torch.cat([made[name] for made in parts]) for name in parts[-1]}

    def told(self, batch: Batch) -> Batch:
        """Returns the speaker's `batch` on all ranks. The others' is ignored."""
        if self._ranks.world_size == 1:
            return batch
        # Told, not computed by each: kernels would mostly round alike, and these columns decide what is trained next.
        data = self._ranks.share(_encoded(batch) if self.speaks else b"", source=self._speaker)
        return batch if self.speaks else _decoded(data)

    def told_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Returns the speaker's numbers on all ranks."""
        if self._ranks.world_size == 1:
            return list(numbers)
        data = self._ranks.share(msgspec.msgpack.encode(list(numbers)), source=self._speaker)
        return msgspec.msgpack.decode(data, type=list[float])
