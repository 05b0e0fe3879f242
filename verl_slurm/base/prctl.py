"""Sets what the kernel does at a process's end: prctl(2), and no core files.

No core file may hold a key or a token. `RLIMIT_CORE` 0 stops those that go to a file. If `kernel.core_pattern` is a
program (systemd-coredump, apport), the kernel ignores the limit (core(5)). Then `/proc/self/coredump_filter` 0 leaves
all memory out of the dump. Children inherit both. PR_SET_DUMPABLE would also do it, but each exec resets it, and it
hides a process's /proc from its own user, where the agent finds its ranks.
"""

import ctypes
import resource
import signal
from contextlib import suppress
from pathlib import Path

__all__ = ["become_subreaper", "die_with_parent", "forbid_core_dumps"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36

# At module level, not in the functions: dlopen takes locks, and a fork may copy them in the locked state.
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Makes the kernel kill this process when the *thread* that forked it ends. May be called between fork and exec.

    The exec of a set-user-ID program clears it. The kernel does not report a parent that died before this call.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def become_subreaper() -> None:
    """Makes orphaned descendants our children. We must wait() for them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def forbid_core_dumps(*, for_good: bool = False) -> None:
    """Turns core dumps off for this process and its children. Without the kernel's filter, the limit must suffice.

    Args:
        for_good: no process that this one starts may raise the limit again.
    """
    hard = 0 if for_good else resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    with suppress(OSError):
        Path("/proc/self/coredump_filter").write_text("0")
