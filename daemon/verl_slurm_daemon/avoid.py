"""Which nodes a requeued job stays away from: those that failed it lately. Pure; the journal is the memory."""

from collections.abc import Sequence
from datetime import datetime

from verl_slurm.events import Event

__all__ = ["avoided"]


def avoided(events: Sequence[Event], new: Sequence[str], now: datetime, for_s: float) -> tuple[str, ...]:
    """The nodes to name to Slurm, sorted.

    Args:
        events: the run's journal; `avoid` events have `nodes`.
        new: nodes found out just now.
        now: with a time zone.
        for_s: how long a node stays away.
    """
    nodes = set(new) if for_s > 0 else set()
    for event in events:
        told = event.get("nodes")
        if event.get("event") != "avoid" or not isinstance(told, list):
            continue
        try:
            age_s = (now - datetime.fromisoformat(str(event.get("time")))).total_seconds()
        except (ValueError, TypeError):
            continue  # damaged, or without a zone: nobody knows when
        if age_s < for_s:
            nodes |= {str(node) for node in told}
    return tuple(sorted(nodes))
