"""Tells a process from a later one that was given the same number: by the boot and the clock tick it began in.

Dates do not tell. psutil counts a process's creation time from a boot time that moves whenever the clock is set, and
two machines, or one before and after its clock was set, disagree about it.
"""

from pathlib import Path
from typing import NamedTuple

__all__ = ["KnownProcess", "birth_of", "boot_id", "known", "stat_fields"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_START_TIME = 19
"""Of `stat_fields`; proc(5) counts it as 22."""


class KnownProcess(NamedTuple):
    """One process, whatever becomes of its number."""

    pid: int
    born: str
    """`birth_of(pid)` when it was noted."""

    def is_running(self) -> bool:
        """Whether this very process is there, and no zombie."""
        return self.born != "" and birth_of(self.pid) == self.born


def known(pid: int) -> KnownProcess | None:
    """The process that has this number now."""
    born = birth_of(pid)
    return KnownProcess(pid, born) if born else None


def birth_of(pid: int) -> str:
    """`BOOT_ID:TICKS` of a living process; empty: there is none of that number, or it has ended and waits for its
    parent, or the system does not say.
    """
    try:
        fields = stat_fields(pid)
        return "" if fields[0] in "ZX" else f"{boot_id()}:{fields[_START_TIME]}"
    except OSError:
        return ""


def boot_id() -> str:
    """The kernel's name for this boot."""
    return _BOOT_ID.read_text().strip()


def stat_fields(pid: int) -> list[str]:
    """The fields of `/proc/PID/stat` after the command's name: state, ppid, pgrp, session, ...

    Raises:
        OSError: there is no such process.
    """
    # The name is any bytes that the process likes, blanks and brackets among them.
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
