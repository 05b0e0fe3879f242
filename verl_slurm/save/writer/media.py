"""The media of a save: which it goes to and why, and its result on each. Pure.

Shared storage is the one that a resume reads. The node's own disk is the second copy, where the user named one
(`checkpoint.local_dir`): a save that only it took is `degraded`, and still a save.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from verl_slurm.checkpoint.format.specification import FileEntry

__all__ = ["Medium", "MediumResult", "problems_of", "why_not_shared"]

_SLACK = 1.5
"""A save under a preemption competes with every other job's; the last one's time is taken this many times."""


class Medium(StrEnum):
    """Where files go."""

    SHARED = "shared storage"
    LOCAL = "the nodes' disks"


class MediumResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a save on one medium, of one rank or of all. Ranks gather and broadcast it.

    Attributes:
        entries: of the files that are written, the same on each medium.
        num_bytes: of the committed checkpoint, over all ranks; 0 before the commit.
        problem: why not all files are durable there, or are not committed; empty: they are.
    """

    entries: tuple[FileEntry, ...] = ()
    num_bytes: int = 0
    problem: str = ""


def why_not_shared(last_seconds: float | None, seconds_left: float | None, *, has_local: bool) -> str:
    """Why a save is not even tried on shared storage; empty: it is.

    Args:
        last_seconds: that the last save took there; None: not known yet.
        seconds_left: until the ranks must be gone; None: no hurry.
    """
    if not has_local or last_seconds is None or seconds_left is None or seconds_left >= last_seconds * _SLACK:
        return ""
    return f"{seconds_left:.1f} s are left, and the last save took {last_seconds:.1f} s there"


def problems_of(ranks: Sequence[str]) -> str:
    """One text of each rank's problem, by rank; empty: there is none."""
    return "; ".join(f"rank {rank}: {problem}" for rank, problem in enumerate(ranks) if problem)[:500]
