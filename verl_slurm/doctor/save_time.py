"""How long an emergency save of a run takes: as it was measured, or, before its first, as it can be expected. Pure."""

from collections.abc import Iterable

import msgspec

from verl_slurm.journal.events import Event
from verl_slurm.journal.folds.saves import measured_saves

__all__ = ["SaveTime", "expected_save", "measured_save"]

_LAST = 8
"""Saves looked at: storage is not today what it was a week ago."""


class SaveTime(msgspec.Struct, frozen=True, kw_only=True):
    """What a save needs, from the safe point until it is on shared storage."""

    seconds: float
    basis: str
    """Where the number comes from, as words."""


def measured_save(events: Iterable[Event]) -> SaveTime | None:
    """The slowest of a run's last saves; None: it has not saved yet.

    Args:
        events: of the run's journal, oldest first.
    """
    seconds = [seconds for _, seconds in measured_saves(events, _LAST)]
    if not seconds:
        return None
    return SaveTime(seconds=max(seconds), basis=f"the slowest of this run's last {len(seconds)} saves")


def expected_save(num_bytes: int, bytes_per_s: float) -> SaveTime:
    """Args: num_bytes: of one checkpoint. bytes_per_s: as storage was measured to write, fsync included."""
    size, speed = num_bytes / 1e9, bytes_per_s / 1e6
    return SaveTime(
        seconds=num_bytes / bytes_per_s, basis=f"{size:.3g} GB at {speed:.0f} MB/s, as measured just now"
    )
