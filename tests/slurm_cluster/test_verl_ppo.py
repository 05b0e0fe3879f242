"""GRPO by verl itself, on Ray over two nodes of a real Slurm: preempted, saved, requeued, resumed, finished."""

import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.processes import python_path

pytest.importorskip("verl", reason="needs verl: make verl")

from tests.harness import LiveRun
from tests.verl.grpo import MODULES, grpo_words, make_prompts, write_config
from tests.verl.tiny import make_model
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.devcluster.cluster import DevCluster
from verl_slurm.devcluster.faults import preempt

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.verl, pytest.mark.timeout(1500)]

PATIENCE_S = 400.0
"""For a start: Ray on two nodes, and a dozen processes that import torch and verl."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("inputs")
    return make_model(directory / "model"), make_prompts(directory / "sums.parquet")


@pytest.fixture
def grpo(
    cluster: DevCluster, inputs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LiveRun]:
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", MODULES)
    monkeypatch.setenv("PYTHONPATH", python_path()["PYTHONPATH"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, prompts = inputs
    config = write_config(tmp_path / "grpo.yaml", tmp_path / "run", grpo_words(model, prompts, 4))
    live = LiveRun(cluster, tmp_path / "run", config=str(config))
    yield live
    live.cancel()
    live.wait_slurm(lambda facts: facts.state not in ("RUNNING", "PENDING", "COMPLETING"))
    left = [process for process in psutil.process_iter() if _of_ray(process, live)]
    assert not left, left


def _of_ray(process: psutil.Process, run: LiveRun, word: str = "") -> bool:
    """Whether it is of this run's Ray, and is called so; Ray's workers rename themselves."""
    try:
        mine = process.environ().get("VERL_SLURM_RUN") == str(run.paths.root)
        called = (process.name(), *process.cmdline()[:1])
        return mine and process.status() != psutil.STATUS_ZOMBIE and any(word in name for name in called)
    except psutil.Error:
        return False


def _one(run: LiveRun, word: str, node: str | None = None) -> psutil.Process:
    """One of them, as soon as there is one; nobody tells that a process has begun."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for process in [p for p in psutil.process_iter() if _of_ray(p, run, word)]:
            if node in (None, process.environ().get("SLURMD_NODENAME")):
                return process
        time.sleep(0.2)
    raise AssertionError(f"no {word} on {node}:\n{run.story()}")


def _steps(run: LiveRun) -> list[int]:
    return [int(msgspec.json.decode(line)["step"]) for line in run.paths.steps.read_bytes().splitlines()]


@pytest.mark.parametrize("mode", ["sync", pytest.param("colocate_async", marks=pytest.mark.soak)])
def test_a_preemption_in_mid_step_is_saved_at_its_end_requeued_resumed_and_finished(
    grpo: LiveRun, cluster: DevCluster, mode: str
) -> None:
    grpo.argv.append(f"verl.trainer.v1.trainer_mode={mode}")
    grpo.submit()
    grpo.wait(lambda: grpo.status().get("step", 0) >= 1, PATIENCE_S)
    seen = len(grpo.events())
    preempt(cluster, int(grpo.job_id), hold_s=1)
    cause = grpo.wait_event("cause", after=seen)
    assert cause["cause"] == "preemption", grpo.story()
    saved = grpo.wait_event("saved", after=seen, emergency=True)
    grpo.wait_event("verified", after=seen, name=saved["name"])
    grpo.wait_event("ended", after=seen, exit_code=25)
    manifest = read_manifest(grpo.paths.checkpoints / saved["name"])
    assert manifest.guest == "verl"
    assert (grpo.paths.checkpoints / saved["name"] / f"global_step_{manifest.step}" / "actor").is_dir()
    grpo.wait_event("restart", after=seen, timeout_s=PATIENCE_S, resume=saved["name"])
    grpo.wait_end(timeout_s=PATIENCE_S)
    assert grpo.status()["step"] == 4
    assert _steps(grpo) == [1, 2, 3, 4], "each step once: none was trained twice, and none left out"


@pytest.mark.soak
def test_a_step_that_is_too_long_is_not_waited_for_and_the_last_verified_one_counts(
    grpo: LiveRun, cluster: DevCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_TEST_SAMPLE_S", "32")  # the grace time is 30 s
    grpo.argv.append("checkpoint.every_steps=1")
    grpo.submit()
    grpo.wait_event("verified", timeout_s=PATIENCE_S, name="step_000002")
    seen = len(grpo.events())
    preempt(cluster, int(grpo.job_id), hold_s=1)
    assert grpo.wait_event("cause", after=seen)["cause"] == "preemption", grpo.story()
    failed = grpo.wait_event("save_failed", after=seen)
    assert "the end of the step cannot be reached" in failed["reason"]
    ended = grpo.wait_event("ended", after=seen, exit_code=25)
    assert ended["time"] < _plus(grpo.events("cause")[-1]["time"], 15), (
        "nobody waited for the grace time's end"
    )
    grpo.wait_event("restart", after=seen, timeout_s=PATIENCE_S, resume="step_000002")


def test_a_dead_worker_and_a_dead_node_are_each_seen_and_restarted_in_place(grpo: LiveRun) -> None:
    grpo.argv += ["checkpoint.every_steps=1", "verl.trainer.total_training_steps=100"]
    grpo.submit()
    verified = grpo.wait_event("verified", timeout_s=PATIENCE_S)
    seen = len(grpo.events())
    _one(grpo, "WorkerDict").kill()  # a training rank
    crash = grpo.wait_event("crash", after=seen, timeout_s=PATIENCE_S, kind="crash")
    assert "ActorDiedError" in crash["detail"]
    resumed = grpo.wait_event("restart", after=seen, number=2)
    assert resumed["resume"] >= verified["name"]
    (other,) = {"node1", "node2"} - {grpo.facts().batch_host}
    seen = len(grpo.events())
    _one(grpo, "raylet", other).kill()
    crash = grpo.wait_event("crash", after=seen, timeout_s=PATIENCE_S, kind="crash")
    assert "Ray has ended on this node" in crash["detail"]
    grpo.wait_event("restart", after=seen, number=3)
    assert grpo.facts().restarts == 0


@pytest.mark.soak
def test_a_driver_that_hangs_is_seen_by_its_pace(grpo: LiveRun) -> None:
    patience = ["daemon.hang_floor_s=15", "daemon.hang_factor=2"]
    grpo.argv += [*patience, "checkpoint.every_steps=50", "verl.trainer.total_training_steps=100"]
    grpo.submit()
    grpo.wait(lambda: grpo.status().get("step", 0) >= 2, PATIENCE_S)
    _one(grpo, "TaskRunner").suspend()
    hung = grpo.wait_event("hang", timeout_s=PATIENCE_S)
    assert "rank 0 has passed no safe point" in hung["detail"]
    grpo.wait_event("restart", timeout_s=PATIENCE_S, number=2)


def _plus(time: str, seconds: float) -> str:
    return (datetime.fromisoformat(time) + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")
