"""An allocation as a lead meets one, in the test's own process.

It stands for Slurm: it is asked for an address, a cause and a requeue, and gives the answers of the test. A step is one
`sleep`, on this machine and without an agent. No cluster answers late or wrongly when a test wants it to.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence

from verl_slurm_daemon.allocation.contract import Allocation, Avoided, Outlook, StepPlacement
from verl_slurm_daemon.allocation.launcher import choose_places
from verl_slurm_daemon.decide import inputs
from verl_slurm_daemon.journal import Journal
from verl_slurm_daemon.lead.attempt import Attempt

from verl_slurm.base.fence import RunOwner
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.causes import CauseKind


def first_attempt(
    paths: RunPaths,
    config: RunConfig,
    allocation: "ScriptedAllocation | None" = None,
    post: Callable[[inputs.Input], None] = lambda _: None,
) -> Attempt:
    """The first attempt of a run, in the job of an allocation that says what it is told to."""
    journal = Journal(paths, attempt=1, job_id="7")
    return Attempt(config, allocation or ScriptedAllocation(), journal, post)


class ScriptedAllocation(Allocation):
    """An allocation that says what it is told to."""

    cluster = "slurm"
    starts_all_agents = True
    job_id = "7"
    restart = 0

    def __init__(self, *answers: inputs.RequeueAnswered | str) -> None:
        self.answers = list(answers)
        self.steps = 0
        self.causes: list[CauseKind] = []
        """Of the next signals, one after the other; then none."""
        self.nodes: tuple[str, ...] = ()
        """Of the job, if it has spare ones."""
        self.ranks_nodes, self.idle = 1, 0
        self.avoided: list[tuple[str, ...]] = []
        self.step_started = asyncio.Event()

    async def address(self) -> str:
        return "127.0.0.1"

    def now(self) -> float:
        return time.time()

    async def cause(self, trigger: str) -> inputs.CauseKnown:
        return inputs.CauseKnown(self.causes.pop(0) if self.causes else "none", trigger, None)

    async def outlook(self) -> Outlook:
        return Outlook(answered=True)

    async def requeue(
        self, delay_s: int | None = None, *, hold: bool = False
    ) -> inputs.RequeueAnswered | str:
        return self.answers.pop(0)

    async def still_alive(self, owner: RunOwner) -> str:
        return ""

    async def avoid(self, nodes: Sequence[str], before: Collection[str]) -> Avoided:
        self.avoided.append(tuple(nodes))
        return Avoided(f"avoids {len(nodes)}", tuple(nodes))

    async def places(self, avoid: Collection[str], *, with_spares: bool = False) -> StepPlacement:
        if not self.nodes:
            return StepPlacement()
        return choose_places(self.nodes, avoid, (self.ranks_nodes,), with_spares=with_spares)

    async def idle_nodes(self) -> int:
        return self.idle

    async def start_step(
        self, argv: list[str], service: str = "", names: Sequence[str] = ()
    ) -> list[asyncio.subprocess.Process]:
        self.steps += 1
        self.step_started.set()
        return [await asyncio.create_subprocess_exec("sleep", "600")]

    def keep_step(self, step: list[asyncio.subprocess.Process]) -> None:
        self.kept = step
