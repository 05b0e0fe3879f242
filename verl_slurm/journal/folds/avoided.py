"""Which nodes a requeued job stays away from: those that failed it lately."""

from collections.abc import Collection, Iterable
from datetime import datetime

from verl_slurm.journal.events import Avoid, Event

__all__ = ["avoided_nodes"]


def avoided_nodes(
    events: Iterable[Event], new: Collection[str], now: datetime, for_s: float
) -> tuple[str, ...]:
    """The nodes to name to Slurm, sorted.

    Args:
        new: nodes found out just now.
        now: with a time zone.
        for_s: how long a node stays away.
    """
    nodes = set(new) if for_s > 0 else set()
    for event in events:
        if not isinstance(event, Avoid):
            continue
        try:
            age_s = (now - datetime.fromisoformat(event.time)).total_seconds()
        except (ValueError, TypeError):
            continue  # damaged, or without a time zone
        if age_s < for_s:
            nodes.update(event.nodes)
    return tuple(sorted(nodes))
