"""Other people's dead: whoever adopts orphans has to wait for them, or each keeps its place in the table of processes.

An agent is the subreaper of its node's ranks, for as long as they train: what a reward program leaves behind without
waiting for it comes to us. So it does to a lead that is the first process of a container. Our own children are left
to those who started them. They are told apart by their session: a command that asks Slurm is in ours, agents and
launchers lead one of their own, and whatever ranks start is in theirs. What leads a session of its own may be either:
asyncio, which starts ours, has a thread (or a descriptor) waiting for each, so one that is still there a while later
is nobody's.
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
    """From now on, wait for adopted children as they end. Runs on the main thread."""
    due = late = False

    def bury(leaders: frozenset[int] = frozenset()) -> None:
        """Args: leaders: those that were dead a while ago already."""
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
    with suppress(
        OSError
    ):  # a kernel without CONFIG_PROC_CHILDREN: then they are buried with the rest, at the end
        for task in Path("/proc/self/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def _session_of_dead(pid: int) -> int | None:
    """None: it lives, or is gone."""
    try:
        fields = stat_fields(pid)
    except OSError:
        return None
    return int(fields[3]) if fields[0] == "Z" else None
