"""Tells how much memory this process may still use."""

from contextlib import suppress
from pathlib import Path

_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


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
