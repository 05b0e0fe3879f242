"""Finds the file system of a path."""

from pathlib import Path

import psutil

__all__ = ["file_system", "is_remote"]

# Prefixes for str.startswith; fuse covers fuse.sshfs and others.
_REMOTE = ("nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "ceph", "fuse", "panfs", "9p", "virtiofs", "afs")


def file_system(path: Path) -> str:
    """Returns the type as the kernel names it, e.g. `ext4`, `nfs4`, `tmpfs`; empty if it is unknown."""
    real = path.resolve()
    mounts = [p for p in psutil.disk_partitions(all=True) if real.is_relative_to(p.mountpoint)]
    return max(mounts, key=lambda p: len(p.mountpoint)).fstype if mounts else ""


def is_remote(path: Path) -> bool:
    """Returns whether other machines write there, too: inotify does not report their writes, and every look costs a
    round trip."""
    return file_system(path).startswith(_REMOTE)
