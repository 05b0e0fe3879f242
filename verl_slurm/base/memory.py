"""Tells how much memory this process may still use."""

from contextlib import suppress
from pathlib import Path

__all__ = ["available_memory"]

_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def available_memory(
    *, meminfo: Path = Path("/proc/meminfo"), cgroups: Path = Path("/sys/fs/cgroup"), own: Path | None = None
) -> int:
    """Bytes that this process may still use: of the machine, and of its control groups where they say less.

    Args:
        meminfo, cgroups, own: where the kernel tells; `own` is this process's `/proc/self/cgroup`.
    """
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
