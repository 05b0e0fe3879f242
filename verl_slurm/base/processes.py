"""Tells a process from a later one with the same number: by the boot and the clock tick in which it began.

Dates do not tell. psutil counts a process's creation time from a boot time that moves whenever the clock is set. Two
machines, or one machine before and after its clock was set, disagree about it.
"""

from pathlib import Path
from typing import NamedTuple

__all__ = ["KnownProcess", "birth_of", "boot_id", "known", "stat_fields"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_START_TIME = 19
"""Index in `stat_fields`; proc(5) counts it as 22."""


class KnownProcess(NamedTuple):
    """Identifies one process even after its number is reused."""

    pid: int
    born: str
    """`birth_of(pid)` when the process was recorded."""

    def is_running(self) -> bool:
        """Returns whether this process still runs and is no zombie."""
        return self.born != "" and birth_of(self.pid) == self.born


def known(pid: int) -> KnownProcess | None:
    """Returns the process that has this number now."""
    born = birth_of(pid)
    return KnownProcess(pid, born) if born else None


def birth_of(pid: int) -> str:
    """Returns `BOOT_ID:TICKS` of a live process. Empty: no process has that number, or it has ended and waits for its
    parent, or the system does not tell.
    """
    try:
        fields = stat_fields(pid)
        return "" if fields[0] in "ZX" else f"{boot_id()}:{fields[_START_TIME]}"
    except OSError:
        return ""


def boot_id() -> str:
    """Returns the kernel's name for this boot."""
    return _BOOT_ID.read_text().strip()


def stat_fields(pid: int) -> list[str]:
    """Returns the fields of `/proc/PID/stat` after the command's name: state, ppid, pgrp, session, ...

    Raises:
        OSError: there is no such process.
    """
    # The process chooses its name freely, including blanks and brackets.
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
