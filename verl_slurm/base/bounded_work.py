"""Limits memory and time of a library that reads other users' files and has no limits of its own."""

import math
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

__all__ = ["bounded_work"]

_MOST_SECONDS = 300.0


class _Overtime(BaseException):
    """Not an Exception: libraries catch those and continue."""


@contextmanager
def bounded_work(num_bytes: int, seconds: float = _MOST_SECONDS) -> Iterator[None]:
    """Limits the whole process; for the main thread of a process that does this work alone.

    Memory beyond `num_bytes` raises a MemoryError, or the library's own error for it. Python code that runs beyond
    `seconds` gets a TimeoutError. A loop in C never reaches Python's signal handler: after twice that processor time
    the kernel ends the process by SIGXCPU.
    """

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        raise _Overtime

    # Not RLIMIT_AS: a thread reserves 64 MB of addresses that it never touches.
    data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize() + num_bytes
    cpu = math.ceil(time.process_time() + 2 * seconds)
    before = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_DATA, resource.RLIMIT_CPU)}
    former = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        for kind, wanted in ((resource.RLIMIT_DATA, data), (resource.RLIMIT_CPU, cpu)):
            limits = [one for one in (wanted, *before[kind]) if one != resource.RLIM_INFINITY]
            resource.setrlimit(kind, (min(limits), before[kind][1]))
        yield
    except _Overtime:
        raise TimeoutError(f"no end after {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for kind, limits_before in before.items():
            resource.setrlimit(kind, limits_before)
        signal.signal(signal.SIGALRM, former)
