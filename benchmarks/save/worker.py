"""One rank of a process group: `python -m benchmarks.save.worker JOB.json STORE`, RANK and WORLD_SIZE set."""

import os
import sys
from pathlib import Path

import msgspec

from benchmarks.save import once
from benchmarks.save.ranks import leave
from benchmarks.save.records import Answer, Job
from benchmarks.save.turns import Turns
from benchmarks.save.workload import Workload, start_ranks


def main() -> None:
    """Do the job; rank 0 writes the answer. Never returns."""
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job)
    ranks = start_ranks(Path(sys.argv[2]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    marks: dict[str, float] = {}
    state_bytes = num_tensors = 0
    if job.modes == ("load",):
        samples = once.load(job, ranks)
    else:
        if set(job.modes) & {"memory", "keep", "commit"}:
            work = Workload(job.gib, ranks)
            if job.modes == ("memory",):
                samples = once.memory(job, ranks, work, marks)
            elif job.modes == ("keep",):
                samples = once.keep(job, ranks, work)
            else:
                samples = once.commit(job, ranks, work)
        else:
            turns = Turns(job, ranks)
            work, samples = turns.work, turns.run()
        state_bytes = int(ranks.sum([work.num_bytes])[0])
        num_tensors = len(work.tensors())
    if ranks.rank == 0:
        answer = Answer(state_bytes=state_bytes, num_tensors=num_tensors, samples=samples, marks=marks)
        Path(job.answer).write_bytes(msgspec.json.encode(answer))
    leave()


if __name__ == "__main__":
    main()
