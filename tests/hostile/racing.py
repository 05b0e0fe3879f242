"""Real processes that are let go together, and have to come to their end."""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

FORK = multiprocessing.get_context("fork")
PATIENCE_S = 120.0
"""For a barrier and for a process's end; what needs longer has locked itself up."""


@contextlib.contextmanager
def processes(*work: tuple[Callable[..., None], tuple[Any, ...]]) -> Iterator[None]:
    """Run each in a process of its own until it ends; whoever fails, or does not end, fails the test."""
    running = [FORK.Process(target=target, args=args) for target, args in work]
    for process in running:
        process.start()
    try:
        yield
        for process, (target, _) in zip(running, work, strict=True):
            process.join(PATIENCE_S)
            assert process.exitcode is not None, f"{target.__name__} has locked itself up"
            assert process.exitcode == 0, f"{target.__name__} ended with {process.exitcode}"
    finally:
        for process in running:
            process.kill()
            process.join()
