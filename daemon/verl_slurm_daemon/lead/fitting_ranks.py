"""Divides verl's checkpoint among the ranks that a start has, before they start (`verl.reshard.checkpoint`)."""

import asyncio
import time

from verl_slurm.config.schema import RunConfig
from verl_slurm.containers.runtimes import contained_argv
from verl_slurm.journal import events as ev
from verl_slurm.verl.reshard.checkpoint import prepare_start
from verl_slurm_daemon.journal import Journal
from verl_slurm_daemon.lead.resume import ResumePoint


class _Leaving(Exception):
    """Ends the work: the attempt is to end."""


async def fit_ranks(config: RunConfig, point: ResumePoint, leaving: asyncio.Event, journal: Journal) -> bool:
    """Prepares the checkpoint for as many ranks as the run has now; returns whether they may start.

    Args:
        leaving: set when the attempt is to end; then nothing is kept of the work.

    Raises:
        ConfigError: the checkpoint cannot be divided so, or not by the ranks' Python.
        VerlSlurmError, OSError: it was not divided; nothing is left of the attempt.
    """
    if config.trainer.backend != "verl":
        return True

    def stop_if_leaving(_: int) -> None:
        if leaving.is_set():
            raise _Leaving

    began = time.monotonic()
    run, ranks = (config, contained_argv, journal.paths, journal.epoch), config.distributed.world_size
    before = ranks if point.manifest is None else point.manifest.world_size
    if before != ranks:
        # Before it, too: with large models it takes minutes.
        journal.write(ev.Resume(f"{point.name} is of {before} ranks: divided among {ranks}"))
    try:
        # In a thread: it may take as long as a save and a verification, and the lead has to hear Slurm meanwhile.
        made = await asyncio.to_thread(prepare_start, *run, point.manifest, stop_if_leaving)
    except _Leaving:
        return False
    if made is not None:
        took_s = round(time.monotonic() - began, 3)
        journal.write(ev.Resharded(point.name, before, ranks, took_s, made.num_bytes))
    return True
