"""Lists a run's journal segments by their names (`format.py`, section 3)."""

import os
import re
import stat
from pathlib import Path

from verl_slurm.base.paths import RunPaths

__all__ = ["owner", "segments"]

_SEGMENT = re.compile(r"epoch_(\d{6,})\.rank_(\d{4,})\.ledger", re.ASCII)


def owner(path: Path) -> tuple[int, int]:
    """Returns epoch and rank of a segment that `segments` found."""
    match = _SEGMENT.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2])


def segments(paths: RunPaths) -> list[tuple[int, int, Path]]:
    """Lists (epoch, rank, path) of every segment, oldest epoch first. Other names are no segments."""
    try:
        entries = list(os.scandir(paths.ledger))
    except FileNotFoundError:
        return []
    return sorted(
        (*owner(Path(entry.path)), Path(entry.path))
        for entry in entries
        if _SEGMENT.fullmatch(entry.name) and stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode)
    )
