"""TRL's GRPOTrainer on a real Slurm, two ranks: preempted in the middle of a cycle of completions, and requeued."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="NOT RUN: TRL is not installed: make trl")

import torch
from safetensors.torch import load_file

from tests.harness import ROOT, LiveRun
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import preempt

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.trl, pytest.mark.timeout(900)]

STEPS, CYCLE = 30, 12  # configs/trl_grpo.py: six slices, used twice


@pytest.fixture
def made(cluster: DevCluster, tmp_path: Path) -> Iterator[list[LiveRun]]:
    """The run that is preempted, and its undisturbed twin; not yet submitted."""
    runs = []
    for name, pause in (("struck", 0.5), ("twin", 0.0)):
        samples = tmp_path / f"{name}-samples"
        samples.mkdir()
        program = [str(ROOT / "configs/trl_grpo.py"), "--steps", str(STEPS), "--pause", str(pause)]
        live = LiveRun(cluster, tmp_path / name, config="configs/trl_grpo.yaml")
        live.argv += [f"trainer.command={json.dumps([*program, '--samples', str(samples)])}"]
        live.argv += ["daemon.requeue_delay_s=2", "slurm.time_limit_min=20"]
        runs.append(live)
    yield runs
    for live in runs:
        live.cancel()


def sampled(directory: Path) -> dict[str, list[list[str]]]:
    """Prompt and completion of each sample, by rank, in the order in which they were scored."""
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(directory.glob("*.jsonl"))
    }


def weights(run: LiveRun) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(
        run.paths.checkpoints / f"step_{STEPS:06d}/guest/model.safetensors"
    )
    return found


def test_preempted_within_a_cycle_it_samples_nothing_twice_and_ends_like_its_twin(
    made: list[LiveRun], cluster: DevCluster, tmp_path: Path
) -> None:
    struck, twin = made
    struck.submit()
    struck.wait(lambda: struck.status().get("step", 0) > CYCLE)
    seen = len(struck.events())
    preempt(cluster, int(struck.job_id), hold_s=1)
    saved = struck.wait_event("saved", after=seen, emergency=True)
    struck.wait_event("ended", after=seen, exit_code=25)
    twin.submit()
    struck.wait_event("restart", after=seen, resume=saved["name"])
    step = read_manifest(struck.paths.checkpoints / saved["name"]).step
    assert CYCLE < step < 2 * CYCLE, "in the middle of the second cycle"
    for live in made:
        live.wait_end()

    expected = sampled(tmp_path / "twin-samples")
    assert {rank: len(samples) for rank, samples in expected.items()} == dict.fromkeys(
        ("rank_0.jsonl", "rank_1.jsonl"), 3 * 6 * 4
    )
    assert sampled(tmp_path / "struck-samples") == expected
    once, twice = weights(twin), weights(struck)
    assert once.keys() == twice.keys()
    assert all(torch.equal(once[name], twice[name]) for name in once)
