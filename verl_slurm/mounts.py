"""Which file system a path is on."""

from pathlib import Path

import psutil

__all__ = ["file_system"]


def file_system(path: Path) -> str:
    """Its type as the kernel names it, e.g. `ext4`, `nfs4`, `tmpfs`; empty: not known.

    Called by: submit.follow, doctor.places, benchmarks.
    """
    real = path.resolve()
    mounts = [p for p in psutil.disk_partitions(all=True) if real.is_relative_to(p.mountpoint)]
    return max(mounts, key=lambda p: len(p.mountpoint)).fstype if mounts else ""
