"""Reaps orphaned descendants. A subreaper must wait() for processes it adopts, or they stay as zombies.

An agent is the subreaper of its node's ranks as long as they train, so it adopts what a reward program leaves
behind without waiting for it. A lead that is the first process of a container adopts orphans in the same way.
The daemon's own children are left to the code that started them.

The session tells the two apart. A command that asks Slurm is in the daemon's session; agents and launchers
lead sessions of their own; processes that ranks start are in the ranks' sessions. A session leader may be
either. asyncio starts the daemon's own children and has a thread (or a descriptor) waiting for each. So a
dead session leader that is still there a while later is an orphan.
"""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

from verl_slurm.base.processes import stat_fields
from verl_slurm_daemon.signals import listen

__all__ = ["bury_orphans"]

_LATE_S = 5.0


def bury_orphans(loop: asyncio.AbstractEventLoop) -> None:
    """Reaps adopted children as they end, from now on. Runs on the main thread."""
    due = late = False

    def bury(leaders: frozenset[int] = frozenset()) -> None:
        """Reaps the dead. Args: leaders: the session leaders that were dead a while ago already."""
        nonlocal due, late
        due, again = False, set()
        for pid in _children():
            session = _session_of_dead(pid)
            if session in (None, os.getsid(0)):
                continue
            if session == pid and pid not in leaders:
                again.add(pid)
                continue
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if again and not late:
            late = True
            loop.call_later(_LATE_S, look_again, frozenset(again))

    def look_again(leaders: frozenset[int]) -> None:
        nonlocal late
        late = False
        bury(leaders)

    def wake() -> None:
        nonlocal due
        if not due:  # a thousand may end at once; one look finds them all
            due = True
            loop.call_soon(bury)

    listen(loop, signal.SIGCHLD, wake)


def _children() -> list[int]:
    found: list[int] = []
    with suppress(OSError):  # no CONFIG_PROC_CHILDREN in this kernel: zombies stay until the end
        for task in Path("/proc/self/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def _session_of_dead(pid: int) -> int | None:
    """Returns the session of a dead process; None: it lives, or is gone."""
    try:
        fields = stat_fields(pid)
    except OSError:
        return None
    return int(fields[3]) if fields[0] == "Z" else None
