"""Which of the bad nodes a job can do without."""

import pytest

from verl_slurm.slurm.requeue_rules import sparable

USABLE = {"n1": "gpu", "n2": "gpu", "n3": "gpu", "n4": "cpu", "n5": "cpu"}


@pytest.mark.parametrize(
    ("nodes", "excluded", "needed", "spared"),
    [
        (("n1",), (), 2, ("n1",)),
        (("n1", "n2"), (), 2, ("n1",)),  # the first ones matter most: the last is let in again
        (("n2", "n1"), (), 2, ("n2",)),
        (("n1", "n2", "n3"), (), 3, ()),
        (("n1",), ("n2",), 2, ()),
        (("n1",), ("n1",), 1, ()),  # the user excludes it already
        (("n9", "n1"), (), 2, ("n1",)),  # down: left to Slurm
        (("n4", "n1"), (), 2, ("n1",)),  # each kind by itself: GPUs are not made up for by other nodes
    ],
)
def test_enough_nodes_of_each_kind_stay(
    nodes: tuple[str, ...], excluded: tuple[str, ...], needed: int, spared: tuple[str, ...]
) -> None:
    assert sparable(nodes, USABLE, excluded, needed) == spared
