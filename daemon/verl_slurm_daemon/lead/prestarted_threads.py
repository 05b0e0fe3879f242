"""Threads that are there already, for the end of a job on a machine that no longer gives any.

Reading a save back and asking Slurm each need a thread. Where the node, or the job's control group, has no process
to spare just then, a lead that had to start one would leave without asking for the requeue.
"""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

__all__ = ["keep_threads"]

_THREADS = 8
"""More than a lead has ever had at work: a scrub, a read-back, a look at the journal, and what asks Slurm."""


def keep_threads(loop: asyncio.AbstractEventLoop) -> None:
    """Have `asyncio.to_thread` use threads that are started now."""
    pool = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="lead")
    all_there = threading.Barrier(_THREADS + 1)
    with suppress(RuntimeError, threading.BrokenBarrierError):  # none to be had: then as before
        try:
            for _ in range(_THREADS):
                pool.submit(all_there.wait)
        except RuntimeError:
            all_there.abort()
        all_there.wait()
    loop.set_default_executor(pool)
