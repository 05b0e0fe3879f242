"""No core file may hold a key or a token: what keeps the kernel from writing one.

`RLIMIT_CORE` 0 stops those that go to a file. Where `kernel.core_pattern` is a program (systemd-coredump, apport) the
kernel does not look at the limit (core(5)); there `/proc/self/coredump_filter` 0 leaves all memory out of what the
program is given. Both are inherited by children. Not PR_SET_DUMPABLE, which would do it, too: it is lost at each exec,
and hides a process's /proc from its own user: the agent finds its ranks there.
"""

import resource
from contextlib import suppress
from pathlib import Path

__all__ = ["forbid_core_dumps"]


def forbid_core_dumps(*, for_good: bool = False) -> None:
    """From here on, for this process and its children. Where the kernel has no such filter, the limit has to do.

    Args:
        for_good: nothing that this process starts may raise the limit again.

    Called by: keys.load_keys, and the daemon's `__main__` for itself, its agents and their ranks.
    """
    hard = 0 if for_good else resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    with suppress(OSError):
        Path("/proc/self/coredump_filter").write_text("0")
