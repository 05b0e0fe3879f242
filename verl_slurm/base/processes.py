"""Identifies processes, and sets what the kernel does at their end.

A process is told from a later one with the same number by the boot and the clock tick in which it began.
"""

import ctypes
import resource
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Index in `stat_fields`; proc(5) counts it as 22.
_START_TIME = 19


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
    """Returns `BOOT_ID:TICKS` of a live process. Empty: there is none, it is a zombie, or it is not known."""
    # Not dates: psutil counts a process's creation from a boot time that moves whenever the clock is set. Two machines,
    # or one machine before and after that, disagree about it.
    try:
        fields = stat_fields(pid)
        # A zombie keeps its number, and does nothing more.
        return "" if fields[0] in "ZX" else f"{boot_id()}:{fields[_START_TIME]}"
    except OSError:
        return ""


def boot_id() -> str:
    """Returns the kernel's name for this boot."""
    return _BOOT_ID.read_text().strip()


def stat_fields(pid: int) -> list[str]:
    """Returns the fields of `/proc/PID/stat` after the command: state, ppid, pgrp, ... OSError: no such process."""
    # The process chooses its name freely, including blanks and brackets.
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36

# At module level, not in the functions: dlopen takes locks, and a fork may copy them in the locked state.
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Makes the kernel send this process a signal when the *thread* that forked it ends. For use between fork and
    exec.

    The exec of a set-user-ID program clears it. The kernel does not report a parent that died before this call.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def become_subreaper() -> None:
    """Makes orphaned descendants our children. We must wait() for them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def forbid_core_dumps(*, for_good: bool = False) -> None:
    """Turns core dumps off for this process and its children; `for_good`: none of them may raise the limit again."""
    # The soft limit alone by default: a user's own program may raise it again.
    hard = 0 if for_good else resource.getrlimit(resource.RLIMIT_CORE)[1]
    # A core file may hold a key or a token.
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    # If `kernel.core_pattern` is a program (systemd-coredump, apport), the kernel ignores the limit (core(5)); the
    # filter then leaves all memory out of the dump. Not PR_SET_DUMPABLE: each exec resets it, and it hides a process's
    # /proc from its own user, where the agent finds its ranks.
    with suppress(OSError):
        Path("/proc/self/coredump_filter").write_text("0")
