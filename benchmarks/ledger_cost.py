"""What the rollout ledger costs: seconds in `Ledger.append`, by the seconds of the steps it was called in.

    python benchmarks/ledger_cost.py [--steps 5] [--ranks 2] [--directory DIR ...] [--json] [KEY=VALUE ...]

The quick start trains for real, without a daemon, once for each DIR (memory and the disk of temporary files); its
ledger and all else that it writes is there. `Ledger.append` and `settle` are wrapped in every rank, and what turns
tensors into arrays for them; that adds looks at the clock. Each append is one generation micro-batch (4 responses); its
fdatasync goes on, in a thread of its own, while the next is sampled. What the training waits for it is in the seconds;
what that thread takes of the CPU is not, and may be somebody's: `percent_with_sync_cpu` adds it. Of the ranks the
slowest counts; the first step is left out, of the appends and of the step time alike. `compact`, which drops what a
checkpoint has made needless, runs in the background and is shown by itself.
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

from verl_slurm.base.fence import take_attempt
from verl_slurm.base.kernel_facts import file_system
from verl_slurm.base.paths import RunPaths
from verl_slurm.journal.steps import last_steps
from verl_slurm.runtime_state.format import Arrays
from verl_slurm.runtime_state.ledger import Ledger
from verl_slurm.runtime_state.segment_files import BackgroundSync


class Append(msgspec.Struct):
    """One call: seconds of the training by the clock, of which waiting for the sync of the record before; CPU seconds
    of its thread; what was written; and the sync of this record, behind the training's back."""

    step: int
    responses: int
    bytes: int
    seconds: float
    wait_s: float
    cpu_s: float
    syncs: int
    sync_s: float
    sync_cpu_s: float


class Settled(msgspec.Struct):
    """The wait for the last sync of a step."""

    step: int
    seconds: float


class Watched(msgspec.Struct):
    """All calls of one rank."""

    appends: list[Append]
    settled: list[Settled]
    compact_s: list[float]


@contextlib.contextmanager
def watched() -> Iterator[Watched]:
    """Within it, every ledger of this process is watched; syncs of others (the save path's) are not counted."""
    seen = Watched(appends=[], settled=[], compact_s=[])
    running = threading.local()
    under_way: dict[int, Append] = {}
    append, settle, compact, fdatasync = Ledger.append, Ledger.settle, Ledger.compact, os.fdatasync
    begin, wait = BackgroundSync.begin, BackgroundSync.wait

    def timed_sync(fd: int) -> None:
        began, cpu = time.perf_counter(), time.thread_time()
        try:
            fdatasync(fd)
        finally:
            now = under_way.pop(fd, None)
            if now is not None:
                now.syncs += 1
                now.sync_s = time.perf_counter() - began
                now.sync_cpu_s = time.thread_time() - cpu

    def noted_begin(self: BackgroundSync, fd: int) -> None:
        under_way[fd] = running.append
        begin(self, fd)

    def timed_wait(self: BackgroundSync) -> None:
        began = time.perf_counter()
        try:
            wait(self)
        finally:
            now: Append | None = getattr(running, "append", None)
            if now is not None:
                now.wait_s += time.perf_counter() - began

    def timed_append(self: Ledger, step: int, micro_batch: int, arrays: Arrays) -> int:
        now = Append(step, len(next(iter(arrays.values()), ())), 0, 0.0, 0.0, 0.0, 0, 0.0, 0.0)
        running.append = now
        began, cpu = time.perf_counter(), time.thread_time()
        try:
            now.bytes = append(self, step, micro_batch, arrays)
            return now.bytes
        finally:
            now.seconds, now.cpu_s = time.perf_counter() - began, time.thread_time() - cpu
            running.append = None
            seen.appends.append(now)

    def timed_settle(self: Ledger) -> None:
        began = time.perf_counter()
        try:
            settle(self)
        finally:
            step = seen.appends[-1].step if seen.appends else 0
            seen.settled.append(Settled(step, time.perf_counter() - began))

    def timed_compact(self: Ledger, before_step: int) -> int:
        began = time.perf_counter()
        try:
            return compact(self, before_step)
        finally:
            seen.compact_s.append(time.perf_counter() - began)

    with (
        patch.object(Ledger, "append", timed_append),
        patch.object(Ledger, "settle", timed_settle),
        patch.object(Ledger, "compact", timed_compact),
        patch.object(BackgroundSync, "begin", noted_begin),
        patch.object(BackgroundSync, "wait", timed_wait),
        patch.object(os, "fdatasync", timed_sync),
    ):
        yield seen


