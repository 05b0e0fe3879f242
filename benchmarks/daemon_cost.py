"""What the daemon costs a running job: resident memory and CPU of the lead and of the agents.

    python benchmarks/daemon_cost.py [--json]

The quick start runs on an embedded cluster; between its third and its last step, the processes' own CPU time is divided
by the wall time, and their peak resident memory is read (VmHWM).
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil

from tests.harness import LiveRun
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.conf import ClusterOptions


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _peak_mb(process: psutil.Process) -> float:
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmHWM")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vs-") as name:
        cluster = DevCluster(Path(name) / "c")
        try:
            cluster.start(ClusterOptions())
            run = LiveRun(cluster, Path(name) / "run", "train.steps=16").submit()
            run.wait_phase("generate", step=3)
            daemons = run.daemons()
            before = {role: _cpu_s(process) for role, process in daemons.items()}
            began = time.monotonic()
            run.wait(lambda: run.status().get("step", 0) >= 14)
            wall = time.monotonic() - began
            figures = {
                role: {
                    "cpu_percent": round(100 * (_cpu_s(process) - before[role]) / wall, 2),
                    "peak_mb": round(_peak_mb(process), 1),
                }
                for role, process in daemons.items()
            }
            run.wait_end()
        finally:
            cluster.stop()
    if options.json:
        print(json.dumps({"wall_s": round(wall, 1), **figures}))
    else:
        for role, figure in figures.items():
            print(f"{role:10} {figure['cpu_percent']:6.2f} % CPU   {figure['peak_mb']:6.1f} MB peak")
    return 0


if __name__ == "__main__":
    sys.exit(main())
