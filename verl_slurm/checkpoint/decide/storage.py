"""Judges whether a save fits and whether the medium is healthy. Pure; `medium.py` asks the system.

ROOM. `enough` is never a promise, and its reason says so; `not enough` is certain as far as the file system knows.

SPEED. A save is SLOW when its bytes per second lie below SLOW_FRACTION of the median of the earlier saves, and it lost
at least LEAST_LOSS_S by that. The medium is slow when the newest SLOW_SAVES are, each measured against the saves that
precede all of them. A medium is FAILING when the newest save on it ended with an error, whatever came before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

SLOW_FRACTION = 0.5
SLOW_SAVES = 3
# A fifth of a second more or less for a small save says nothing about a disk.
LEAST_LOSS_S = 1.0
_LEAST_HISTORY = 3
_WINDOW = 32
# For rollouts of another length, and a longer history.
_MARGIN = 0.1
# Disk space that a file may take beyond its bytes: the rest of its last block.
_BLOCK_BYTES = 4096
# Inodes of one save for its directories, the manifest, the hint and temporary names.
_SPARE_INODES = 16

HealthKind = Literal["unknown", "well", "slow", "failing"]


@dataclass(frozen=True, kw_only=True)
class FreeSpace:
    """Free space for a user without privileges; None: not reported, and `problem` may say why.

    Equal `device` numbers mean the same file system.
    """

    bytes: int | None = None
    inodes: int | None = None
    device: int | None = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Size of the next write; `basis` names the source of the number."""

    bytes: int
    inodes: int
    basis: str


@dataclass(frozen=True, kw_only=True)
class Room:
    """A verdict on room; `enough` is None if the file system does not report it."""

    enough: bool | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one save: its bytes and seconds, or why it failed (then `error` is not empty)."""

    num_bytes: int = 0
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Health:
    """A verdict on a medium."""

    kind: HealthKind
    reason: str


def need_of_next(
    last_bytes: int, num_files: int, *, copies: int = 1, basis: str = "the last save", margin: float = _MARGIN
) -> Need:
    """Returns what `copies` more checkpoints like the last one need, with an added share of `margin`."""
    one = round(last_bytes * (1.0 + margin)) + num_files * _BLOCK_BYTES
    words = basis if copies == 1 else f"{copies} checkpoints like {basis}"
    return Need(bytes=copies * one, inodes=copies * (num_files + _SPARE_INODES), basis=words)


def judge_room(free: FreeSpace, need: Need) -> Room:
    """Compares the need with the free space."""
    # Not known is not "not enough": a save that may well fit is tried.
    if free.problem or (free.bytes is None and free.inodes is None):
        reason = free.problem or "the file system does not say how much is free"
        return Room(enough=None, reason=reason)
    if free.bytes is not None and free.bytes < need.bytes:
        reason = f"{_gb(free.bytes)} free, {_gb(need.bytes)} needed ({need.basis})"
        return Room(enough=False, reason=reason)
    # Some file systems report no inodes (Btrfs, FUSE): then these are not judged.
    if free.inodes is not None and free.inodes < need.inodes:
        reason = f"{free.inodes} inodes free, {need.inodes} needed ({need.basis})"
        return Room(enough=False, reason=reason)
    if free.bytes is None:
        return Room(enough=None, reason="the file system counts inodes only")
    # On most file systems statvfs leaves out quotas of users, groups and projects, and thin pools: Lustre, GPFS and NFS
    # show the whole; some XFS project quotas do show.
    reason = f"{_gb(free.bytes)} free, {_gb(need.bytes)} needed ({need.basis}); quotas are not seen"
    return Room(enough=True, reason=reason)


def usual_speed(outcomes: Sequence[Outcome]) -> float | None:
    """Returns the median bytes per second of the successful saves; None: too few to tell."""
    speeds = [_speed(outcome) for outcome in outcomes if not outcome.error]
    known = [speed for speed in speeds if speed is not None][-_WINDOW:]
    return median(known) if len(known) >= _LEAST_HISTORY else None


def judge_health(outcomes: Sequence[Outcome]) -> Health:
    """Judges a medium by its saves, oldest first."""
    if not outcomes:
        return Health(kind="unknown", reason="nothing has been saved yet")
    failures = 0
    # From the newest back: the failures in a row are counted for the message.
    for outcome in reversed(outcomes):
        if not outcome.error:
            break
        failures += 1
    # Whatever came before: a save that failed now is what a run must know.
    if failures:
        times = "the last save" if failures == 1 else f"the last {failures} saves"
        return Health(kind="failing", reason=f"{times} failed: {outcomes[-1].error}")
    good = [outcome for outcome in outcomes if not outcome.error and _speed(outcome) is not None]
    now = _speed(good[-1]) if good else None
    # Without the newest: a disk that has just become slow must not lower what it is measured by.
    usual = usual_speed(good[:-SLOW_SAVES])
    if now is None or usual is None:
        return Health(kind="unknown", reason="too few saves to know its usual speed")
    newest = good[-SLOW_SAVES:]
    # All of them: one slow save may be another job's doing.
    if all(_is_slow(outcome, usual) for outcome in newest):
        reason = (
            f"{_mb(now)} a second, less than {SLOW_FRACTION:g} of its usual {_mb(usual)}, "
            f"for {SLOW_SAVES} saves in a row"
        )
        return Health(kind="slow", reason=reason)
    reason = f"{_mb(now)} a second, usually {_mb(usual)}"
    return Health(kind="well", reason=reason)


def _speed(outcome: Outcome) -> float | None:
    return outcome.num_bytes / outcome.seconds if outcome.num_bytes > 0 and outcome.seconds > 0.0 else None


def _is_slow(outcome: Outcome, usual: float) -> bool:
    lost = outcome.seconds - outcome.num_bytes / usual
    return outcome.num_bytes < SLOW_FRACTION * usual * outcome.seconds and lost >= LEAST_LOSS_S


def _gb(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else _mb(count)


def _mb(count: float) -> str:
    return f"{count / 1e6:.3g} MB"
