"""How long `verl-slurm list` takes over many runs: `python benchmarks/list_runs.py [--runs 1000] [--json]`

The run directories are made for it: a journal of thousands of events, a hundred checkpoints with manifests of 48 files
each, most runs over, one in ten running or queued; a stand-in for squeue names those. Measured, in processes of their
own: the whole command (table and JSON), and its reading part alone (`glance_at_all`), first with the files' pages
dropped from the cache (directories and inodes stay in it, so this is no first look after a boot), then warm.
Wall and CPU seconds; the machine's load beside them.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.many_runs import Kind, make_run

_KINDS: tuple[Kind, ...] = ("running", *("done",) * 5, "queued", "cancelled", *("done",) * 2)
_INSIDE = (
    "import sys; from pathlib import Path; from verl_slurm.runs.glance import glance_at_all; "
    "sys.exit(not glance_at_all(Path(sys.argv[1])))"
)


def make_runs(place: Path, runs: int, events: int, checkpoints: int) -> None:
    """The directories, and `bin/squeue`, which has the running and the queued ones."""
    jobs = []
    for number in range(runs):
        kind = _KINDS[number % len(_KINDS)]
        make_run(
            place / "runs" / f"run-{number:04d}",
            kind,
            job_id=str(100000 + number),
            num_events=events,
            num_checkpoints=checkpoints,
        )
        if kind in ("running", "queued"):
            jobs.append(f"{100000 + number}|{'RUNNING' if kind == 'running' else 'PENDING'}|None")
    squeue = place / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(jobs) + "\nEND\n")
    squeue.chmod(0o755)


def forget(place: Path) -> None:
    """Drop the pages of all files below from the cache."""
    os.sync()
    for directory, _, names in os.walk(place):
        for name in names:
            fd = os.open(os.path.join(directory, name), os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def timed(argv: list[str], place: Path) -> dict[str, float]:
    """Wall and CPU seconds of one command, its children's included."""
    env = os.environ | {
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'daemon'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
    }
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *argv], env=env, stdout=subprocess.DEVNULL, check=True)
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(wall_s, 3), "cpu_s": round(cpu_s, 3)}


def measure(place: Path, repeat: int) -> dict[str, object]:
    """The best of `repeat` warm ones; what is cold is measured once each."""
    runs = str(place / "runs")
    commands = {
        "list": ["-m", "verl_slurm.cli", "list", runs],
        "list --json": ["-m", "verl_slurm.cli", "list", runs, "--json"],
        "reading alone": ["-c", _INSIDE, runs],
    }
    found: dict[str, object] = {}
    for name, argv in commands.items():
        forget(place / "runs")
        cold = timed(argv, place)
        warm = [timed(argv, place) for _ in range(repeat)]
        found[name] = {"cold": cold, "warm": min(warm, key=lambda one: one["wall_s"])}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--events", type=int, default=2500)
    parser.add_argument("--checkpoints", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="Where to make the runs; kept, and used again.")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    place = options.directory or Path(tempfile.mkdtemp(prefix="vs-list-"))
    try:
        if not (place / "bin").exists():
            make_runs(place, options.runs, options.events, options.checkpoints)
        result = {
            "runs": options.runs,
            "events_each": options.events,
            "checkpoints_each": options.checkpoints,
            "load_average": [round(load, 2) for load in os.getloadavg()],
            **measure(place, options.repeat),
        }
    finally:
        if options.directory is None:
            shutil.rmtree(place)
    if options.json:
        print(json.dumps(result))
        return 0
    for name, value in result.items():
        print(f"{name:<18} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
