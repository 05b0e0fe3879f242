"""Asks for another attempt of the job until an answer counts, and makes it avoid bad nodes."""

import asyncio
import contextlib
from datetime import UTC, datetime

from verl_slurm.base.bounded import TooMuch
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal import events as ev
from verl_slurm.journal.files import read_history
from verl_slurm_daemon.allocation.contract import Allocation, Avoided
from verl_slurm_daemon.decide import actions as act
from verl_slurm_daemon.decide.inputs import RequeueAnswered
from verl_slurm_daemon.journal import Journal
from verl_slurm_daemon.lead.attempt_start import answered
from verl_slurm_daemon.lead.left_nodes import recalled

_ASK_AGAIN_S = 1.0
_AVOID_S = 3.0


async def requeue(
    allocation: Allocation,
    config: RunConfig,
    paths: RunPaths,
    journal: Journal,
    wanted: act.AskRequeue,
) -> RequeueAnswered:
    """Returns Slurm's final answer to the request. Asks until there is one."""
    # The job stays while Slurm is away or gives no answer that counts: leaving ends the run's job, staying costs at
    # most the rest of the grace time. Slurm's KILL ends the loop.
    while isinstance(answer := await allocation.requeue(wanted.delay_s, hold=wanted.hold), str):
        journal.write(ev.Requeue(False, answer))
        await asyncio.sleep(_ASK_AGAIN_S)
    accepted = answer.exit_code is ExitCode.REQUEUED
    journal.write(ev.Requeue(accepted, answer.detail))
    # After the yes: the exclusion is not worth the requeue, and Slurm takes ExcNodeList of a job that is COMPLETING
    # (22.05.8).
    if accepted:
        with contextlib.suppress(OSError, TooMuch):  # the journal cannot be read, so no node is avoided
            await _avoid(allocation, config, paths, journal, wanted.avoid)
    return answer


async def _avoid(
    allocation: Allocation, config: RunConfig, paths: RunPaths, journal: Journal, new: tuple[str, ...]
) -> None:
    """Tells Slurm which nodes failed this run or another one of the user lately. If there were some earlier and none
    now, tells it that as well."""
    history, bad = await answered(lambda: read_history(paths)), await recalled(config)
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
