"""The contract between a lead and its environment.

Obligations of an `Allocation`: every method is bounded in time. None that is called while ranks train raises
if the scheduler does not answer: the result says so instead, because a lead must go on saving while slurmctld
is away. Those that are called before a start raise SlurmMissing, and are called again
(`lead.attempt_start.patiently`).
"""

import asyncio
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Literal, NamedTuple, Protocol

import msgspec

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.fence import RunOwner
from verl_slurm.journal.events import StartOverruled
from verl_slurm.journal.history import History
from verl_slurm_daemon.decide.inputs import CauseKnown, RequeueAnswered


class TooFewNodes(Exception):
    """The job has lost so many nodes that its ranks have no place left."""


class StepPlacement(NamedTuple):
    """Which of the job's nodes a step gets, by name in Slurm's order."""

    chosen: tuple[str, ...] = ()
    """Empty: there is no choice, and the step gets the nodes that the configuration counts."""
    idle: tuple[str, ...] = ()
    """Spare nodes, fit as far as is known, that no rank needs."""


class Avoided(NamedTuple):
    """What came of asking for other nodes."""

    said: str
    """For people; empty: nothing has changed."""
    told: tuple[str, ...] = ()
    """All nodes that the job excludes by our word now."""


class Outlook(msgspec.Struct, frozen=True):
    """The scheduler's forecast for the allocation."""

    answered: bool
    seconds_left: float | None = None
    """Seconds until the allocation ends; None: no limit."""
    preempted: bool = False
    """A preemption has begun; its warning may have come before the lead listened."""
    limit_s: float | None = None
    """The allocation's whole time limit."""
    lead_s: float | None = None
    """How long before the end a save has to begin, where a short limit leaves less than is configured."""


class Allocation(Protocol):
    """An environment of a lead; see the module. What a method does by itself is for one without a scheduler."""

    cluster: Literal["slurm", "local"]
    job_id: str
    restart: int
    starts_all_agents: bool
    """`start_step` starts the agents of all nodes, and not of this one alone."""

    async def address(self) -> str:
        """Returns the address at which the agents reach this process. Raises SlurmMissing."""

    def now(self) -> float:
        """Returns the scheduler's clock, in seconds since 1970."""

    async def cause(self, trigger: str) -> CauseKnown:
        """Returns why `trigger` happened."""

    async def outlook(self) -> Outlook:
        """Asks the scheduler how long the allocation lasts."""

    async def requeue(self, delay_s: int | None = None, *, hold: bool = False) -> RequeueAnswered | str:
        """Asks for another attempt of this run. Returns a text if no answer counts; ask again while there is time.

        Args:
            delay_s: seconds until it may start; None: as the user configured it.
            hold: not before a person releases it. REQUEUE_FAILED where nothing can be held.
        """

    async def learn(self, history: History) -> StartOverruled | None:
        """Learns from the run's former requeues; returns what the last one came to, if not what was asked for."""
        return None

    async def hasten(self, clean: bool) -> datetime | None:
        """Last call before a requeued job ends: makes the next attempt start no later than asked for. Returns
        that time, or None.

        Args:
            clean: as far as the lead knows, none of our processes is left on any node.
        """
        return None

    async def exit_code(self, code: ExitCode) -> int:
        """Returns the code to leave with in the place of `code`, one that has the scheduler start nothing again."""
        return int(code)

    async def withdraw(self) -> str:
        """Has the scheduler neither start nor hold a finished run again. Returns what came of it, or nothing."""
        return ""

    async def cancelled_before(self) -> str:
        """Returns how the user ended the job that this one follows; empty: not so. Raises SlurmMissing."""
        return ""

    async def avoid(self, nodes: Sequence[str], before: Collection[str]) -> Avoided:
        """Keeps the next attempt of this run away from these nodes, the first ones first if others are few.

        Args:
            before: our earlier exclusions, which this replaces. What else the job excludes stays.
        """
        return Avoided("")

    def lacks(self) -> str:
        """Returns what a person has to add to this job before the run's ranks can start in it; empty: nothing."""
        return ""

    async def still_alive(self, owner: RunOwner) -> str:
        """Returns why `owner`, another attempt, may still work; empty: it does not. Raises SlurmMissing."""

    async def places(self, avoid: Collection[str], *, with_spares: bool = False) -> StepPlacement:
        """Returns which nodes the ranks get, if the job may lose some: as many as the configuration allows.

        Args:
            avoid: nodes that are lost or bad, which ranks get only where no others are left.
            with_spares: a step that stands by: it chooses the spare nodes as well.

        Raises TooFewNodes: the ranks have no place left. OSError: Slurm does not say which nodes the job has.
        """
        return StepPlacement()

    async def idle_nodes(self) -> int:
        """Returns how many more nodes like those of this job are idle; 0 also if the scheduler does not say."""
        return 0

    async def start_step(
        self, argv: list[str], service: str = "", names: Sequence[str] = ()
    ) -> list[asyncio.subprocess.Process]:
        """Starts `argv` on every node of the ranks, or of `service`; the step is over when all returned
        processes have ended.

        Args:
            names: of the nodes (`places`); empty: those that the configuration counts.

        Raises OSError: nothing was started.
        """

    def keep_step(self, step: list[asyncio.subprocess.Process]) -> None:
        """Called once the step has started: makes its agents outlive this node's processes, however those die."""
        del step  # without a scheduler there is no requeue to ask for
