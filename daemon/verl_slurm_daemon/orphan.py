"""What an agent does for a job whose lead has died: ask Slurm to run it again.

The lead is the batch process. When somebody kills it, Slurm ends the job as FAILED and never requeues it; the agents
of the other nodes have KillWait seconds, time enough for one request. The first agent asks first; a later one finds
the job requeued and leaves. A job that its user cancelled is left alone.
"""

import asyncio
import os
import sys

from verl_slurm.config.schema import RunConfig
from verl_slurm.paths import RunPaths
from verl_slurm.slurm.environment import SlurmJob
from verl_slurm_daemon.allocation import SlurmAllocation
from verl_slurm_daemon.journal import Journal

__all__ = ["requeue_as_orphan"]

_TURN_S = 1.5
"""Between the agents' turns: longer than one request to an idle slurmctld (20 to 60 ms)."""


async def requeue_as_orphan(paths: RunPaths, config: RunConfig, epoch: int, node_id: int) -> None:
    """Ask once, in this agent's turn; does nothing outside Slurm. Called by: `agent`."""
    job = SlurmJob.from_environ(dict(os.environ))
    if job is None:
        return
    await asyncio.sleep(_TURN_S * node_id)  # a turn in a row, not a wait for something
    answer = await SlurmAllocation(job, config, paths).requeue()
    journal = Journal(paths, epoch=epoch, job_id=str(job.job_id))
    journal.event("orphaned", node_id=node_id, accepted=answer.accepted, detail=answer.detail)
    sys.stdout.flush()
