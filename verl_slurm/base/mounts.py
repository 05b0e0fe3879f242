"""Reads what the kernel tells about mounted file systems: their kind, their source, and what their stamps are worth."""

import os
import re
from pathlib import Path
from typing import NamedTuple

# Prefixes for str.startswith; fuse covers fuse.sshfs and others.
_REMOTE = ("nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "ceph", "fuse", "panfs", "9p", "virtiofs", "afs")


def file_system(path: Path) -> str:
    """Returns the type as the kernel names it, e.g. `ext4`, `nfs4`, `tmpfs`; empty if it is unknown."""
    mount = mount_of(path)
    return mount.kind if mount else ""


def is_remote(path: Path) -> bool:
    """Returns whether other machines write there, too: inotify does not report their writes, and every look costs a
    round trip."""
    return file_system(path).startswith(_REMOTE)


_MOUNTINFO = Path("/proc/self/mountinfo")
# On these the kernel sets ctime, by its own clock.
_LOCAL = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
# On these a server sets it. Of these, a source `server:/export` names the same files on every node.
_SHARED = {"beegfs", "ceph", "gpfs", "lustre", "nfs", "nfs4"}
_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """One mounted file system."""

    kind: str
    source: str

    @property
    def keeps_ctime(self) -> bool:
        """Returns whether each write moves ctime, and no program can set it.

        False, or unknown: FUSE (sshfs and s3fs report mtime instead), vfat and exfat (have none), cifs (its clients can
        set it), squashfs, erofs and ISO images (an image made anew has the old stamps).
        """
        return self.kind in _LOCAL or self.kind in _SHARED

    @property
    def name(self) -> str | None:
        """Returns a name that is the same on every node; None if there is none."""
        # Not the device number: for a network file system each kernel makes one up at each mount.
        return f"{self.kind} {self.source}" if self.kind in _SHARED and ":" in self.source else None


def mounts() -> dict[int, Mount]:
    """Maps device numbers to mounts; empty if the kernel does not tell."""
    return {device: mount for _, device, mount in _listed()}


def mount_of(path: str | Path) -> Mount | None:
    """Returns the mount that `path` lies on; None if the kernel does not tell."""
    try:
        # O_PATH: it neither waits for a FIFO nor needs permission to read.
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            told = Path(f"/proc/self/fdinfo/{fd}").read_text()
        finally:
            os.close(fd)
    except OSError:
        return None
    # Not by the device number: some file systems (btrfs, overlay) give their files numbers that no mount has.
    found = re.search(r"^mnt_id:\s*(\d+)$", told, re.MULTILINE)
    return next((m for number, _, m in _listed() if found and number == found[1]), None)


def parse_mounts(text: str) -> list[tuple[str, int, Mount]]:
    """Parses mount id, device number and mount from each line of /proc/self/mountinfo, see proc(5).

    Pure. Skips lines of another form.
    """
    found = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        words, last = left.split(" "), right.split(" ")
        if not separator or len(words) < 3 or len(last) < 2:
            continue
        major, _, minor = words[2].partition(":")
        if major.isdecimal() and minor.isdecimal() and max(len(major), len(minor)) < 10:
            # The kernel writes blanks, tabs, newlines and backslashes of names as octal escapes.
            source = _OCTAL.sub(lambda match: chr(int(match[1], 8)), last[1])
            found.append((words[0], os.makedev(int(major), int(minor)), Mount(last[0], source)))
    return found


def _listed() -> list[tuple[str, int, Mount]]:
    try:
        return parse_mounts(_MOUNTINFO.read_text(errors="replace"))
    except OSError:
        return []
