"""The modes that a process does once: memory, keep, load, commit."""

import json
import time
from pathlib import Path

import torch.distributed as dist

from benchmarks.save.machine import drop_caches, fsync_tree
from benchmarks.save.peers.base import Peer
from benchmarks.save.ranks import attempt, fresh, quiet, slowest, timed
from benchmarks.save.reading import files_of, read_share
from benchmarks.save.records import Job, Sample
from benchmarks.save.registry import load_class
from benchmarks.save.run_directory import contents, make_saver
from benchmarks.save.workload import Workload
from verl_slurm.save.ranks.collective import Collective

_BASELINE_S = 0.6
"""How long the launcher may look at ranks that have not saved yet."""


def memory(job: Job, ranks: Collective, work: Workload, marks: dict[str, float]) -> list[Sample]:
    """Two saves, while the launcher watches the process tree; `marks` tell it when what began."""
    name = job.peers[0]
    peer = _peer(job, name, work)
    dist.barrier()
    marks["baseline"] = time.monotonic()
    time.sleep(_BASELINE_S)
    marks["saving"] = time.monotonic()

    def saves() -> None:
        for turn in range(2):
            directories = fresh(ranks, job, name, media=1)
            if not turn:
                peer.open(directories)
            peer.save(directories)
            peer.fence()
            work.update()
            peer.wait()

    error = attempt(ranks, f"{name}, memory", saves)
    marks["end"] = time.monotonic()
    attempt(ranks, f"closing {name}", peer.close)
    return [Sample(peer=name, mode="memory", group=job.group, rep=1, error=error)]


def keep(job: Job, ranks: Collective, work: Workload) -> list[Sample]:
    """One finished save a peer, left where `load` looks for it, with the digests of what is in it."""
    samples = []
    (Path(job.directories[0]) / f"expected_{ranks.rank}.json").write_text(json.dumps(work.digests()))
    for name in job.peers:
        peer = _peer(job, name, work)
        directories = fresh(ranks, job, f"kept_{name}", media=1)

        def save(peer: Peer = peer, directories: tuple[Path, ...] = directories) -> None:
            peer.open(directories)
            peer.save(directories)
            peer.fence()
            peer.wait()

        error = attempt(ranks, f"{name}, a save to load", save)
        attempt(ranks, f"closing {name}", peer.close)
        samples.append(Sample(peer=name, mode="keep", group=job.group, rep=0, error=error))
    if ranks.rank == 0:
        fsync_tree(Path(job.directories[0]))
    dist.barrier()
    return samples


def load(job: Job, ranks: Collective) -> list[Sample]:
    """In this fresh process, with a cold page cache: load; then, cold again, a plain read of the same files."""
    name = job.peers[0]
    root = Path(job.directories[0])
    work = Workload(job.gib, ranks, filled=False)
    peer = _peer(job, name, work)
    values: dict[str, float] = {}

    def cold() -> float:
        if ranks.rank == 0:
            drop_caches()
        return quiet(ranks, job)

    idle = cold()
    error = attempt(
        ranks,
        f"{name}, load",
        lambda: values.update(load=timed(lambda: peer.load(root / f"kept_{name}"))),
    )
    values = slowest(ranks, **values) if not error else {}
    expected = json.loads((root / f"expected_{ranks.rank}.json").read_text())
    exact = not error and ranks.max([int(work.digests() != expected)])[0] == 0
    files = files_of(root / f"kept_{name}")
    cold()
    values |= slowest(ranks, plain_read=timed(lambda: read_share(files, ranks.rank, ranks.world_size)))
    return [
        Sample(
            peer=name,
            mode="load",
            group=job.group,
            rep=job.rep,
            values=values,
            bit_exact=exact,
            error=error,
            idle=round(idle, 3),
        )
    ]


def commit(job: Job, ranks: Collective, work: Workload) -> list[Sample]:
    """One whole committed checkpoint under `committed/`, for the launcher to verify."""
    saver = make_saver(Path(job.directories[0]) / "committed", work)
    error = attempt(ranks, "commit", lambda: saver.begin(contents(work)).result())
    saver.close()
    return [Sample(peer="ours", mode="commit", group=job.group, rep=0, error=error)]


def _peer(job: Job, name: str, work: Workload) -> Peer:
    return load_class(name, job.plugins)(work)
