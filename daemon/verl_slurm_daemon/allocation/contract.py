"""What a lead runs in: a Slurm job, or (without Slurm) this machine. One contract, two kinds: `slurm_allocation`,
`local_allocation`.

Obligations of an `Allocation`: every method is bounded in time and never raises for a scheduler that does not
answer: it says so in its result, because a lead must go on saving while slurmctld is away.
"""

import asyncio
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from verl_slurm.base.fence import Epoch
from verl_slurm_daemon.decide.inputs import CauseKnown, RequeueAnswered

__all__ = ["Allocation", "Outlook"]


class Outlook(msgspec.Struct, frozen=True):
    """What the scheduler says of the allocation's future."""

    answered: bool
    seconds_left: float | None = None
    """Until the allocation's end; None: no limit."""
    preempted: bool = False
    """A preemption has begun; its warning may have come before anybody listened."""


class Allocation(Protocol):
    """See the module."""

    cluster: Literal["slurm", "local"]
    job_id: str
    restart: int

    async def address(self) -> str:
        """Where the agents reach this process."""

    async def cause(self, trigger: str) -> CauseKnown:
        """Why `trigger` happened."""

    async def outlook(self) -> Outlook:
        """How long the allocation lasts, as the scheduler has it now."""

    async def requeue(self, delay_s: int | None = None) -> RequeueAnswered | str:
        """Ask for another attempt of this run. A text: no answer that counts; ask again while there is time.

        Args:
            delay_s: seconds until it may start; None: as the user configured it.
        """

    async def hasten(self, clean: bool) -> None:
        """The last act of an attempt that is to come back: have the next one start no later than was asked for.

        Args:
            clean: no process of ours is left on any node, as far as the lead knows.
        """

    async def withdraw(self) -> str:
        """This run is over: see to it that the scheduler does not start, or hold, it again. What came of that; empty:
        there was nothing to do."""

    async def cancelled_before(self) -> str:
        """Why this job must not go on with the run: its user has ended the one it follows. Empty: it may."""

    async def avoid(self, nodes: Sequence[str]) -> str:
        """Keep the next attempt of this run away from these nodes, and from no others of ours; what came of it."""

    async def still_alive(self, owner: Epoch) -> str:
        """Why `owner`, another attempt, may still be at work; empty: it is not."""

    async def start_step(self, argv: list[str]) -> list[asyncio.subprocess.Process]:
        """Start `argv` on every node; the step is over when all these processes are."""

    def keep_step(self, step: list[asyncio.subprocess.Process]) -> None:
        """The step has started: see to it that its agents outlive this node's processes, however those die."""
