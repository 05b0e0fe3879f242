"""Ends a step of the job: by its processes' own end, then by srun."""

import asyncio
import contextlib
import signal
from collections.abc import Sequence

__all__ = ["GOODBYE_S", "end_step"]

GOODBYE_S = 5.0
"""From `Shutdown` to the end of the step: an agent needs under 0.3 s; then it is killed."""


async def end_step(step: Sequence[asyncio.subprocess.Process], each_s: float) -> bool:
    """Waits for the end of a step that was told to end, then ends it; returns whether it ended by itself.

    Args:
        each_s: seconds for its own end, for TERM and for KILL, each.
    """
    clean = True
    # First the agents' own end, then by srun, which passes TERM on to the step. KILL to srun comes last: without
    # its shepherd (`keep_step`) it leaves agents behind.
    for end in (None, signal.SIGTERM, signal.SIGKILL):
        alive = [process for process in step if process.returncode is None]
        if not alive:
            return clean
        for process in alive:
            if end is not None:
                clean = False
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(end)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(each_s):
                await asyncio.gather(*(process.wait() for process in alive))
    return clean
