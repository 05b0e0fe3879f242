"""Ensures one writer per ledger segment, by a lock that the kernel drops when its holder dies."""

import fcntl
import time
from pathlib import Path

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode

__all__ = ["SegmentHeld", "lock_segment"]

_PATIENCE_S = 10.0
"""Seconds that a segment's former owner, just killed, may take to die."""
_LOOK_AGAIN_S = 0.1


class SegmentHeld(VerlSlurmError):
    """Another process holds the segment. It belongs to our own epoch, so it is about to die: try again."""

    exit_code = ExitCode.INTERNAL


def lock_segment(fd: int, path: Path) -> None:
    """Locks an open segment; the lock ends when the last copy of `fd` is closed.

    Polls: a blocking flock has no time limit, and on NFS is a loop of its own.

    Raises:
        SegmentHeld: another process holds it and does not end.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(_LOOK_AGAIN_S)
                continue
            raise SegmentHeld(
                "the ledger segment is held by a living process",
                where=path,
                expected=f"one writer a rank and attempt; waited {_PATIENCE_S:.0f} s for the other to end",
                remedy="wait for the older process to end, or begin a new attempt",
            ) from None
        except OSError:
            # A file system without locks (Lustre without -o flock). The epoch in the name still keeps
            # two attempts apart.
            pass
        return
