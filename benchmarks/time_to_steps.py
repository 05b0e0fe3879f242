"""How long one piece of work takes under one schedule of faults, by verl-slurm and by its peers.

    python benchmarks/time_to_steps.py [--nvrx PYTHON] [--to DIR] [--plot-only]

One after the other on an embedded cluster with Slurm's default credential lifetime, each as a job of one node with two
ranks that train the same model (0.3 GB with its optimizer) for 80 steps of half a second and save every ten. When a job
has first done step 15, SIGKILL ends a rank; at step 45 Slurm preempts the job for real.

* verl-slurm: the loop has the three lines of docs/guests.md, and saves when the daemon asks, too;
* torchrun, ft_launcher: `--max-restarts`; a job that does not end well is requeued by the last line of its script;
* scontrol requeue: without a launcher; a trap of the warning signal requeues the job, and so does a step that fails.

The last three save and load by `torch.distributed.checkpoint`. DIR (`docs`) gets `time-to-steps.json` and
`time-to-steps.svg`, drawn from nothing else: `--plot-only` draws it again. A step sleeps for most of its half second,
in the place of an accelerator. `--nvrx` names a Python that has nvidia-resiliency-ext; without it that job is NOT RUN.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypedDict

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.curves import lines
from benchmarks.save.machine import environment
from tests.harness import LiveRun
from tests.processes import python_path
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.conf import PREEMPTIBLE, ClusterOptions
from verl_slurm.slurm.devcluster.faults import preempt

_ROOT = Path(__file__).parents[1]
STEPS = 80
FAULTS = {15: "a rank killed", 45: "preempted"}
"""Step that was first done → what then happens."""
_PATIENCE_S = 900.0
_LOOP = f"""
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
root, STEPS, EVERY, STEP_S = Path(sys.argv[1]), {STEPS}, 10, 0.5
if "RANK" not in os.environ:
    os.environ.update(RANK=os.environ["SLURM_PROCID"], WORLD_SIZE=os.environ["SLURM_NTASKS"])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29871")
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Sequential(*(torch.nn.Linear(1600, 1600) for _ in range(10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
points = os.open(root / "points", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

def train(step):
    began = time.monotonic()
    optimizer.zero_grad()
    model(torch.full((1, 1600), step / STEPS)).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    time.sleep(max(0.0, began + STEP_S - time.monotonic()))  # stands for an accelerator's work
    os.write(points, f"{{rank}} {{os.getpid()}} {{step}} {{time.time()}}\\n".encode())
"""
_OURS = """
import verl_slurm
with verl_slurm.run(model=model, optimizer=optimizer) as run:
    for step in run.steps(STEPS):
        train(step + 1)
"""
_PEER = """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
saved = sorted(root.glob("step_*"))
begin = int(saved[-1].name[5:]) if saved else 0
if saved:
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=saved[-1])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
for step in range(begin + 1, STEPS + 1):
    train(step)
    if step % EVERY == 0:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=root / "saving")
        if rank == 0:
            os.rename(root / "saving", root / f"step_{step:06d}")
        dist.barrier()
"""
_BY_LAUNCHER = """#!/bin/bash
srun --ntasks=1 --cpus-per-task=2 {launcher} --standalone --nproc-per-node=2 --max-restarts=9 --monitor-interval=0.1 \\
  {program} {root} || scontrol requeue "$SLURM_JOB_ID"
"""
_BY_TRAP = """#!/bin/bash
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1
srun --kill-on-bad-exit=1 {python} {program} {root} &
wait $! || scontrol requeue "$SLURM_JOB_ID"
"""


class Result(TypedDict):
    """What one job did.

    Attributes:
        seconds: of each step, from the job's submission to the moment both ranks had first done it.
        repeated: steps that rank 0 did again.
        starts: of rank 0.
    """

    seconds: list[float]
    repeated: int
    starts: int


class _Job:
    """A submitted job, and what its ranks have written."""

    def __init__(self, cluster: DevCluster, root: Path, job_id: str, began: float) -> None:
        self._cluster, self._root, self._job_id, self._began = cluster, root, job_id, began

    def _points(self) -> list[tuple[int, int, int, float]]:
        file = self._root / "points"
        words = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [(int(rank), int(pid), int(step), float(at)) for rank, pid, step, at in words]

    def disturb(self) -> Result:
        """Lets it work to its end, with all faults."""
        for step, fault in FAULTS.items():
            self._wait(step)
            if fault == "preempted":
                preempt(self._cluster, int(self._job_id), hold_s=1)
            else:
                pid = [pid for rank, pid, _, _ in self._points() if rank == 1][-1]
                os.kill(pid, signal.SIGKILL)
            print(f"    step {step}: {fault}", file=sys.stderr, flush=True)
        self._wait(STEPS)
        points = self._points()
        first = [{step: at for rank, _, step, at in reversed(points) if rank == r} for r in (0, 1)]
        done = [step for rank, _, step, _ in points if rank == 0]
        return {
            "seconds": [
                round(max(one[step] for one in first) - self._began, 2) for step in range(1, STEPS + 1)
            ],
            "repeated": len(done) - len(set(done)),
            "starts": len({pid for rank, pid, _, _ in points if rank == 0}),
        }

    def _wait(self, step: int) -> None:
        """Polls: the peers have no events."""
        deadline = time.monotonic() + _PATIENCE_S
        while len({rank for rank, _, done, _ in self._points() if done >= step}) < 2:
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {step} of {self._root}")
            time.sleep(0.02)


def _ours(cluster: DevCluster, root: Path) -> _Job:
    program, config = root / "loop.py", root / "run.yaml"
    program.write_text(_LOOP + _OURS)
    config.write_text(
        f"trainer: {{backend: command, command: [{program}, {root}]}}\n"
        "code: {tree: null}\n"
        "distributed: {nodes: 1, dp_size: 2, device: cpu, threads_per_rank: 1}\n"
        "checkpoint: {every_steps: 10}\n"
        "slurm: {time_limit_min: 30}\n"
    )
    began = time.time()
    run = LiveRun(cluster, root / "run", config=str(config)).submit()
    return _Job(cluster, root, run.job_id, began)


def _by_script(cluster: DevCluster, script: str, root: Path, options: Sequence[str] = ()) -> _Job:
    program, batch = root / "loop.py", root / "job.sbatch"
    program.write_text(_LOOP + _PEER)
    batch.write_text(script.format(program=program, root=root, python=sys.executable))
    words = ["sbatch", "--parsable", "--requeue", "--open-mode=append", f"--partition={PREEMPTIBLE}"]
    words += ["--nodes=1", "--ntasks=2", f"--output={root}/log", *options, str(batch)]
    environ = cluster.client_env() | {"OMP_NUM_THREADS": "1"} | python_path()
    began = time.time()
    job_id = subprocess.run(words, env=environ, check=True, capture_output=True, text=True).stdout.strip()
    return _Job(cluster, root, job_id, began)


def _by_launcher(launcher: str) -> str:
    return _BY_LAUNCHER.replace("{launcher}", launcher)


def measure(nvrx: Path | None) -> dict[str, Result]:
    found: dict[str, Result] = {}
    with tempfile.TemporaryDirectory(prefix="vs-") as name:
        directory = Path(name)
        cluster = DevCluster(directory / "c")
        cluster.start(ClusterOptions())
        try:
            jobs: dict[str, Callable[[Path], _Job]] = {
                "verl-slurm": partial(_ours, cluster),
                "torchrun": partial(
                    _by_script, cluster, _by_launcher(f"{sys.executable} -m torch.distributed.run")
                ),
                "NVRx": partial(_by_script, cluster, _by_launcher(f"{nvrx and nvrx.parent}/ft_launcher")),
                "scontrol requeue": partial(_by_script, cluster, _BY_TRAP, options=("--signal=B:USR1@60",)),
            }
            for number, (system, start) in enumerate(jobs.items()):
                if system == "NVRx" and nvrx is None:
                    print("NVRx: NOT RUN, --nvrx names no Python that has it", file=sys.stderr)
                    continue
                print(system, file=sys.stderr, flush=True)
                root = directory / f"job{number}"
                root.mkdir()
                found[system] = start(root).disturb()
        finally:
            cluster.stop()
    return found


def draw(found: Mapping[str, Result]) -> str:
    """The picture of the measured jobs, as SVG."""
    return lines(
        {
            f"{name}: {one['seconds'][-1]:.0f} s, {one['repeated']} steps done again": [
                (at, float(step)) for step, at in enumerate(one["seconds"], start=1)
            ]
            for name, one in found.items()
        },
        title=f"{STEPS} steps with a rank killed and a preemption",
        x="seconds from the submission",
        y="steps done",
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--nvrx", type=Path, metavar="PYTHON", help="an environment's, with nvidia-resiliency-ext"
    )
    parser.add_argument("--to", type=Path, default=_ROOT / "docs", metavar="DIR", help="where both files go")
    parser.add_argument("--plot-only", action="store_true", help="draw DIR/time-to-steps.json again")
    options = parser.parse_args(argv)
    rows, image = options.to / "time-to-steps.json", options.to / "time-to-steps.svg"
    if not options.plot_only:
        machine = environment([Path(tempfile.gettempdir())])
        found = measure(options.nvrx)
        document = {"cpu": machine.cpu, "cores": machine.cores, "jobs": found}
        rows.write_text(json.dumps(document).replace('"seconds"', '\n"seconds"') + "\n")
    found = json.loads(rows.read_text())["jobs"]
    image.write_text(draw(found))
    for name, one in found.items():
        print(f"{name:18}{one['seconds'][-1]:8.1f} s{one['repeated']:5} steps again{one['starts']:4} starts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
