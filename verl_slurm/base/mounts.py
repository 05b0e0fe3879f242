"""Which file system a path is on."""

from pathlib import Path

import psutil

__all__ = ["file_system", "is_remote"]

# As str.startswith takes them; fuse covers fuse.sshfs and its like.
_REMOTE = ("nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "ceph", "fuse", "panfs", "9p", "virtiofs", "afs")


def file_system(path: Path) -> str:
    """Its type as the kernel names it, e.g. `ext4`, `nfs4`, `tmpfs`; empty: not known."""
    real = path.resolve()
    mounts = [p for p in psutil.disk_partitions(all=True) if real.is_relative_to(p.mountpoint)]
    return max(mounts, key=lambda p: len(p.mountpoint)).fstype if mounts else ""


def is_remote(path: Path) -> bool:
    """Whether other machines write there, too: inotify is silent about them, and every look costs a round trip."""
    return file_system(path).startswith(_REMOTE)
