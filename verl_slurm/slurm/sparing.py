"""Which nodes a job can do without. Pure."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence


def sparable(
    nodes: Sequence[str], usable: Mapping[str, str], excluded: Collection[str], needed: int
) -> tuple[str, ...]:
    """Returns those of `nodes` that can be excluded, the first ones first: of each kind, enough nodes stay.

    Nodes of the same kind that are up are counted: others may lack what a constraint or a GPU request asks for, and
    nothing withdraws an exclusion while a job waits. A node that is down is left to Slurm.

    Args:
        nodes: in the order in which they matter.
        usable: kinds by node (`parse.parse_usable_nodes`).
        excluded: nodes that the user excludes.
        needed: the job's number of nodes.
    """
    left = Counter(kind for node, kind in usable.items() if node not in excluded)
    spared = []
    for node in nodes:
        kind = usable.get(node)
        if kind is not None and node not in excluded and left[kind] > needed:
            left[kind] -= 1
            spared.append(node)
    return tuple(spared)
