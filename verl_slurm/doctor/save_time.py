"""Estimates how long an emergency save of a run takes: from measurements, or, before its first, from sizes. Pure."""

from collections.abc import Iterable

import msgspec

from verl_slurm.journal.events import Event
from verl_slurm.journal.folds.saves import measured_saves

__all__ = ["SaveTime", "expected_save", "measured_save"]

_LAST = 8
"""Saves looked at: storage today differs from storage a week ago."""


class SaveTime(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a save, from the safe point until it is on shared storage."""

    seconds: float
    basis: str
    """The source of the number, in words."""


def measured_save(events: Iterable[Event]) -> SaveTime | None:
    """Returns the slowest of a run's last saves; None: it has not saved yet.

    Args:
        events: of the run's journal, oldest first.
    """
    seconds = [seconds for _, seconds in measured_saves(events, _LAST)]
    if not seconds:
        return None
    return SaveTime(seconds=max(seconds), basis=f"the slowest of this run's last {len(seconds)} saves")


def expected_save(num_bytes: int, bytes_per_s: float) -> SaveTime:
    """Returns the expected time. Args: num_bytes: of one checkpoint. bytes_per_s: measured write speed, fsync
    included.
    """
    size, speed = num_bytes / 1e9, bytes_per_s / 1e6
    return SaveTime(
        seconds=num_bytes / bytes_per_s, basis=f"{size:.3g} GB at {speed:.0f} MB/s, as measured just now"
    )
