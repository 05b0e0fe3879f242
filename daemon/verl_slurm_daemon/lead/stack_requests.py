"""Has all ranks write down where they are, before they are ended because of a hang."""

import asyncio
import contextlib
from collections.abc import Collection

from verl_slurm.journal import events as ev
from verl_slurm.wire.messages import DumpStacks, StacksWritten
from verl_slurm_daemon.journal import Journal
from verl_slurm_daemon.link.channel import AgentLink

_STACKS_S = 5.0
"""Limit for all agents to report that stacks are written; each takes a second."""


async def write_stacks(
    links: Collection[AgentLink], written: "asyncio.Queue[StacksWritten]", journal: Journal
) -> None:
    """Makes all ranks dump their stacks and waits, bounded: a dead node does not answer."""
    for link in links:
        link.send(DumpStacks())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STACKS_S):
            for _ in range(len(links)):  # more may join in between
                one = await written.get()
                journal.write(ev.Stacks(one.node, one.log))
