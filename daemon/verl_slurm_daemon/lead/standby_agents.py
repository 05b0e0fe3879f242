"""Prepares for the next restart while the ranks of this one train.

`Standby` keeps a step with agents for it. `watch_growth` looks for idle nodes while a run that may have more of them
(`distributed.min_nodes`) trains on fewer.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Collection

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.config.elastic import allowed_nodes
from verl_slurm.journal import events as ev
from verl_slurm.journal.files import read_history
from verl_slurm.journal.history import History
from verl_slurm.journal.status import read_status
from verl_slurm.program.code_record import read_record
from verl_slurm_daemon.allocation.contract import TooFewNodes
from verl_slurm_daemon.allocation.launcher import daemon_argv, may_stand_by
from verl_slurm_daemon.decide import inputs
from verl_slurm_daemon.lead.agents_step import Step
from verl_slurm_daemon.lead.attempt import Attempt

AGENTS_READY_S = 60.0
"""From srun to the last agent's first message: 0.3 s on an idle cluster; a node with a slow disk may need longer."""


class Standby:
    """The step that stands by, if there is one. `clean`: every one that was ended has ended by itself."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt, self._config, self._allocation = attempt, attempt.config, attempt.allocation
        self._step: Step | None = None
        self.clean = True

    @property
    def stands(self) -> bool:
        """Returns whether agents have been started for the next restart."""
        return self._step is not None and self._step.stands

    def is_of(self, step: Step) -> bool:
        """Returns whether this is the step that stands by."""
        return step is self._step

    def joined_by(self, restart: int) -> Step:
        """Returns the step of an agent that stands by for a restart."""
        if self._step is not None and self._step.restart == restart:
            return self._step
        # A step that was dropped is being ended, and so is its agent.
        former = Step(restart, self._config.distributed.nodes)
        former.leaving.set()
        return former

    async def start_after(self, training: Step, avoid: Collection[str] = ()) -> None:
        """Starts agents for the restart after this one, once its ranks have trained for a while."""
        after_s = self._config.daemon.standby_after_s
        if after_s is None or not (self._allocation.starts_all_agents and may_stand_by(self._config)):
            return
        await training.training.wait()
        await asyncio.sleep(after_s)  # the due time itself
        if not training.stands:
            return
        number, nodes = training.restart + 1, allowed_nodes(self._config)[-1]
        try:
            step = Step(number, nodes, await self._allocation.places(avoid, with_spares=True))
            step.settings = await asyncio.to_thread(self._settings)
            self._step = step
            given = self._attempt.paths, self._attempt.number, "--stand-by", str(step.restart)
            argv = daemon_argv(sys.executable, "agent", *given)
            step.processes = await self._allocation.start_step(argv, names=step.places.chosen)
            async with asyncio.timeout(AGENTS_READY_S):
                await step.all_ready.wait()
            self._allocation.keep_step(step.processes)
        # Whatever keeps it from standing by is nothing to those that train.
        except (OSError, TimeoutError, TooFewNodes, VerlSlurmError) as error:
            why = str(error) or f"not within {AGENTS_READY_S:.0f} s"
            await self.drop(f"the agents for the next restart do not come: {why}")

    async def take(self, restart: int, nodes: int, avoid: Collection[str] = ()) -> Step | None:
        """Returns the step that stands by for this restart, which is the caller's then. Any other is ended."""
        if self._step is None:
            return None
        # They have read it when they were started.
        settings = await asyncio.to_thread(self._settings)
        step = self._step
        if step is not None and step.stands and step.restart == restart:
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
            self._attempt.journal.write(ev.Notice("standby", f"{why}; those of the other nodes stand by"))
        else:
            await self.drop(why)

    async def drop(self, why: str = "") -> None:
        """Ends the step that stands by, if there is one."""
        step, self._step = self._step, None
        if step is None:
            return
        if why:
            self._attempt.journal.write(ev.Notice("standby", why))
        self.clean = await step.end() and self.clean
        await step.last_words()

    def _settings(self) -> tuple[bytes, object]:
        """Returns what agents are started with: the configuration, and which copies of the user's code are in use."""
        return self._attempt.paths.run_yaml.read_bytes(), read_record(self._attempt.paths)


_LOOK_S = 120.0
_LEAST_S = 1800.0
"""A run grows at most so often; twice as seldom for each time in a row that brought no node, because others were faster
or what was idle was not for this job."""
_COST_S = 120.0
"""Of a requeue, where this run has measured none yet."""
# The gain has to be so many times the cost: neither is known well.
_TIMES_WORTH = 2.0


def worth(nodes: int, more: int, left_s: float, cost_s: float) -> bool:
    """Returns whether `more` nodes are worth a requeue that costs `cost_s`, with `left_s` to go on `nodes`."""
    return more > nodes and left_s * (1 - nodes / more) > _TIMES_WORTH * cost_s


async def watch_growth(attempt: Attempt, step: Step, clock: Callable[[], float] = time.time) -> None:
    """Asks for a save and a requeue once enough nodes are idle, at most once in a restart (`step`)."""
    paths, config, allowed = attempt.paths, attempt.config, allowed_nodes(attempt.config)
    if len(allowed) == 1 or not step.places.chosen:
        return
    await step.training.wait()
    nodes = len(step.links)
    if nodes >= allowed[0]:
        return
    first, began = read_status(paths).get("step", 0), clock()
    while True:
        await asyncio.sleep(_LOOK_S)  # Slurm has no event for a node that becomes idle
        if not step.stands:
            return
        done = read_status(paths).get("step", 0)
        if done <= first:
            continue
        idle = await attempt.allocation.idle_nodes()
        more = next((number for number in allowed if number <= nodes + idle), nodes)
        left_s = (clock() - began) / (done - first) * (config.train.steps - done)
        history = await asyncio.to_thread(read_history, paths)
        if _may_again(history, clock()) and worth(nodes, more, left_s, _usual_cost(history)):
            said = f"{idle} more nodes are idle: from {nodes} to {more}, with {left_s:.0f} s to go on {nodes}"
            attempt.post(inputs.CauseKnown("growth", said, None))
            return


def _may_again(history: History, now: float) -> bool:
    return history.grew_at is None or now - history.grew_at > _LEAST_S * 2**history.fruitless_growths


def _usual_cost(history: History) -> float:
    known = [each.seconds for each in history.outages if each.seconds is not None and each.queue_s]
    return max(known[-3:], default=_COST_S)
