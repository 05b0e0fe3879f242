"""Queues a following job (`--dependency=afterany`) if Slurm may not requeue this one.

The new job runs the same lead on the same run, with the options of the run's configuration. It is queued once
for each job (the journal remembers). A task of an array, and a heterogeneous job, get none. A cancel stays
final: a successor whose predecessor was cancelled in its last seconds says so and ends.

All agents of a dead lead may ask for the successor. The first to claim it queues it
(`control/successor_of_37.0`); the others wait for the journal's answer. A claimant that says nothing for a
while has died, and the agents compete for the next claim (`.1`). If it was merely asleep, it makes a second
job, which the attempt keeps from the run.
"""

import asyncio
import itertools
import os
import shlex
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from verl_slurm.base.files import create_file, private_dir, write_file
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.processes import birth_of
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.events import Successor
from verl_slurm.journal.files import append_event, read_history
from verl_slurm.slurm.batch import awaiting, sbatch_options, submission_environment
from verl_slurm.slurm.slurm_client import SlurmClient

# How long to wait for the claimant's result. sbatch takes 20 to 60 ms of an idle slurmctld, and is ended
# after 8 s. All of this happens within KillWait, 30 s by default.
_LOOK_S, _LOOKS = 0.25, 36


def successor_script(python: str, paths: RunPaths) -> str:
    """Returns the batch script. Quotes each of our values that a shell reads. Pure."""
    lead = shlex.join([python, "-P", "-m", "verl_slurm_daemon", "lead", "--run", str(paths.root)])
    waits = "\n".join(awaiting(python, paths))
    return f"#!/bin/bash\numask 077\ntrap '' USR1 USR2 TERM CONT\n{waits}\nexec {lead}\n"


async def queue_successor(
    paths: RunPaths,
    config: RunConfig,
    job_id: str,
    *,
    hold: bool = False,
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
) -> str:
    """Queues the successor, on `hold` until a person releases it, or finds the one that is queued; returns
    its job id.

    Raises SlurmRefused: sbatch refused. SlurmMissing: no answer; the job may be queued all the same, and the
    next call finds it by its script. OSError: the claim or the script cannot be written.
    """
    there = read_history(paths).successor_of(job_id)
    if there:
        return there
    if there := await _wait_for_a_claim(paths, job_id, sleep):
        return there
    script = paths.logs / f"successor_of_{job_id}.sh"
    # Its path names the job that it follows: by it the new job is found where its number was lost.
    write_file(script, successor_script(sys.executable, paths).encode())
    cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
    client = SlurmClient(submission_environment(os.environ, config))
    # The journal lacks a job whose answer was late, or whose sender died before writing. A cancel would miss
    # it.
    if there := await client.own_job_with(str(script)):
        append_event(paths, Successor(job_id, job_id=there, slurm=cluster))
        return there
    # afterany: what Slurm calls this job's end does not tell whether the run is done. The script opens its log.
    mine = [f"--dependency=afterany:{job_id}", "--output=/dev/null"]
    words = [*sbatch_options(config), *mine, *(["--hold"] if hold else []), str(script)]
    remedy = f"verl-slurm submit {shell_word(paths.root)}"
    number = str(
        await client.submit(words, "the job that was to follow this one", where=job_id, remedy=remedy)
    )
    append_event(paths, Successor(job_id, job_id=number, slurm=cluster))
    return number


async def _wait_for_a_claim(paths: RunPaths, job_id: str, sleep: Callable[[float], Awaitable[Any]]) -> str:
    """Waits until this process may queue the successor (empty), or there is one: its job id."""
    me = f"{socket.gethostname()} {os.getpid()} {birth_of(os.getpid())}".encode()
    private_dir(paths.control, inside=paths.run)
    for number in itertools.count():
        claim, next_claim = (paths.control / f"successor_of_{job_id}.{n}" for n in (number, number + 1))
        # The claim is ours from before: sbatch had not answered, and no other process has made the next
        # claim.
        if create_file(claim, me) or (claim.read_bytes() == me and not next_claim.exists()):
            return ""
        for _ in range(_LOOKS):
            await sleep(_LOOK_S)  # the journal may be on a network file system, which reports no changes
            if there := read_history(paths).successor_of(job_id):
                return there
    raise AssertionError("unreachable")
