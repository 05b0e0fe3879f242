"""Run by test_grpo under torchrun: `lives_worker.py PLAN`: many lives of many runs in one start of the ranks.

PLAN is a JSON list of [run directory, [[safe point, how], ...]]. Each pair is a life that ends at that safe point of
its own: `stop` saves and leaves as a daemon would have it; `die` raises on every rank, so that nothing is saved and
the next life has the ledger alone; null goes on to the end.
"""

import json
import os
import sys
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from tests.fakes.daemon import AtSafePoint
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.recover import choose_resume
from verl_slurm.config.load import load_resolved
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer.place import Place, process_group
from verl_slurm.trainer.setup import build_loop


class Died(Exception):
    """What a life ends with that had no time."""


def _die() -> NoReturn:
    raise Died


Lives = list[tuple[int | None, str]]


def live_through(root: str, lives: Lives, place: Place, device: torch.device, ranks: Collective) -> None:
    """Every life of one run. Collective."""
    paths = RunPaths(Path(root))
    config = load_resolved(paths.run_yaml)
    for at, how in lives:
        words: list[object] = [None, None]
        if place.rank == 0:
            attempt = take_attempt(paths, job_id="test", restart=0).attempt
            words = [attempt, choose_resume(paths, "auto").name or ""]
        dist.broadcast_object_list(words)
        loop = build_loop(
            config,
            paths,
            attempt=int(str(words[0])),
            resume=str(words[1]),
            device=device,
            ranks=ranks,
            line=AtSafePoint(at, act=_die if how == "die" else lambda: None),
            local_rank=place.local_rank,
        )
        try:
            loop.run()
        except Died:
            loop._checkpointer.close()


def main(plan: list[tuple[str, Lives]]) -> None:
    place = Place.from_environ(os.environ)
    first = load_resolved(RunPaths(plan[0][0]).run_yaml)
    with process_group(first, place) as (device, ranks):
        for root, lives in plan:
            live_through(root, lives, place, device, ranks)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # torch 2.13 may abort at the interpreter's own end: wire.lifeline.run_and_leave
