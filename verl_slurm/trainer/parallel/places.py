"""Computes the place of a rank among the others: numbers only, no torch. Pure.

The ranks are a grid of pipeline stages × data-parallel indexes × tensor-parallel indexes, tensor-parallel fastest:

    rank = (pp * DP + dp) * TP + tp

so the ranks that talk most are neighbours on one node. A REPLICA is all ranks of one data-parallel index:
together they hold the model once, and they work on the same rows. The prompts that a rank samples follow from
its data-parallel index alone.
"""

from dataclasses import dataclass

from verl_slurm.checkpoint.format.specification import Topology


@dataclass(frozen=True)
class Place3:
    """Indexes along the three axes, counted from 0."""

    pp: int
    dp: int
    tp: int


def place_of(rank: int, shape: Topology) -> Place3:
    """Returns the place of `rank`."""
    stage_and_dp, tp = divmod(rank, shape.tp)
    pp, dp = divmod(stage_and_dp, shape.dp)
    return Place3(pp, dp, tp)


def rank_at(place: Place3, shape: Topology) -> int:
    """Returns the rank at `place`."""
    return (place.pp * shape.dp + place.dp) * shape.tp + place.tp


def data_groups(shape: Topology) -> list[list[int]]:
    """Lists ranks with the same share of the model, which average their gradients; a group for each (pp, tp)."""
    return [
        [rank_at(Place3(pp, dp, tp), shape) for dp in range(shape.dp)]
        for pp in range(shape.pp)
        for tp in range(shape.tp)
    ]


def replica_groups(shape: Topology) -> list[list[int]]:
    """Lists ranks that hold the model together, stage by stage; a group for each data-parallel index."""
    return [
        [rank_at(Place3(pp, dp, tp), shape) for pp in range(shape.pp) for tp in range(shape.tp)]
        for dp in range(shape.dp)
    ]


def stage_groups(shape: Topology) -> list[list[int]]:
    """Lists ranks that pass activations to each other, first stage first; a group for each (dp, tp)."""
    return [
        [rank_at(Place3(pp, dp, tp), shape) for pp in range(shape.pp)]
        for dp in range(shape.dp)
        for tp in range(shape.tp)
    ]


def tensor_groups(shape: Topology) -> list[list[int]]:
    """Lists ranks that cut the same layers' matrices; a group for each (pp, dp)."""
    return [
        [rank_at(Place3(pp, dp, tp), shape) for tp in range(shape.tp)]
        for pp in range(shape.pp)
        for dp in range(shape.dp)
    ]


def axis_groups(shape: Topology) -> dict[str, list[list[int]]]:
    """Maps each axis to the groups of ranks that communicate along it. Axes of one rank are left out, except dp."""
    groups = {"dp": data_groups(shape)}
    if shape.tp > 1:
        groups["tp"] = tensor_groups(shape)
    if shape.pp > 1:
        groups["pp"] = stage_groups(shape)
    return groups


def leaders(shape: Topology) -> list[int]:
    """Lists the first rank of every replica, by data-parallel index."""
    # A leader journals, and its buffers represent the replica.
    return [group[0] for group in replica_groups(shape)]
