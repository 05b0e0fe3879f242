"""Other people's dead: whoever adopts orphans has to wait for them, or each keeps its place in the table of processes.

An agent is the subreaper of its node's ranks, for as long as they train: what a reward program leaves behind without
waiting for it comes to us. So it does to a lead that is the first process of a container. Our own children are left
to those who started them. They are told apart by their session: a command that asks Slurm is in ours, agents and
launchers lead one of their own, and whatever ranks start is in theirs.
"""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

__all__ = ["bury_orphans"]


def bury_orphans(loop: asyncio.AbstractEventLoop) -> None:
    """From now on, wait for adopted children as they end. Called by: `agent`, `lead`, on the main thread."""
    due = False

    def bury() -> None:
        nonlocal due
        due = False
        for pid in _children():
            if _is_adopted_and_dead(pid):
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def wake() -> None:
        nonlocal due
        if not due:  # a thousand may end at once; one look finds them all
            due = True
            loop.call_soon(bury)

    loop.add_signal_handler(signal.SIGCHLD, wake)


def _children() -> list[int]:
    found: list[int] = []
    with suppress(
        OSError
    ):  # a kernel without CONFIG_PROC_CHILDREN: then they are buried with the rest, at the end
        for task in Path("/proc/self/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def _is_adopted_and_dead(pid: int) -> bool:
    try:
        # proc(5): pid (comm) state ppid pgrp session ...
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    state, session = fields[0], int(fields[3])
    return state == "Z" and session not in (pid, os.getsid(0))
