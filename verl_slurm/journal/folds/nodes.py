"""What each node of a run does: it trains, saves, is spare, was lost, or is avoided."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from verl_slurm.journal.events import Crash, Event, NodesChosen, Restart, Started

NODE_STATES = {
    "starting": "starting",
    "launching": "starting",
    "running": "training",
    "saving": "saving",
    "checking": "saving",
    "paused": "restarting",
    "leaving": "leaving",
}
"""The state of a lead (`verl_slurm_daemon.decide.states`) -> that of the nodes whose ranks it leads."""


def lost_nodes(events: Iterable[Event]) -> list[str]:
    """Returns the nodes that the newest attempt has lost, oldest first."""
    lost: dict[str, bool] = {}
    for event in events:
        match event:
            # Slurm gives another set of nodes.
            case Started():
                lost = {}
            case Crash(kind="node", node=str(node), replaced=replaced):
                lost[node] = replaced
            # One that was not left out is part of the next start again.
            case Restart():
                lost = {node: replaced for node, replaced in lost.items() if replaced}
            case NodesChosen(train=train, spare=spare):
                lost = {node: replaced for node, replaced in lost.items() if node not in {*train, *spare}}
    return list(lost)


def node_states(
    status: Mapping[str, Any], lost: Collection[str], avoided: Collection[str], *, has_nodes: bool
) -> dict[str, list[str]]:
    """Returns the nodes by what they do; a state without nodes is left out.

    Args:
        status: the snapshot (`journal.status`).
        lost: as `lost_nodes` returns them.
        avoided: those that the next job stays away from.
        has_nodes: the run's job is running; one that waits or is over has none.
    """
    found: dict[str, list[str]] = {}
    if has_nodes:
        doing = NODE_STATES.get(str(status.get("state")), "waiting")
        spare = [str(node) for node in status.get("spare_nodes", ())]
        trained = [str(node) for node in status.get("train_nodes", ())]
        found[doing] = [node for node in trained if node not in lost]
        found["spare"] = [node for node in spare if node not in lost]
        found["lost"] = list(lost)
    found["avoided"] = list(avoided)
    return {state: nodes for state, nodes in found.items() if nodes}
