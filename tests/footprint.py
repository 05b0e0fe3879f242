"""What a process and a run hold of this machine, and whether it grows from one interruption to the next.

Called by: tests/slurm_cluster/test_soak.py.
"""

import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

Footprint = dict[str, float]
"""Of one process: `fds`, `threads`, `mb` (resident). Of a run: `litter` (files)."""


def look(process: psutil.Process) -> Footprint:
    """What it holds now."""
    with process.oneshot():
        return {
            "fds": float(process.num_fds()),
            "threads": float(process.num_threads()),
            "mb": process.memory_info().rss / 2**20,
        }


def litter(*roots: Path, known: Iterable[str] = ()) -> list[str]:
    """Names below `roots` that are neither what a run keeps (`known`: names of directories) nor anybody's but ours."""
    kept, found = set(known), []
    for root in roots:
        for directory, below, files in os.walk(root):
            below[:] = [name for name in below if name not in kept]
            found += [str(Path(directory, name)) for name in files]
    return sorted(found)


def growth(series: Sequence[float]) -> float:
    """Median of the last quarter less that of the first."""
    quarter = max(1, len(series) // 4)
    return statistics.median(series[-quarter:]) - statistics.median(series[:quarter])
