"""Where Slurm may not requeue this job: another one that follows it (`--dependency=afterany`).

The new job runs the same lead on the same run, asked for with the options of the run's configuration. It is queued
once for each job (the journal remembers), not for a task of an array, which has its next task, and not for a
heterogeneous job, whose components the configuration does not know. A cancel stays final: a successor whose
predecessor was cancelled in its last seconds says so and ends.

The agents of a dead lead may all come to ask for it, so whoever does claims it first (`control/successor_of_37.0`); the
others wait for what the journal then says. A claimant that says nothing for a while has died, and the next claim
(`.1`) is fought for. One that only slept meanwhile makes a second job, which the epoch keeps from the run.
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
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.processes import birth_of
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.events import Successor
from verl_slurm.journal.files import append_event, read_events
from verl_slurm.journal.folds.jobs import successor_of
from verl_slurm.slurm.batch import sbatch_options, submission_environment
from verl_slurm.slurm.client import SlurmClient

__all__ = ["queue_successor", "successor_script"]

_LOOK_S, _LOOKS = 0.25, 36
"""For a claimant to say what came of it. sbatch takes 20 to 60 ms of an idle slurmctld, and is ended after 8 s; all of
this happens within KillWait, 30 s by default."""


def successor_script(python: str, paths: RunPaths) -> str:
    """The batch script. Every word of ours that a shell reads is quoted. Pure."""
    lead = shlex.join([python, "-P", "-m", "verl_slurm_daemon", "lead", "--run", str(paths.root)])
    return f"#!/bin/bash\numask 077\ntrap '' USR1 USR2 TERM CONT\nexec {lead}\n"


async def queue_successor(
    paths: RunPaths,
    config: RunConfig,
    job_id: str,
    *,
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
) -> str:
    """Queue it, or name the one that is queued already; its job id.

    Args:
        sleep: for tests.

    Raises:
        SlurmRefused: sbatch said no.
        SlurmMissing: no answer; it may have been queued all the same: asked again, it is found by its script.
        OSError: the claim or the script cannot be written.
    """
    there = successor_of(read_events(paths), job_id)
    if there:
        return there
    if there := await _wait_for_a_claim(paths, job_id, sleep):
        return there
    script = paths.logs / f"successor_of_{job_id}.sh"
    write_file(script, successor_script(sys.executable, paths).encode())
    client = SlurmClient(submission_environment(os.environ, config))
    # One whose answer was late, or whose sender died before it wrote it down, is in no journal: nobody would cancel it.
    if there := await client.own_job_with(str(script)):
        append_event(paths, Successor(job_id, job_id=there))
        return there
    logs = str(paths.logs).replace("%", "%%")  # sbatch puts words of its own in place of %x
    mine = [f"--dependency=afterany:{job_id}", "--open-mode=append", f"--output={logs}/%j_0_log.out"]
    words = [*sbatch_options(config), *mine, str(script)]
    remedy = f"verl-slurm submit {paths.root}"
    number = str(
        await client.submit(words, "the job that was to follow this one", where=job_id, remedy=remedy)
    )
    append_event(paths, Successor(job_id, job_id=number))
    return number


async def _wait_for_a_claim(paths: RunPaths, job_id: str, sleep: Callable[[float], Awaitable[Any]]) -> str:
    """Until it is ours to queue the successor, or there is one: its job id."""
    me = f"{socket.gethostname()} {os.getpid()} {birth_of(os.getpid())}".encode()
    private_dir(paths.control)
    for number in itertools.count():
        claim, next_claim = (paths.control / f"successor_of_{job_id}.{n}" for n in (number, number + 1))
        # Ours from before: sbatch had no answer for us, and nobody has lost patience yet.
        if create_file(claim, me) or (claim.read_bytes() == me and not next_claim.exists()):
            return ""
        for _ in range(_LOOKS):
            await sleep(
                _LOOK_S
            )  # the journal may be on a network file system, which tells nobody of a change
            if there := successor_of(read_events(paths), job_id):
                return there
    raise AssertionError("unreachable")
