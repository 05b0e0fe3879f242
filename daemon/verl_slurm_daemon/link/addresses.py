"""Connects to the lead as soon as it has a free place."""

import asyncio
import contextlib
from collections.abc import Sequence

from verl_slurm.base.errors import WireError
from verl_slurm.wire.lead_file import LeadAddress
from verl_slurm_daemon.link.channel import LeadLink, connect

CONNECT_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0)


async def reach_lead(
    address: LeadAddress, epoch: int, warned: asyncio.Event, pauses: Sequence[float] = CONNECT_PAUSES_S
) -> LeadLink:
    """Tries until the lead has a free place: unknown peers may hold all of them for some seconds.

    Args:
        warned: set: the job is about to end, so this try is the last.
        pauses: between the tries, in seconds.

    Raises:
        WireError: the lead cannot be reached, or is of another attempt.
    """
    for pause in (*pauses, None):
        try:
            return await connect(address.host, address.port, bytes.fromhex(address.token), epoch)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            if pause is None or warned.is_set():
                raise WireError(
                    "the lead cannot be reached",
                    where=f"{address.host}:{address.port}",
                    found=f"{type(error).__name__} {error}",
                    remedy="are TCP connections between the job's nodes allowed?",
                ) from error
            # Slurm's TERM means that there may soon be nobody to reach, nor anybody who tries.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(warned.wait(), pause)
    raise AssertionError("unreachable")
