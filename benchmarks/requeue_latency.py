"""How long a run stands still that is preempted, or loses a node: beside what a plain `scontrol requeue` costs, in one
run.

    python benchmarks/requeue_latency.py [--json]

On an embedded cluster with Slurm's default credential lifetime (AuthInfo without cred_expire), at the same time:

* plain: a batch job that does nothing is requeued by `scontrol requeue`, as a bash trap would do it; measured from the
  command to the moment its script runs again;
* verl-slurm: the quick start is preempted for real in mid-generation; measured from the moment the daemon knows the
  cause to the first rollout that is not a replay: save, verification, requeue, queue, start, imports and load included.

Then, one after the other: everything on a node that trains is killed, slurmd included, of a job that has a spare one;
measured from the kill to the first safe point on the other nodes. Once with ranks that stand by, once without.

Goodput: an interruption costs by how much longer the step took that it fell into than the median step did. That counts
the queue, the start, all that is done again, and saves. With one interruption in ten minutes, the rest is useful. Saves
are made as often as storage allows (`checkpoint.cadence: continuous`).
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import msgspec

from tests.harness import LiveRun
from verl_slurm.cli.setup.demo_run import timings
from verl_slurm.journal.files import read_events
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.conf import ClusterOptions
from verl_slurm.slurm.devcluster.faults import fail_node, preempt, restore_node

_HELD = 3
"""Nodes of a job whose ranks have two, and that has a spare one."""
_STEPS_OF_IMPORTS = 4
_SETTINGS = ("train.steps=10", "checkpoint.cadence=continuous")
_BETWEEN_S = 600.0
_TURNS = 3
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


def lost_node(cluster: DevCluster, root: Path, *, standby: bool) -> tuple[float, float]:
    """Seconds from the loss of a node, not the first, to the first safe point with a spare one in its place; and the
    seconds that it cost the run.
    """
    after_s = "0" if standby else "null"
    run = LiveRun(cluster, root, *_SETTINGS, "slurm.spare_nodes=1", f"daemon.standby_after_s={after_s}")
    run.submit().wait_phase("update")
    if standby:
        run.wait(lambda: run.stands_by(_HELD))
    # The imports of those that stand by are done: the machine is idle again but for the training.
    run.wait(lambda: run.status()["step"] >= _STEPS_OF_IMPORTS)
    (node,) = run.other_nodes()
    killed = datetime.now(UTC)
    fail_node(cluster, node)
    back = run.wait(lambda: run.events("training")[1:])[0]
    run.wait_end()
    assert run.facts().restarts == 0, "it was requeued"
    restore_node(cluster, node, timeout_s=120)
    return (datetime.fromisoformat(back["time"]) - killed).total_seconds(), lost_seconds(
        run, killed.timestamp()
    )


def lost_seconds(run: LiveRun, interrupted: float) -> float:
    """By how much longer than the median step the step took that was interrupted at `interrupted`, in seconds since
    1970. Steps that were done again meanwhile are part of it.
    """
    lines = [json.loads(line) for line in run.paths.steps.read_text().splitlines()]
    done = [(int(line["step"]), datetime.fromisoformat(line["time"]).timestamp()) for line in lines]
    took = [
        after - before
        for (step, before), (next_step, after) in itertools.pairwise(done)
        if next_step == step + 1 and not before <= interrupted <= after
    ]
    step, before = max((step, at) for step, at in done if at <= interrupted)
    after = min(at for other, at in done if other == step + 1 and at > interrupted)
    return after - before - statistics.median(took[1:])  # the first one warms up


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
            run = LiveRun(cluster, directory / "run", *_SETTINGS).submit()
            run.wait_phase("generate", step=_STEPS_OF_IMPORTS)
            preempt(cluster, int(run.job_id), hold_s=1)
            run.wait_end()
            ours = timings(read_events(run.paths))
            (cause,) = run.events("cause")
            requeued_s = lost_seconds(run, datetime.fromisoformat(cause["time"]).timestamp())
            other.join()
            lost = {
                standby: [
                    lost_node(cluster, directory / f"lost{standby}{turn}", standby=standby)
                    for turn in range(_TURNS)
                ]
                for standby in (True, False)
            }
        finally:
            cluster.stop()
    figures = {"plain_requeue_to_start_s": round(waits[0], 1), **msgspec.to_builtins(ours)}
    costs = {"requeued": requeued_s}
    for standby, seconds in lost.items():
        how = "standing_by" if standby else "started_anew"
        safe_points, costs[how] = (statistics.median(each) for each in zip(*seconds, strict=True))
        figures[f"lost_node_to_training_{how}_s"] = round(safe_points, 2)
    for how, lost_s in costs.items():
        figures[f"lost_{how}_s"] = round(lost_s, 2)
        figures[f"goodput_at_one_in_10_minutes_{how}"] = round(1 - lost_s / _BETWEEN_S, 4)
    print(json.dumps(figures) if options.json else "\n".join(f"{v:8.2f}  {k}" for k, v in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
