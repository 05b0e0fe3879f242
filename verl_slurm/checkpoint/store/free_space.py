"""Asks the system (statvfs) for the free space on the file system of a path."""

import os
from pathlib import Path

from verl_slurm.checkpoint.decide.storage import FreeSpace, Need, Room, judge_room

__all__ = ["free_space", "room_for"]


def free_space(path: Path) -> FreeSpace:
    """Asks about `path`, or about its nearest existing parent. Never raises.

    Blocks as long as the file system does: on an NFS without its server, until the server is back.
    """
    place = path
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    try:
        stat, device = os.statvfs(place), os.stat(place).st_dev
    except OSError as error:
        return FreeSpace(problem=f"{place} could not be asked: {error.strerror}")
    # bavail, not bfree: blocks reserved for root are not ours. A file system that reports no blocks, or no inodes, at
    # all does not count them.
    return FreeSpace(
        bytes=stat.f_bavail * stat.f_frsize if stat.f_blocks else None,
        inodes=stat.f_favail if stat.f_files else None,
        total_bytes=stat.f_blocks * stat.f_frsize if stat.f_blocks else None,
        device=device,
    )


def room_for(path: Path, need: Need) -> Room:
    """Judges whether `need` fits where `path` lies or will lie."""
    return judge_room(free_space(path), need)
