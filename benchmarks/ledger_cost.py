"""What the rollout ledger costs: seconds in `Ledger.append`, by the seconds of the steps it was called in.

    python benchmarks/ledger_cost.py [--steps 5] [--ranks 2] [--directory DIR ...] [--json] [KEY=VALUE ...]

The quick start trains for real, without a daemon, once for each DIR (memory and the disk of temporary files); its
ledger and all else that it writes is there. `Ledger.append` is wrapped in every rank, which adds two looks at the
clock. Each append is one generation micro-batch (4 responses), durable (fdatasync) before the next is sampled. Of the
ranks the slowest counts; the first step is left out, of the appends and of the step time alike. `compact`, which drops
what a checkpoint has made needless, runs in the background and is shown by itself.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import msgspec
import psutil

from verl_slurm.fence import take_epoch
from verl_slurm.paths import RunPaths
from verl_slurm.runtime_state.format import Arrays
from verl_slurm.runtime_state.ledger import Ledger
from verl_slurm.step_log import last_steps


class Append(msgspec.Struct):
    """One call: seconds by the clock, of which in fdatasync; CPU seconds of the thread; what was written."""

    step: int
    responses: int
    bytes: int
    seconds: float
    sync_s: float
    cpu_s: float
    syncs: int


class Watched(msgspec.Struct):
    """All calls of one rank."""

    appends: list[Append]
    compact_s: list[float]


@contextlib.contextmanager
def watched() -> Iterator[Watched]:
    """Within it, every ledger of this process is watched; syncs of others (the save path's) are not counted."""
    seen = Watched(appends=[], compact_s=[])
    running = threading.local()
    append, compact, fdatasync = Ledger.append, Ledger.compact, os.fdatasync

    def timed_sync(fd: int) -> None:
        began = time.perf_counter()
        try:
            fdatasync(fd)
        finally:
            now: Append | None = getattr(running, "append", None)
            if now is not None:
                now.syncs += 1
                now.sync_s += time.perf_counter() - began

    def timed_append(self: Ledger, step: int, micro_batch: int, arrays: Arrays) -> int:
        now = running.append = Append(step, len(next(iter(arrays.values()), ())), 0, 0.0, 0.0, 0.0, 0)
        began, cpu = time.perf_counter(), time.thread_time()
        try:
            now.bytes = append(self, step, micro_batch, arrays)
            return now.bytes
        finally:
            now.seconds, now.cpu_s = time.perf_counter() - began, time.thread_time() - cpu
            running.append = None
            seen.appends.append(now)

    def timed_compact(self: Ledger, before_step: int) -> int:
        began = time.perf_counter()
        try:
            return compact(self, before_step)
        finally:
            seen.compact_s.append(time.perf_counter() - began)

    with (
        patch.object(Ledger, "append", timed_append),
        patch.object(Ledger, "compact", timed_compact),
        patch.object(os, "fdatasync", timed_sync),
    ):
        yield seen


def figures(ranks: Sequence[Watched], step_s: Sequence[float]) -> dict[str, float]:
    """What one run says.

    Args:
        step_s: seconds of each step, the first one included.
    """
    steps = len(step_s) - 1
    counted = [[a for a in rank.appends if a.step > 0] for rank in ranks]
    slowest = max(counted, key=lambda appends: sum(a.seconds for a in appends))
    seconds, every = sum(a.seconds for a in slowest), [a for rank in counted for a in rank]
    return {
        "step_s": sum(step_s[1:]) / steps,
        "append_s_per_step": seconds / steps,
        "percent_of_step": 100 * seconds / sum(step_s[1:]),
        "of_which_sync_percent": 100 * sum(a.sync_s for a in slowest) / sum(step_s[1:]),
        "append_cpu_s_per_step": sum(a.cpu_s for a in slowest) / steps,
        "median_append_ms": 1e3 * statistics.median(a.seconds for a in every),
        "worst_append_ms": 1e3 * max(a.seconds for a in every),
        "appends_per_rank_and_step": len(slowest) / steps,
        "fsyncs_per_rank_and_step": sum(a.syncs for a in slowest) / steps,
        "bytes_per_response": sum(a.bytes for a in every) / sum(a.responses for a in every),
        "compact_ms": 1e3 * max((s for rank in ranks for s in rank.compact_s), default=0.0),
    }


def train(directory: Path, ranks: int, steps: int, overrides: Sequence[str]) -> dict[str, float]:
    """One run with all that it writes in a directory of its own below `directory`."""
    with tempfile.TemporaryDirectory(prefix="vs-ledger-", dir=directory) as name:
        run = Path(name) / "run"
        shape = [f"distributed.dp_size={ranks}", "distributed.nodes=1", f"train.steps={steps}"]
        words = [str(ROOT / "configs/quickstart.yaml"), f"run_dir={run}", *shape, *overrides]
        prepare = [sys.executable, "-m", "verl_slurm.cli", "submit", *words, "--prepare-only"]
        subprocess.run(prepare, stdout=sys.stderr, check=True)
        epoch = take_epoch(RunPaths(run), job_id="benchmark", restart=0).epoch
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        launcher += [f"--log-dir={name}", "--"]  # it would leave an empty tree in the temporary directory
        mine = [__file__, "--as-rank-of", str(run), "--epoch", str(epoch)]
        one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        subprocess.run(
            [sys.executable, *launcher, *mine], env=os.environ | one, stdout=sys.stderr, check=True
        )
        seen = [msgspec.json.decode(_said(run, rank).read_bytes(), type=Watched) for rank in range(ranks)]
        return figures(seen, [row["step_s"] for row in last_steps(RunPaths(run), steps)])


def _said(run: Path, rank: int) -> Path:
    return run.parent / f"rank_{rank}.json"


def _rank(run: Path, epoch: int) -> None:
    """The trainer's own entry, watched. Leaves as the trainer does: see `run_and_leave` there."""
    from verl_slurm.trainer.__main__ import main as trainer

    with watched() as seen:
        code = trainer(["--run", str(run), "--epoch", str(epoch)])
    _said(run, int(os.environ["RANK"])).write_bytes(msgspec.json.encode(seen))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def medium(directory: Path) -> str:
    """The file system that `directory` is on: its type."""
    real = directory.resolve()
    mounts = [p for p in psutil.disk_partitions(all=True) if real.is_relative_to(p.mountpoint)]
    return max(mounts, key=lambda p: len(p.mountpoint)).fstype if mounts else "unknown"


def table(runs: dict[str, dict[str, Any]]) -> str:
    names = [name for name in next(iter(runs.values())) if name != "medium"]
    places = [f"{place} ({run['medium']})" for place, run in runs.items()]
    lines = [f"{'':28}" + "".join(f"{place:>22}" for place in places)]
    lines += [f"{name:28}" + "".join(f"{run[name]:22.3f}" for run in runs.values()) for name in names]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="at least 2; the first is left out")
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--directory", type=Path, action="append", metavar="DIR", help="may be repeated")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--as-rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--epoch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="train.batch_size_per_device=64")
    options = parser.parse_intermixed_args(argv)
    if options.as_rank_of is not None:
        _rank(options.as_rank_of, options.epoch)
    if options.steps < 2:
        parser.error("--steps: the first step is left out, so there have to be two")
    runs: dict[str, dict[str, Any]] = {}
    for directory in options.directory or [Path("/dev/shm"), Path(tempfile.gettempdir())]:
        found = train(directory, options.ranks, options.steps, options.overrides)
        runs[str(directory)] = {"medium": medium(directory), **found}
    print(json.dumps(runs) if options.json else table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
