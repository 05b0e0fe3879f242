"""Starts threads in advance, for the end of a job on a machine that has no process to spare.

Reading a save back and asking Slurm each need a thread. If the node or the job's control group cannot start
one at that moment, the lead would leave without asking for the requeue.
"""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

__all__ = ["keep_threads"]

_THREADS = 8
"""More than a lead was ever seen to use at once: a scrub, a read-back, a look at the journal, and requests to Slurm."""


def keep_threads(loop: asyncio.AbstractEventLoop) -> None:
    """Makes `asyncio.to_thread` use threads that are started now."""
    pool = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="lead")
    all_there = threading.Barrier(_THREADS + 1)
    with suppress(RuntimeError, threading.BrokenBarrierError):  # none can be started now
        try:
            for _ in range(_THREADS):
                pool.submit(all_there.wait)
        except RuntimeError:
            all_there.abort()
        all_there.wait()
    loop.set_default_executor(pool)
