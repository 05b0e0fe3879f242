"""What a look at a data set costs, beside coreutils and findutils.

    python benchmarks/fingerprint.py [--quick] [--cold] [--json] [--repetitions N] [--directory DIR]

Two trees are made and removed again: 2 GiB in 20 files, and 20,000 files of 2 to 8 KiB. Each repetition runs every
case once, in turns, so that what else the machine does hits all of them; a first round is not counted.

* reading everything: `find | xargs -P CORES sha256sum`, this project called as the daemon calls it, and the
  whole command `verl-slurm fingerprint --full` with the start of Python; with the files in memory (warm), and after
  dropping the kernel's caches (--cold: needs root, slows everybody on the machine, and drops only the guest's caches in
  a virtual machine);
* an unchanged tree, warm: `find ROOT -printf '%p %s %T@\\n'` to /dev/null, and this project with its cache, called
  and as a command.

Ratios are medians against the peer's median in the same run; under 1 is faster than the peer. All digests are
compared. CPU seconds are counted too (of all processes together): they say little of how well cores are shared, but are
the same on a busy machine. Targets, for the call: reading at most 1.1 x the peer, an unchanged tree under 1.5 x
(missed since one walker in Python serves data, code and checkpoints).

Where the CPU time of the small files goes, of 0.44 s on a busy machine: the names 4 %, reading and hashing 60 % (in two
processes, because two Python threads take as long as one), the second walk 20 %, putting the entries together 10 %. Of
an unchanged tree: the walk half; the rest in equal parts reading the cache, comparing, putting the entries together.

Measured on an idle machine with 2 cores, 2026-11-21, 7 repetitions, when two find(1) walked beside each other, and
Python parsed what they said:

    2 GiB in 20 files       0.530 s against 1.924 s: x 0.28
    20,000 small files      0.125 s against 0.156 s: x 0.80 (load 15: x 1.43, CPU x 0.80)
    unchanged, 20           0.9 ms against 0.8 ms: x 1.21
    unchanged, 20,000       20.5 ms against 21.9 ms: x 0.93 (load 15: x 1.75; CPU x 1.50 either way)

Since 2026-11-28 the walk is Python's. That version and this one in turns in one run, on a busy machine (load 13 to 35),
5 repetitions:

    0.5 GiB in 20 files     before x 0.20, CPU x 0.24; now x 0.18, CPU x 0.23
    20,000 small files      before x 1.12, CPU x 0.79; now x 1.10, CPU x 0.76
    unchanged, 20,000       before x 0.95, CPU x 1.45; now x 2.27, CPU x 2.98
    unchanged, 20           before x 0.46, CPU x 1.11; now x 0.06, CPU x 0.34

Tried for the small files, without gain: two or more Python threads; opening relative to a directory (4 % less CPU);
one buffer with readv instead of read (nothing). One process alone: 1.4 x by CPU time on the way that is waited for.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from verl_slurm.dataset.fingerprint.cache import default_path
from verl_slurm.dataset.fingerprint.data_record import fingerprint, remember, survey

_DROP = Path("/proc/sys/vm/drop_caches")
_CORES = len(os.sched_getaffinity(0))
Case = Callable[[], object]
# Of 20, 50, 200, 1000 and 5000 files a process, what the peer is fastest with.
_SMALL_PER_PROCESS = 1000
_READ_TARGET, _UNCHANGED_TARGET = 1.1, 1.5


def _make_large(root: Path, num_files: int, num_bytes: int) -> None:
    root.mkdir()
    for index in range(num_files):
        with (root / f"shard-{index:05d}.bin").open("wb") as file:
            left = num_bytes
            while left:
                left -= file.write(os.urandom(min(left, 8 << 20)))


def _make_small(root: Path, num_files: int) -> None:
    for index in range(num_files):
        folder = root / f"{index // 200:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index:06d}.json").write_bytes(os.urandom(2048 + index * 7919 % 6000))


def _sha256sum(root: Path, per_process: int, processes: int = _CORES) -> bytes:
    """What `find -print0 | xargs -0 -P N -n N sha256sum` prints: unsorted, so less than we do."""
    find = subprocess.Popen(["find", str(root), "-type", "f", "-print0"], stdout=subprocess.PIPE)
    argv = ["xargs", "-0", "-P", str(processes), "-n", str(per_process), "sha256sum"]
    done = subprocess.run(argv, stdin=find.stdout, stdout=subprocess.PIPE, check=True)
    if find.wait():
        raise AssertionError("find failed")
    return done.stdout


def _command(root: Path, *flags: str) -> Case:
    argv = [sys.executable, "-m", "verl_slurm.cli", "fingerprint", str(root), *flags]
    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path}
    env.pop("PYTHONSAFEPATH", None)
    return lambda: subprocess.run(argv, env=env, stdout=subprocess.DEVNULL, check=True)


def _find(root: Path) -> None:
    argv = ["find", str(root), "-printf", r"%p %s %T@\n"]
    subprocess.run(argv, stdout=subprocess.DEVNULL, check=True)


def _check_digests(root: Path) -> None:
    theirs = {}
    # One process at a time: the lines of two may mix.
    for line in _sha256sum(root, 1000, 1).decode().splitlines():
        digest, name = line.split("  ", 1)
        theirs[os.path.relpath(name, root)] = digest
    if theirs != {path: entry.sha256 for path, entry in fingerprint(root).files.items()}:
        raise AssertionError("sha256sum and we do not agree")


def _from_cache(root: Path, cache: Path) -> None:
    if survey(root, cache=cache).num_read:
        raise AssertionError("files were read that did not change")


def _cpu_s() -> float:
    """Of this process and of those that it has waited for."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def _measure(cases: dict[str, Case], repetitions: int, *, cold: bool = False) -> dict[str, dict[str, float]]:
    taken: dict[str, list[float]] = {name: [] for name in cases}
    cpu: dict[str, list[float]] = {name: [] for name in cases}
    for repetition in range(repetitions + 1):
        for name, case in cases.items():
            if cold:
                os.sync()
                _DROP.write_text("3")
            cpu_began, began = _cpu_s(), time.perf_counter()
            case()
            if repetition:
                taken[name].append(time.perf_counter() - began)
                cpu[name].append(_cpu_s() - cpu_began)
    peer = statistics.median(next(iter(taken.values())))
    peer_cpu = statistics.median(next(iter(cpu.values())))
    return {
        name: {
            "median_s": round(statistics.median(times), 5),
            "min_s": round(min(times), 5),
            "max_s": round(max(times), 5),
            "ratio": round(statistics.median(times) / peer, 3),
            "cpu_s": round(statistics.median(cpu[name]), 5),
            "cpu_ratio": round(statistics.median(cpu[name]) / peer_cpu, 3),
        }
        for name, times in taken.items()
    }


