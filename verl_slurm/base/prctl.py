"""What a process asks of the kernel about its own end: prctl(2), and no core files.

No core file may hold a key or a token. `RLIMIT_CORE` 0 stops those that go to a file. Where `kernel.core_pattern` is a
program (systemd-coredump, apport) the kernel does not look at the limit (core(5)); there `/proc/self/coredump_filter` 0
leaves all memory out of what the program is given. Both are inherited by children. Not PR_SET_DUMPABLE, which would do
it, too: it is lost at each exec, and hides a process's /proc from its own user: the agent finds its ranks there.
"""

import ctypes
import resource
import signal
from contextlib import suppress
from pathlib import Path

__all__ = ["become_subreaper", "die_with_parent", "forbid_core_dumps"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36

# Not within the functions: dlopen takes locks, and a fork may have copied them as taken.
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Have the kernel kill this process when the *thread* that forked it ends. May be called between fork and exec.

    It is lost at the exec of a set-user-ID program. A parent that has died before is not noticed.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def become_subreaper() -> None:
    """Make orphans below us our children. They have to be waited for."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def forbid_core_dumps(*, for_good: bool = False) -> None:
    """From here on, for this process and its children. Where the kernel has no such filter, the limit has to do.

    Args:
        for_good: nothing that this process starts may raise the limit again.
    """
    hard = 0 if for_good else resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    with suppress(OSError):
        Path("/proc/self/coredump_filter").write_text("0")
