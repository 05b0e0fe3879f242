"""How long a preempted run stands still: verl-slurm beside what a plain `scontrol requeue` costs, in one run.

    python benchmarks/requeue_latency.py [--json]

On an embedded cluster with Slurm's default credential lifetime (AuthInfo without cred_expire), at the same time:

* plain: a batch job that does nothing is requeued by `scontrol requeue`, as a bash trap would do it; measured from the
  command to the moment its script runs again;
* verl-slurm: the quick start is preempted for real in mid-generation; measured from the moment the daemon knows the
  cause to the first rollout that is not a replay: save, verification, requeue, queue, start, imports and load included.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import msgspec

from tests.harness import LiveRun
from verl_slurm.demo import timings
from verl_slurm.devcluster.cluster import DevCluster
from verl_slurm.devcluster.conf import ClusterOptions
from verl_slurm.devcluster.faults import preempt
from verl_slurm.journal.files import read_events

_SCRIPT = """#!/bin/bash
date +%s.%N >> "$1"
exec sleep 600
"""


def plain(cluster: DevCluster, directory: Path) -> float:
    """Seconds from `scontrol requeue` to the second start of a batch script."""
    script, starts = directory / "plain.sbatch", directory / "starts"
    script.write_text(_SCRIPT)
    os.mkfifo(starts)  # opening it for reading waits for the script's writing: no polling
    command = ["sbatch", "--parsable", "--requeue", "-N1", "-n1", "-o", "/dev/null", str(script), str(starts)]

    def slurm(*argv: str) -> str:
        return subprocess.run(
            argv, env=cluster.client_env(), check=True, capture_output=True, text=True
        ).stdout.strip()

    job = slurm(*command)
    starts.read_text()
    asked = time.time()
    slurm("scontrol", "requeue", job)
    again = float(starts.read_text())
    slurm("scancel", job)
    return again - asked


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vs-") as name:
        directory = Path(name)
        cluster = DevCluster(directory / "c")
        try:
            cluster.start(ClusterOptions())
            waits: list[float] = []
            other = threading.Thread(target=lambda: waits.append(plain(cluster, directory)))
            other.start()
            run = LiveRun(cluster, directory / "run", "train.steps=8").submit()
            run.wait_phase("generate")
            preempt(cluster, int(run.job_id), hold_s=1)
            run.wait_end()
            ours = timings(read_events(run.paths))
            other.join()
        finally:
            cluster.stop()
    figures = {"plain_requeue_to_start_s": round(waits[0], 1), **msgspec.to_builtins(ours)}
    print(json.dumps(figures) if options.json else "\n".join(f"{v:8.2f}  {k}" for k, v in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
