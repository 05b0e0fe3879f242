"""Hundreds of real preemptions in a row, and hundreds of saves and crashes under one lead: nothing lost, nothing grows.

`make soak N=200 TESTS=tests/slurm_cluster/test_soak.py`; `VERL_SLURM_SOAK_RESULTS=FILE` keeps every figure.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.footprint import growth, litter, look
from tests.harness import SMALL, LiveRun, same_weights
from tests.ledger_stats import ledger_stats
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import preempt

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.soak, pytest.mark.timeout(0)]

_N = int(os.environ.get("VERL_SLURM_SOAK") or 3)
_PATIENCE_S = 900.0
_ROOM = {"fds": 1.0, "threads": 1.0, "mb": 2.0, "litter": 2.0}
"""What a figure may differ from the first quarter's: a socket that is just being closed, a page more or less."""
_KEPT = ("checkpoints", "logs", "ledger", "control", "tensorboard")
"""What grows by design: pruned by rules of their own, or a claim of the attempt and TensorBoard's file for each
start."""
_LONG = (
    *SMALL,
    "train.batch_size_per_device=128",
    "checkpoint.every_steps=2",
    "checkpoint.runtime_every_steps=2",
    "checkpoint.keep_last=3",
    "daemon.crash_budget=100000",
    "daemon.no_progress_limit=1000",
    "daemon.requeue_delay_s=1",
    "daemon.backoff_s=0.05",
    "slurm.time_limit_min=1000",
)

Series = dict[str, list[float]]


@pytest.fixture
def run(cluster: DevCluster, tmp_path: Path) -> Iterator[LiveRun]:
    live = LiveRun(cluster, tmp_path / "run", *_LONG)
    yield live
    live.cancel()


def _sample(run: LiveRun, series: Series) -> None:
    """The daemons' figures and the run's litter, as they are at this moment."""
    agents: dict[str, float] = {}
    for role, process in run.daemons().items():
        for name, value in look(process).items():
            if role == "lead":
                series[f"lead {name}"].append(value)
            else:  # of several agents the worst
                agents[name] = max(agents.get(name, 0.0), value)
    for name, value in agents.items():
        series[f"agent {name}"].append(value)
    left = litter(run.paths.root, known=_KEPT)
    series["run litter"].append(float(len(left)))
    shared_memory = [p for p in Path("/dev/shm").iterdir() if "verl" in p.name or "vs-" in p.name]
    series["shared memory litter"].append(float(len(shared_memory)))


def _grown(series: Series) -> dict[str, float]:
    return {
        name: round(growth(values), 2)
        for name, values in series.items()
        if name.rsplit(" ", 1)[1] in _ROOM and growth(values) > _ROOM[name.rsplit(" ", 1)[1]]
    }


def _keep(what: str, series: Series, **more: object) -> None:
    print(f"  {what}: " + ", ".join(f"{name} {v[0]:.0f} to {v[-1]:.0f}" for name, v in series.items()))
    if results := os.environ.get("VERL_SLURM_SOAK_RESULTS"):
        path = Path(results)
        kept = json.loads(path.read_text()) if path.exists() else {}
        kept[what] = {**more, "load": round(os.getloadavg()[2], 1), "series": series}
        path.write_text(json.dumps(kept, indent=1) + "\n")


@pytest.mark.scenario("L01")
def test_hundreds_of_preemptions_in_a_row_lose_nothing_and_leave_nothing_behind(
    run: LiveRun, cluster: DevCluster, tmp_path: Path
) -> None:
    steps = _N + 4  # a life is preempted within its first step
    run.argv.append(f"train.steps={steps}")
    run.submit()
    series: Series = defaultdict(list)
    began = time.monotonic()
    run.wait_event("training", timeout_s=_PATIENCE_S)
    for number in range(1, _N + 1):
        _sample(run, series)
        seen = len(run.events())
        preempt(cluster, int(run.job_id), hold_s=1)
        saved = run.wait_event("saved", after=seen, emergency=True, timeout_s=_PATIENCE_S)
        run.wait_event("verified", after=seen, name=saved["name"], timeout_s=_PATIENCE_S)
        run.wait_event("ended", after=seen, exit_code=25, timeout_s=_PATIENCE_S)
        # Slurm lets a requeued job wait until its credentials have expired: a person would wait, a soak need not.
        run.slurm("scontrol", "update", f"jobid={run.job_id}", "StartTime=now", check=False)
        run.wait_event("restart", after=seen, resume=saved["name"], timeout_s=_PATIENCE_S)
        run.wait_event("training", after=seen, timeout_s=_PATIENCE_S)
        print(f"  {number:3} {saved['name']} {time.monotonic() - began:6.0f} s", flush=True)
    assert run.facts().restarts == _N, "each preemption is one restart"
    minutes = (time.monotonic() - began) / 60
    run.wait_end(timeout_s=_PATIENCE_S)
    assert ledger_stats(run.paths).duplicates == ()
    twin = LiveRun(cluster, tmp_path / "twin", *_LONG, f"train.steps={steps}").submit()
    try:
        twin.wait_end(timeout_s=_PATIENCE_S)
    finally:
        twin.cancel()
    same, said = same_weights(run.paths.root, twin.paths.root)
    _keep("preemptions", series, count=_N, minutes=round(minutes, 1), steps=steps, same_weights=same)
    assert same, said
    assert not _grown(series)


def test_hundreds_of_saves_and_crashes_under_one_lead_leave_it_as_it_was(run: LiveRun) -> None:
    run.argv.append("train.steps=1000000")
    run.submit()
    run.wait_event("training", timeout_s=_PATIENCE_S)
    saves: Series = defaultdict(list)
    for _ in range(_N):
        _sample(run, saves)
        seen = len(run.events())
        run.slurm("scancel", "-b", "-s", "USR1", run.job_id)
        saved = run.wait_event("saved", after=seen, emergency=True, timeout_s=_PATIENCE_S)
        run.wait_event("verified", after=seen, name=saved["name"], timeout_s=_PATIENCE_S)
    crashes: Series = defaultdict(list)
    for number in range(_N):
        _sample(run, crashes)
        seen = len(run.events())
        ranks: list[psutil.Process] = run.ranks()
        run.kill([ranks[number % len(ranks)]])
        run.wait_event("crash", after=seen, timeout_s=_PATIENCE_S)
        run.wait_event("training", after=seen, timeout_s=_PATIENCE_S)
    _keep("saves", saves, count=_N)
    _keep("crashes", crashes, count=_N)
    assert run.facts().restarts == 0
    assert not _grown(saves)
    assert not _grown(crashes)
