"""A rank of two, for test_partition: `commit_worker RUN RANK`; saves when it is told to, and stops at a point in it.

A line on its input is `STEP POINT`; POINT is where somebody stops and waits for the word (any line) to go on:

    before   both ranks, before the save begins
    in       rank 1, when it should say that its files are durable: the commit waits for that
    after    rank 0, when it has committed and nobody else knows

What it says, a line of JSON each: where it stops, and at the end what the save came to and when (monotonic, ns).
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.hostile.netlab import ADDRESS
from tests.save.parts import Parts, contents, provenance, runtime
from verl_slurm.base.paths import RunPaths
from verl_slurm.save.ranks import saver as module
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.saver import CheckpointSaver, SaveContents

PORT = 29500


class Rank:
    """Its own two stops."""

    def __init__(self, rank: int) -> None:
        self._rank, self.point, self.committed_ns = rank, "", 0
        write_to_medium, commit = module.write_to_medium, module.door.commit

        def stopping_write(*given: Any, **named: Any) -> Any:
            if rank == 1:
                self.stop("in")
            return write_to_medium(*given, **named)

        def stopping_commit(*given: Any, **named: Any) -> Any:
            self.committed_ns = time.monotonic_ns()
            done = commit(*given, **named)
            self.stop("after")
            return done

        module.write_to_medium = stopping_write
        module.door.commit = stopping_commit

    def stop(self, point: str) -> None:
        if point == self.point:
            say(at=point)
            sys.stdin.readline()


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def main(root: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESS['a']}:{PORT}", rank=rank, world_size=2)
    mine = Rank(rank)
    saver = CheckpointSaver(
        RunPaths(root),
        Parts().tensors(),
        provenance(),
        Collective(dist.group.WORLD),
        attempt_check=lambda: None,
    )
    say(at="start")
    while words := sys.stdin.readline().split():
        step, mine.point = int(words[0]), words[1]
        mine.stop("before")
        whole = contents(step, runtime(step, rank=rank, world_size=2))
        brings = SaveContents(runtime=whole.runtime, texts=whole.texts if rank == 0 else {})
        try:
            name = saver.begin(brings).result().name
        except Exception as error:  # noqa: BLE001 - for the test to see
            say(failed=f"{type(error).__name__}: {error}")
            continue
        say(name=name, done_ns=time.monotonic_ns(), committed_ns=mine.committed_ns)
    saver.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
