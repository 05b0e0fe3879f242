"""What an agent does for a job whose lead has died: ask Slurm to run it again.

The lead is the batch process. When somebody kills it, Slurm ends the job as FAILED and never requeues it; the agents
of the other nodes have KillWait seconds, time enough for one request. The first agent asks first; a later one finds
the job requeued and leaves. A job that its user cancelled is left alone, and so is one that goes on running: then it
was only our link to the lead that broke, and the lead restarts the ranks in place.
"""

import asyncio
import os

from verl_slurm.config.schema import RunConfig
from verl_slurm.exit_codes import ExitCode
from verl_slurm.paths import RunPaths
from verl_slurm.slurm.environment import SlurmJob
from verl_slurm_daemon.allocation import SlurmAllocation
from verl_slurm_daemon.events import RequeueAnswered
from verl_slurm_daemon.journal import Journal

__all__ = ["ask_until_answered", "requeue_as_orphan"]

_TURN_S = 1.5
"""Between the agents' turns: longer than one request to an idle slurmctld (20 to 60 ms)."""
_LOOK_S = 0.5
_LOOKS = 20
"""Slurm knows of a batch process's death within a second (seen: 0.2 s); after ten it is not dead."""


async def requeue_as_orphan(paths: RunPaths, config: RunConfig, epoch: int, node_id: int) -> None:
    """Ask once, in this agent's turn; does nothing outside Slurm. Called by: `agent`."""
    job = SlurmJob.from_environ(dict(os.environ))
    if job is None:
        return
    allocation = SlurmAllocation(job, config, paths)
    await asyncio.sleep(_TURN_S * node_id)  # a turn in a row, not a wait for something
    for _ in range(_LOOKS):
        if await allocation.is_running() is False:
            break
        await asyncio.sleep(_LOOK_S)  # Slurm has no event to wait for
    else:
        return
    answer = await ask_until_answered(allocation)
    accepted = not isinstance(answer, str) and answer.exit_code is ExitCode.REQUEUED
    detail = answer if isinstance(answer, str) else answer.detail
    Journal(paths, epoch=epoch, job_id=str(job.job_id)).event(
        "orphaned", node_id=node_id, accepted=accepted, detail=detail
    )


async def ask_until_answered(
    allocation: SlurmAllocation, *, pause_s: float = _LOOK_S
) -> RequeueAnswered | str:
    """Ask for the requeue; again where there was no answer that counts, for nobody else is left to ask.

    Slurm has just sent TERM to all processes of the step, and a request that runs at that moment dies of it.
    """
    answer = await allocation.requeue()
    for _ in range(_LOOKS):
        if not isinstance(answer, str):
            break
        await asyncio.sleep(pause_s)
        answer = await allocation.requeue()
    return answer
