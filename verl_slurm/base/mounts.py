"""Reads what the kernel tells about mounted file systems: their kind, and what their stamps are worth."""

import os
import re
from pathlib import Path

# Prefixes for str.startswith; fuse covers fuse.sshfs and others.
_REMOTE = ("nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "ceph", "fuse", "panfs", "9p", "virtiofs", "afs")


def file_system(path: Path) -> str:
    """Returns the type as the kernel names it, e.g. `ext4`, `nfs4`, `tmpfs`; empty if it is unknown."""
    try:
        # O_PATH: it neither waits for a FIFO nor needs permission to read.
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            told = Path(f"/proc/self/fdinfo/{fd}").read_text()
        finally:
            os.close(fd)
        # Read anew each time: an automounter may have mounted it just now.
        mounted = parse_mounts(_MOUNTINFO.read_text(errors="replace"))
    except OSError:
        return ""
    # Not by the device number: some file systems (btrfs, overlay) give their files numbers that no mount has.
    found = re.search(r"^mnt_id:\s*(\d+)$", told, re.MULTILINE)
    return mounted.get(found[1], "") if found else ""


def is_remote(path: Path) -> bool:
    """Returns whether other machines write there, too."""
    # There inotify reports no writes of others, and every look costs a round trip.
    return file_system(path).startswith(_REMOTE)


_MOUNTINFO = Path("/proc/self/mountinfo")
# The kernel sets ctime, by its own clock; on the second line a server does, by its.
_WITH_CTIME = {
    # Not: FUSE (sshfs and s3fs report mtime instead), vfat and exfat (have none), cifs (its clients can set
    # it), squashfs, erofs and ISO images (an image made anew has the old stamps).
    *("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"),
    *("beegfs", "ceph", "gpfs", "lustre", "nfs", "nfs4"),
}


def keeps_ctime(path: Path) -> bool:
    """Returns whether on the file system of `path` each write moves ctime, and no program can set it."""
    return file_system(path) in _WITH_CTIME


def parse_mounts(text: str) -> dict[str, str]:
    """Returns file system types by the mount's id, from /proc/self/mountinfo, see proc(5). Pure; skips other lines."""
    found = {}
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        if separator:
            found[left.split(" ")[0]] = right.split(" ")[0]
    return found
