"""What the journal says of checkpoints: how long saves took, when each was read last, which ones only nodes have."""

from collections.abc import Collection, Iterable

from verl_slurm.base.paths import CHECKPOINT_NAME
from verl_slurm.journal.events import (
    Adopted,
    Corrupt,
    Event,
    ForceResume,
    Pruned,
    Restart,
    Saved,
    Scrubbed,
    Started,
    TierFetched,
    Verified,
)


def newest_save(events: Iterable[Event]) -> tuple[str, str]:
    """The newest checkpoint since the run last went back, and what was done with it last. An empty name: none since
    then; two empty texts: the journal names none at all.

    Retention never takes it, so it is there, or it was lost. One that only nodes have, or whose first reading found it
    damaged, does not count.
    """
    newest = before = "", ""
    for event in events:
        match event:
            # It may have gone back, because the user said so, or because newer ones were lost, which was told then.
            case Restart(resume=name):
                newest = before = (name, "verified") if name else ("", "begun again")
            case ForceResume(lost=lost) if lost:
                newest = before = "", "begun again"
            case Saved(name=name, on_shared=True):
                before, newest = newest, (name, "saved")
            case Corrupt(name=name) | Pruned(name=name) if newest == (name, "saved"):
                newest = before
            case Verified(name=name) | TierFetched(name=name) if _order(name) >= _order(newest[0]):
                newest = name, "verified"
            case Adopted(checkpoints=names) if names:
                newest = max(
                    [newest, *((name, "taken over") for name in names)], key=lambda one: _order(one[0])
                )
    return newest


def _order(name: str) -> tuple[int, int]:
    match = CHECKPOINT_NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, -1)


def measured_saves(events: Iterable[Event], newest: int) -> list[tuple[int, float]]:
    """(bytes, seconds) of the `newest` last saves to shared storage, oldest first."""
    found = [
        (event.num_bytes, event.seconds)
        for event in events
        if isinstance(event, Saved)
        and event.on_shared
        and event.num_bytes is not None
        and event.num_bytes > 0
        and event.seconds is not None
        and 0.0 < event.seconds < float("inf")
    ]
    return found[-newest:] if newest > 0 else []


def last_judged(events: Iterable[Event]) -> dict[str, float]:
    """Checkpoint -> when it was judged last, in seconds since 1970.

    Judged: every byte was as written, or it was refused for what no second look would change.
    """
    found: dict[str, float] = {}
    for event in events:
        judged = isinstance(event, Verified) or (
            isinstance(event, Scrubbed) and (event.good or event.judged) and event.name
        )
        if judged and (at := event.at) is not None:
            assert isinstance(event, Verified | Scrubbed)
            found[event.name] = at
    return found


def on_nodes_alone(events: Iterable[Event], present: Collection[str], since: int = 0) -> dict[str, str]:
    """Checkpoint -> the nodes whose disks alone hold it: they are not in this job, or have lost it.

    Args:
        present: the names of the checkpoints on shared storage.
        since: the first attempt whose checkpoints count.
    """
    # Which nodes held it follows from the attempt's own Started.
    where, alone = "", dict[str, str]()
    for event in events:
        match event:
            case Started(nodes=nodes):
                where = nodes
            case Saved(name=name, on_shared=False):
                if (event.attempt or 0) >= since:
                    alone[name] = where
            case Saved():
                alone.clear()  # what is older is not missed
    return {name: nodes for name, nodes in alone.items() if name not in present}
