"""A program that drives Ray and has nothing to do with verl, on two nodes of a real Slurm: preempted and resumed."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray comes with verl: make verl")

from tests.harness import ROOT, LiveRun
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import preempt

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.verl, pytest.mark.timeout(1500)]

PATIENCE_S = 400.0
STEPS, COUNT = 300, 50_000


@pytest.fixture
def run(cluster: DevCluster, tmp_path: Path) -> Iterator[LiveRun]:
    live = LiveRun(cluster, tmp_path / "run", config="configs/ray_program.yaml")
    command = json.dumps([str(ROOT / "configs/ray_program.py"), "--steps", str(STEPS), "--count", str(COUNT)])
    live.argv += [f"trainer.command={command}", "daemon.requeue_delay_s=2", "checkpoint.every_steps=50"]
    yield live
    live.cancel()


def pi_after(steps: int) -> float:
    inside = 0
    for seed in range(2 * steps):
        draw = random.Random(seed)
        inside += sum(draw.random() ** 2 + draw.random() ** 2 < 1 for _ in range(COUNT))
    return 4 * inside / (2 * steps * COUNT)


@pytest.mark.variant
def test_a_preempted_program_is_saved_resumed_and_ends_with_the_undisturbed_result(
    run: LiveRun, cluster: DevCluster
) -> None:
    run.submit()
    run.wait(lambda: run.status().get("step", 0) >= 5, PATIENCE_S)
    seen = len(run.events())
    preempt(cluster, int(run.job_id), hold_s=1)
    saved = run.wait_event("saved", after=seen, emergency=True)
    run.wait_event("ended", after=seen, exit_code=25)
    run.wait_event("restart", after=seen, timeout_s=PATIENCE_S, resume=saved["name"])
    run.wait_end(timeout_s=PATIENCE_S)
    rows = [json.loads(line) for line in run.paths.steps.read_bytes().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "each step once"
    assert rows[-1]["pi"] == pytest.approx(pi_after(STEPS), abs=1e-12)
    assert {row["attempt"] for row in rows} == {1, 2}
