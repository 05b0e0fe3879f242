"""Ranks in a grid: every one has its place, and groups cover all of them."""

import pytest

from verl_slurm.checkpoint.format.specification import Topology
from verl_slurm.trainer.parallel.places import (
    Place3,
    axis_groups,
    data_groups,
    leaders,
    place_of,
    rank_at,
    replica_groups,
    stage_groups,
    tensor_groups,
)

SHAPES = [Topology(dp=dp, tp=tp, pp=pp) for dp in (1, 2, 3) for tp in (1, 2) for pp in (1, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_places_and_ranks_are_one_to_one_and_every_group_covers_all_ranks(shape: Topology) -> None:
    world = shape.dp * shape.tp * shape.pp
    assert [rank_at(place_of(rank, shape), shape) for rank in range(world)] == list(range(world))
    for groups in (data_groups, replica_groups, stage_groups, tensor_groups):
        assert sorted(rank for group in groups(shape) for rank in group) == list(range(world))
        # Collective numbers its ranks in rising order: it must be that of the axis.
        assert all(group == sorted(group) for group in groups(shape))
    for dp, group in enumerate(replica_groups(shape)):
        assert {place_of(rank, shape).dp for rank in group} == {dp}
        assert leaders(shape)[dp] == group[0] == rank_at(Place3(0, dp, 0), shape)


def test_tensor_parallel_ranks_are_neighbours_and_stages_are_far_apart() -> None:
    shape = Topology(dp=2, tp=2, pp=2)
    assert axis_groups(shape) == {
        "dp": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "pp": [[0, 4], [1, 5], [2, 6], [3, 7]],
    }
    assert axis_groups(Topology(dp=3)) == {"dp": [[0, 1, 2]]}
