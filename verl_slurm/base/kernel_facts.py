"""Reads what the kernel tells: how much memory is left, what kind a file system is, what its stamps are worth."""

import os
import re
from contextlib import suppress
from pathlib import Path

_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
# Prefixes for str.startswith; fuse covers fuse.sshfs and others.
_REMOTE = ("nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "ceph", "fuse", "panfs", "9p", "virtiofs", "afs")


def available_memory(
    *, meminfo: Path = Path("/proc/meminfo"), cgroups: Path = Path("/sys/fs/cgroup"), own: Path | None = None
) -> int:
    """Bytes that this process may still use: of the machine, and of its control groups where they say less."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    # MemAvailable, not MemFree: the page cache gives way.
    least = int(fields["MemAvailable"].split()[0]) * 1024
    with suppress(OSError):
        for line in (own or Path("/proc/self/cgroup")).read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            # Version 2 has one hierarchy, of empty name; version 1 has one for each controller.
            if kinds not in {"", "memory"}:
                continue
            base = cgroups / kinds
            limit, usage = ("memory.max", "memory.current") if not kinds else _V1
            group = base / path.lstrip("/")
            # Slurm may set the limit on the job's, the step's or the task's group: each on the way up binds this
            # process.
            while group.is_relative_to(base):
                with suppress(OSError, ValueError):
                    # `max` is no number and means no limit; a group that cannot be read, as in a container, says
                    # nothing.
                    least = min(least, int((group / limit).read_text()) - int((group / usage).read_text()))
                if group == base:
                    break
                group = group.parent
    return max(0, least)


def oom_kills(*, cgroups: Path = Path("/sys/fs/cgroup"), own: Path | None = None) -> int | None:
    """Returns how many processes of this control group the kernel has killed for lack of memory; None: unknown."""
    with suppress(OSError):
        for line in (own or Path("/proc/self/cgroup")).read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            # Version 1 has one hierarchy for each controller or some of them; version 2 has one, of empty name.
            if kinds and "memory" not in kinds.split(","):
                continue
            base, file = (cgroups / kinds, "memory.oom_control") if kinds else (cgroups, "memory.events")
            # In a container the path may be that of the host, and the group is the root of what is mounted.
            for group in (base / path.lstrip("/"), base):
                with suppress(OSError, ValueError):
                    rows = dict(row.split() for row in (group / file).read_text().splitlines())
                    # The limit may be that of the job, the step or the whole node.
                    if "oom_kill" in rows:
                        return int(rows["oom_kill"])
    return None


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
