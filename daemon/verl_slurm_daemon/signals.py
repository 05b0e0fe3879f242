"""Handles the signals that Slurm and its users send to the processes of a step. None of them is a reason to die.

asyncio learns of a signal by a byte that Python's C handler writes to a socket. The socket holds a few hundred bytes.
A byte that finds no room is dropped, and its signal is lost. If a thousand children end while the loop waits for a
disk, the lost one may be a preemption's TERM. Here the byte serves to wake the loop, and a full socket does that as
well. The signal is reported by a handler of its own, which Python keeps pending until it has run.
"""

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

__all__ = ["RELAYED", "WARNINGS", "listen"]

WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGCONT, signal.SIGHUP)
"""Signals that the ranks and their launcher ignore. In a Slurm job an agent relays them to its lead."""
RELAYED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
"""Signals that an agent outside Slurm relays to its lead: there may be a terminal, where Ctrl-C has to end it."""


def listen(loop: asyncio.AbstractEventLoop, number: signal.Signals, heard: Callable[[], None]) -> None:
    """Makes the loop call `heard` for each such signal, however many others arrive with it.

    Signals of one number that arrive together may be reported as one: Unix does not count them.

    Runs on the main thread.
    """

    def tell(_number: int, _frame: FrameType | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: no handler is left to call
            loop.call_soon_threadsafe(heard)

    loop.add_signal_handler(number, lambda: None)
    # asyncio makes Python print a warning on stderr when the socket is full. A full socket is harmless here.
    signal.set_wakeup_fd(signal.set_wakeup_fd(-1), warn_on_full_buffer=False)
    signal.signal(number, tell)
