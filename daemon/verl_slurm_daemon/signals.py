"""Which signals Slurm and its users send to the processes of a step, none a reason to die, and how they are heard.

asyncio learns of a signal by a byte in a socket that Python's C handler writes. The socket holds a few hundred bytes; a
byte for which there is no room is dropped, and its signal never heard: of a thousand children that end while the loop
waits for a disk, that is one preemption's TERM. So the byte only wakes the loop here (one that is full is as good), and
the signal is told by a handler of its own, which Python keeps due until it has run.
"""

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

__all__ = ["RELAYED", "WARNINGS", "listen"]

WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGCONT, signal.SIGHUP)
"""What the ranks and their launcher ignore; and in a Slurm job, what an agent tells its lead."""
RELAYED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
"""What an agent outside Slurm tells its lead: there may be a terminal, and Ctrl-C is to end it."""


def listen(loop: asyncio.AbstractEventLoop, number: signal.Signals, heard: Callable[[], None]) -> None:
    """Have the loop call `heard` for each such signal, however many others come with it.

    Signals of one number that come together may be heard as one: Unix does not count them.

    Runs on the main thread.
    """

    def tell(_number: int, _frame: FrameType | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(heard)

    loop.add_signal_handler(number, lambda: None)
    # asyncio has Python say on stderr that the socket is full. It may be.
    signal.set_wakeup_fd(signal.set_wakeup_fd(-1), warn_on_full_buffer=False)
    signal.signal(number, tell)
