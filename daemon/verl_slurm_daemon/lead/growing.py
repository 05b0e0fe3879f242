"""Looks for idle nodes while a run that may have more of them (`distributed.min_nodes`) trains on fewer."""

import asyncio
import time
from collections.abc import Callable

from verl_slurm.base.paths import RunPaths
from verl_slurm.config.elastic import allowed_nodes
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.files import read_history
from verl_slurm.journal.history import History
from verl_slurm.journal.status import read_status
from verl_slurm_daemon.allocation.contract import Allocation
from verl_slurm_daemon.decide import inputs
from verl_slurm_daemon.lead.agents_step import Step

_LOOK_S = 120.0
_LEAST_S = 1800.0
"""A run grows at most so often; twice as seldom for each time in a row that brought no node, because others were faster
or what was idle was not for this job."""
_COST_S = 120.0
"""Of a requeue, where this run has measured none yet."""
_TIMES_WORTH = 2.0
"""The gain has to be so many times the cost: neither is known well."""


def worth(nodes: int, more: int, left_s: float, cost_s: float) -> bool:
    """Returns whether a run gains by a requeue onto more nodes.

    Args:
        nodes, more: that it has, and that it would have.
        left_s: seconds that it still needs on those it has.
        cost_s: seconds without training that a requeue costs.
    """
    return more > nodes and left_s * (1 - nodes / more) > _TIMES_WORTH * cost_s


async def watch_growth(
    paths: RunPaths,
    config: RunConfig,
    allocation: Allocation,
    step: Step,
    post: Callable[[inputs.Input], None],
    clock: Callable[[], float] = time.time,
) -> None:
    """Asks for a save and a requeue once enough nodes are idle, at most once in a restart.

    Args:
        step: of the ranks that train.
        clock: seconds since 1970.
    """
    allowed = allowed_nodes(config)
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
        idle = await allocation.idle_nodes()
        more = next((number for number in allowed if number <= nodes + idle), nodes)
        left_s = (clock() - began) / (done - first) * (config.train.steps - done)
        history = await asyncio.to_thread(read_history, paths)
        if _may_again(history, clock()) and worth(nodes, more, left_s, _usual_cost(history)):
            said = f"{idle} more nodes are idle: from {nodes} to {more}, with {left_s:.0f} s to go on {nodes}"
            post(inputs.CauseKnown("growth", said, None))
            return


def _may_again(history: History, now: float) -> bool:
    return history.grew_at is None or now - history.grew_at > _LEAST_S * 2**history.fruitless_growths


def _usual_cost(history: History) -> float:
    known = [each.seconds for each in history.outages if each.seconds is not None and each.queue_s]
    return max(known[-3:], default=_COST_S)
