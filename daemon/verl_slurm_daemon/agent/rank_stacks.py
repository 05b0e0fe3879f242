"""Has all processes of this node that can do so write down where their threads are."""

import asyncio
import contextlib
import os
from pathlib import Path

from verl_slurm.base.files import open_log
from verl_slurm.base.one_line import printable
from verl_slurm.wire.environment import STACKS_SIGNAL
from verl_slurm_daemon.descendants import listeners

_ALL_S = 2.0
"""For all processes one after the other: the lead waits five seconds for the agents of all nodes."""
_EACH_S = 0.05
"""Two that write at once would mix their lines."""
_MOST_SHOWN = 160


async def write_stacks(log: Path) -> None:
    """Signals each process below this one that answers (`wire.stacks`): ranks, their data loaders, and Ray's workers
    and engines.

    Args:
        log: of the ranks, to which the answers go.
    """
    # In a thread: it reads /proc for each process below.
    found = await asyncio.to_thread(listeners, STACKS_SIGNAL)
    pause_s = min(_EACH_S, _ALL_S / max(len(found), 1))
    with contextlib.suppress(OSError):
        fd = open_log(log)
        try:
            for process, name in found:
                os.write(
                    fd, f"\n---- stacks of {printable(name)[:_MOST_SHOWN]} (pid {process.pid})\n".encode()
                )
                with contextlib.suppress(OSError):
                    process.send_signal(STACKS_SIGNAL)
                await asyncio.sleep(pause_s)  # nothing tells that a process has written its last line
        finally:
            os.close(fd)