def _bench(
    root: Path, work: Path, per_process: int, repetitions: int, *, cold: bool
) -> dict[str, dict[str, dict[str, float]]]:
    _check_digests(root)
    os.environ["XDG_CACHE_HOME"] = str(work / "home")
    cache = default_path(root)
    reading: dict[str, Case] = {
        f"sha256sum, xargs -P{_CORES}": lambda: _sha256sum(root, per_process),
        "fingerprint": lambda: fingerprint(root),
        "verl-slurm fingerprint --full": _command(root, "--full"),
    }
    unchanged: dict[str, Case] = {
        "find -printf '%p %s %T@'": lambda: _find(root),
        "fingerprint, cached": lambda: _from_cache(root, cache),
        "verl-slurm fingerprint": _command(root),
    }
    found = {}
    if cold:
        found["read everything, cold"] = _measure(reading, repetitions, cold=True)
    found["read everything, warm"] = _measure(reading, repetitions)
    # The trees are as good as at rest, but younger than a minute in a quick run: so the clock says later.
    if problem := remember(cache, survey(root, clock_ns=lambda: time.time_ns() + 3600 * 10**9)):
        raise AssertionError(problem)
    found["unchanged, warm"] = _measure(unchanged, repetitions)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="20 MiB and 500 files: whether it works, not how fast"
    )
    parser.add_argument("--cold", action="store_true", help="also after dropping this kernel's caches (root)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--directory", help="make the trees below this one; default: the temporary one")
    options = parser.parse_args()
    num_bytes, num_small = (1 << 20, 500) if options.quick else ((2 << 30) // 20, 20_000)
    load_before = os.getloadavg()
    results = {}
    with tempfile.TemporaryDirectory(prefix="vs-fingerprint-", dir=options.directory) as name:
        work = Path(name)
        tree = work / "large"
        _make_large(tree, 20, num_bytes)
        os.sync()
        title = f"20 files, {20 * num_bytes / 2**30:.2f} GiB"
        results[title] = _bench(tree, work, 1, options.repetitions, cold=options.cold)
        shutil.rmtree(tree)
        tree = work / "small"
        _make_small(tree, num_small)
        os.sync()
        title = f"{num_small} files of 2 to 8 KiB"
        results[title] = _bench(tree, work, _SMALL_PER_PROCESS, options.repetitions, cold=options.cold)
    load_after = os.getloadavg()
    if options.json:
        print(
            json.dumps(
                {
                    "cores": _CORES,
                    "repetitions": options.repetitions,
                    "load_before": load_before,
                    "load_after": load_after,
                    "results": results,
                }
            )
        )
        return 0
    print(
        f"{_CORES} cores, {options.repetitions} repetitions, load {load_before[0]:.1f} to {load_after[0]:.1f}"
    )
    for title, parts in results.items():
        for part, rows in parts.items():
            print(f"\n{title}: {part}")
            for label, row in rows.items():
                times = f"{row['median_s']:9.4f} s  ({row['min_s']:.4f} .. {row['max_s']:.4f})"
                target = _UNCHANGED_TARGET if part.startswith("unchanged") else _READ_TARGET
                met = "met" if row["ratio"] <= target else "MISSED"
                verdict = f"target {target}: {met}" if label.startswith("fingerprint") else ""
                print(
                    f"  {label:32} {times}  x {row['ratio']:.2f}  CPU x {row['cpu_ratio']:.2f}  {verdict}".rstrip()
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