def figures(ranks: Sequence[Watched], step_s: Sequence[float]) -> dict[str, float]:
    """What one run says.

    Args:
        step_s: seconds of each step, the first one included.
    """
    steps = len(step_s) - 1
    counted = [
        ([a for a in rank.appends if a.step > 0], sum(w.seconds for w in rank.settled if w.step > 0))
        for rank in ranks
    ]
    slowest, settled_s = max(counted, key=lambda rank: sum(a.seconds for a in rank[0]) + rank[1])
    seconds, all_s = sum(a.seconds for a in slowest) + settled_s, sum(step_s[1:])
    waited_s, sync_cpu_s = sum(a.wait_s for a in slowest) + settled_s, sum(a.sync_cpu_s for a in slowest)
    every = [a for appends, _ in counted for a in appends]
    return {
        "step_s": all_s / steps,
        "ledger_s_per_step": seconds / steps,
        "percent_of_step": 100 * seconds / all_s,
        "of_which_waiting_percent": 100 * waited_s / all_s,
        "percent_with_sync_cpu": 100 * (seconds + sync_cpu_s) / all_s,
        "append_cpu_s_per_step": sum(a.cpu_s for a in slowest) / steps,
        "sync_cpu_s_per_step": sync_cpu_s / steps,
        "median_append_ms": 1e3 * statistics.median(a.seconds for a in every),
        "median_append_cpu_ms": 1e3 * statistics.median(a.cpu_s for a in every),
        "worst_append_ms": 1e3 * max(a.seconds for a in every),
        "median_sync_ms": 1e3 * statistics.median(a.sync_s for a in every),
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
        attempt = take_attempt(RunPaths(run), job_id="benchmark", restart=0).attempt
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        launcher += [f"--log-dir={name}", "--"]  # it would leave an empty tree in the temporary directory
        mine = [__file__, "--as-rank-of", str(run), "--attempt", str(attempt)]
        one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        subprocess.run(
            [sys.executable, *launcher, *mine], env=os.environ | one, stdout=sys.stderr, check=True
        )
        seen = [msgspec.json.decode(_said(run, rank).read_bytes(), type=Watched) for rank in range(ranks)]
        return figures(seen, [row["step_s"] for row in last_steps(RunPaths(run), steps)])


def _said(run: Path, rank: int) -> Path:
    return run.parent / f"rank_{rank}.json"


def _rank(run: Path, attempt: int) -> None:
    """The trainer's own entry, watched. Leaves as the trainer does: see `run_and_leave` there."""
    from verl_slurm.trainer.__main__ import main as trainer
    from verl_slurm.trainer.state.train_state import to_arrays

    spent: list[tuple[float, float]] = []

    def timed(batch: Any) -> Arrays:
        began, cpu = time.perf_counter(), time.thread_time()
        arrays = to_arrays(batch)
        spent.append((time.perf_counter() - began, time.thread_time() - cpu))
        return arrays

    with watched() as seen, patch("verl_slurm.trainer.rollout.records.to_arrays", timed):
        code = trainer(["--run", str(run), "--attempt", str(attempt)])
    for append, (seconds, cpu_s) in zip(
        seen.appends, spent, strict=True
    ):  # nothing is taken back in this run
        append.seconds += seconds
        append.cpu_s += cpu_s
    _said(run, int(os.environ["RANK"])).write_bytes(msgspec.json.encode(seen))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
    parser.add_argument("--attempt", type=int, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="train.batch_size_per_device=64")
    options = parser.parse_intermixed_args(argv)
    if options.as_rank_of is not None:
        _rank(options.as_rank_of, options.attempt)
    if options.steps < 2:
        parser.error("--steps: the first step is left out, so there have to be two")
    runs: dict[str, dict[str, Any]] = {}
    for directory in options.directory or [Path("/dev/shm"), Path(tempfile.gettempdir())]:
        found = train(directory, options.ranks, options.steps, options.overrides)
        runs[str(directory)] = {"medium": file_system(directory) or "unknown", **found}
    print(json.dumps(runs) if options.json else table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
