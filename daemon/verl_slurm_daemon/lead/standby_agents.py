"""Keeps a step with agents for the next restart: started ahead, while the ranks of this one train."""

import asyncio
import sys
from collections.abc import Collection

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.elastic import allowed_nodes
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal import events as ev
from verl_slurm.program.code_record import read_record
from verl_slurm_daemon.allocation.contract import Allocation, TooFewNodes
from verl_slurm_daemon.allocation.launcher import agent_argv, may_stand_by
from verl_slurm_daemon.journal import Journal
from verl_slurm_daemon.lead.agents_step import Step

AGENTS_READY_S = 60.0
"""From srun to the last agent's first message: 0.3 s on an idle cluster; a node with a slow disk may need longer."""


class Standby:
    """The step that stands by, if there is one.

    Attributes:
        clean: every one that was ended has ended by itself.
    """

    def __init__(
        self, paths: RunPaths, config: RunConfig, allocation: Allocation, journal: Journal, epoch: int
    ) -> None:
        self._paths, self._config, self._allocation = paths, config, allocation
        self._journal, self._epoch = journal, epoch
        self._step: Step | None = None
        self.clean = True

    @property
    def stands(self) -> bool:
        """Returns whether agents have been started for the next restart."""
        return self._step is not None and self._step.stands

    def is_of(self, step: Step) -> bool:
        """Returns whether this is the step that stands by."""
        return step is self._step

    def joined_by(self, generation: int) -> Step:
        """Returns the step of an agent that stands by for a restart. A step that was dropped is being ended, and so is
        its agent.
        """
        if self._step is not None and self._step.generation == generation:
            return self._step
        former = Step(generation, self._config.distributed.nodes)
        former.leaving.set()
        return former

    async def start_after(self, training: Step, avoid: Collection[str] = ()) -> None:
        """Starts agents for the restart after this one, once its ranks have trained for a while.

        Args:
            avoid: nodes of the job that are lost or bad.
        """
        after_s = self._config.daemon.standby_after_s
        if after_s is None or not (self._allocation.starts_all_agents and may_stand_by(self._config)):
            return
        await training.training.wait()
        await asyncio.sleep(after_s)  # the due time itself
        if not training.stands:
            return
        number, nodes = training.generation + 1, allowed_nodes(self._config)[-1]
        try:
            step = Step(number, nodes, await self._allocation.places(avoid, with_spares=True))
            step.settings = await asyncio.to_thread(self._settings)
            self._step = step
            argv = agent_argv(sys.executable, self._paths, self._epoch, step.generation)
            step.processes = await self._allocation.start_step(argv, names=step.places.chosen)
            async with asyncio.timeout(AGENTS_READY_S):
                await step.all_ready.wait()
            self._allocation.keep_step(step.processes)
        # Whatever keeps it from standing by is nothing to those that train.
        except (OSError, TimeoutError, TooFewNodes, VerlSlurmError) as error:
            await self.drop(f"the agents for the next restart do not come: {error}")

    async def take(self, generation: int, nodes: int, avoid: Collection[str] = ()) -> Step | None:
        """Returns the step that stands by for this restart, which is the caller's then. Any other is ended.

        Args:
            nodes: of the ranks.
            avoid: nodes of the job that are lost or bad.
        """
        if self._step is None:
            return None
        # They have read it when they were started.
        settings = await asyncio.to_thread(self._settings)
        step = self._step
        if step is not None and step.stands and step.generation == generation:
            if step.settings == settings:
                if step.take_up(avoid, nodes):
                    self._step = None
                    return step
            else:
                await self.drop("the run's configuration or code was changed")
        await self.drop()
        return None

    async def lose(self, node: str, why: str) -> None:
        """Goes on without a node whose agent is gone, if the others are enough."""
        if self._step is not None and self._step.does_without([node]):
            self._journal.write(ev.Notice("standby", f"{why}; those of the other nodes stand by"))
        else:
            await self.drop(why)

    async def drop(self, why: str = "") -> None:
        """Ends the step that stands by, if there is one."""
        step, self._step = self._step, None
        if step is None:
            return
        if why:
            self._journal.write(ev.Notice("standby", why))
        self.clean = await step.end() and self.clean
        await step.last_words()

    def _settings(self) -> tuple[bytes, object]:
        """Returns what agents are started with: the configuration, and which copies of the user's code are in use."""
        return self._paths.run_yaml.read_bytes(), read_record(self._paths)
