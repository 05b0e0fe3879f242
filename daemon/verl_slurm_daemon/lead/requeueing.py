"""Asks for another attempt of the job until an answer counts, and makes it avoid bad nodes.

Nodes that are not fit are remembered for all runs of the user.
"""

import asyncio
import contextlib
import os
from datetime import UTC, datetime
from pathlib import Path

from verl_slurm.base.bounded import TooMuch
from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.checks.bad_nodes import Recalled, recall, remember
from verl_slurm.config.schema import RunConfig
from verl_slurm.containers.runtimes import inputs
from verl_slurm.journal import events as ev
from verl_slurm.journal.files import read_history
from verl_slurm.program.programs import Moves
from verl_slurm_daemon.allocation.contract import Avoided
from verl_slurm_daemon.decide import actions as act
from verl_slurm_daemon.decide.inputs import RequeueAnswered
from verl_slurm_daemon.lead.attempt import Attempt
from verl_slurm_daemon.lead.attempt_start import answered


def places_seen(config: RunConfig, paths: RunPaths) -> tuple[str, ...]:
    """Returns what the ranks need and this node has. What no node has is no fault of one, and is told elsewhere."""
    # An agent that finds its lead has RUN; the nodes' own disks are made ready by the ranks.
    binds = config.slurm.container.binds if config.slurm.container is not None else ()
    # The ranks run the submitted copy of the program: where it lay need not be on a node.
    moved = Moves.of(paths).config(config)
    wanted = sorted({place for place in (*inputs(moved), *binds) if place.startswith("/")})
    return tuple(place for place in wanted if Path(place).exists())


async def write_down(attempt: Attempt, node: str, evidence: str, *, passing: bool = False) -> None:
    """Remembers a node that failed a check, unless that may pass by itself, and says so in the journal."""
    hours = attempt.config.health.exclude_h
    kept = f"this run avoids it for {attempt.config.daemon.avoid_node_s:g} s (daemon.avoid_node_s)"
    if hours and not passing:
        kept = f"runs of yours avoid it for {hours:g} h"
        try:
            cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
            await asyncio.to_thread(remember, cluster, node, evidence, attempt.paths.root, hours)
        # The requeue does not depend on it: this run avoids the node by its own journal.
        except (OSError, ValueError, VerlSlurmError) as error:
            kept = f"other runs of yours are not told: {error}"
    attempt.journal.write(ev.Warned("health", f"{node}: {evidence}; {kept}"))


async def _recalled(config: RunConfig) -> Recalled:
    """Returns the user's bad nodes of this cluster, unless the configuration keeps none."""
    cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
    return await asyncio.to_thread(recall, cluster) if config.health.exclude_h else Recalled()


_ASK_AGAIN_S = 1.0
_AVOID_S = 3.0


async def requeue(attempt: Attempt, wanted: act.AskRequeue) -> RequeueAnswered:
    """Returns Slurm's final answer to the request. Asks until there is one."""
    # The job stays while Slurm is away or gives no answer that counts: leaving ends the run's job, staying costs at
    # most the rest of the grace time. Slurm's KILL ends the loop.
    allocation, journal = attempt.allocation, attempt.journal
    while isinstance(answer := await allocation.requeue(wanted.delay_s, hold=wanted.hold), str):
        journal.write(ev.Requeue(False, answer))
        await asyncio.sleep(_ASK_AGAIN_S)
    accepted = answer.exit_code is ExitCode.REQUEUED
    journal.write(ev.Requeue(accepted, answer.detail))
    # After the yes: the exclusion is not worth the requeue, and Slurm takes ExcNodeList of a job that is COMPLETING
    # (22.05.8).
    if accepted:
        with contextlib.suppress(OSError, TooMuch):  # the journal cannot be read, so no node is avoided
            await _avoid(attempt, wanted.avoid)
    return answer


async def _avoid(attempt: Attempt, new: tuple[str, ...]) -> None:
    """Tells Slurm which nodes failed this run or another one of the user lately, and when none does any more."""
    config, allocation, journal = attempt.config, attempt.allocation, attempt.journal
    history, bad = await answered(lambda: read_history(attempt.paths)), await _recalled(config)
    for problem in bad.problems:
        journal.write(ev.Notice("health", f"passed over: {problem}"))
    # An earlier exclusion has to be taken back once its time is over: Slurm keeps it for good.
    if not new and not bad.nodes and not history.avoided:
        return
    own = history.avoided_nodes(new, datetime.now(UTC), config.daemon.avoid_node_s)
    # First those that failed a check: where too few nodes are left, the last ones may be used again.
    nodes = tuple(dict.fromkeys((*bad.names, *own)))
    told = [event.told for event in history.avoided if event.job_id == allocation.job_id]
    before = told[-1] if told else []
    avoided = Avoided(f"nothing is avoided: no answer in {_AVOID_S:.0f} s", tuple(before))
    with contextlib.suppress(TimeoutError):
        # Bounded: the requeue is accepted and its delay runs, so the exit is all that waits for this.
        async with asyncio.timeout(_AVOID_S):
            avoided = await allocation.avoid(nodes, before)
    if avoided.said:
        journal.write(ev.Avoid(list(new), avoided.said, list(avoided.told)))
