"""What all modes of a rank share: the clock over all ranks, fresh directories, the marks of an orderly end."""

import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from benchmarks.save.machine import wait_until_idle
from benchmarks.save.records import Job
from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.save.ranks.collective import Collective


def slowest(ranks: Collective, **seconds: float) -> dict[str, float]:
    """Of each figure the greatest over all ranks: the step goes on when the last one may."""
    greatest = ranks.max([int(value * 1e9) for value in seconds.values()])
    return {name: value / 1e9 for name, value in zip(seconds, greatest, strict=True)}


def timed(work: Callable[[], object]) -> float:
    """Seconds it took on this rank."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def fresh(ranks: Collective, job: Job, name: str, *, media: int) -> tuple[Path, ...]:
    """Empty directories of that name, one on each of the first `media` media."""
    paths = tuple(Path(root) / name for root in job.directories[:media])
    if ranks.rank == 0:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(mode=0o700)
        os.sync()
    dist.barrier()
    return paths


def quiet(ranks: Collective, job: Job) -> float:
    """Wait for a quiet machine; returns the idle share on rank 0, and all ranks at the same moment."""
    idle = wait_until_idle(at_most_s=job.quiet_s) if ranks.rank == 0 else 1.0
    dist.barrier()
    return idle


def attempt(ranks: Collective, what: str, work: Callable[[], object]) -> str:
    """Do it on all ranks; what went wrong on any of them, in words, on all; empty if nothing did."""

    def loud() -> None:
        try:
            work()
        except Exception:
            traceback.print_exc()
            raise

    try:
        ranks.together(what, loud)
    except VerlSlurmError as error:
        return error.one_line()[:500]
    return ""


def leave() -> None:
    """End at once: peers leave threads behind, and torch 2.13 aborts when the interpreter destroys them."""
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
