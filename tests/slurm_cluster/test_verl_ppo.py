"""GRPO by the package verl itself, on Ray over two nodes of a real Slurm: preempted, saved, requeued, resumed, finished."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs verl: make verl")

from tests.harness import ROOT, LiveRun, wait_until_gone
from tests.verl.grpo import MODULES, grpo_words, make_prompts, write_config
from tests.verl.tiny import make_model
from verl_slurm.checkpoint.verify import read_manifest
from verl_slurm.devcluster.cluster import DevCluster
from verl_slurm.devcluster.faults import preempt

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.verl, pytest.mark.timeout(900)]

PATIENCE_S = 400.0


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("inputs")
    return make_model(directory / "model"), make_prompts(directory / "sums.parquet")


@pytest.fixture
def grpo(
    cluster: DevCluster, inputs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LiveRun]:
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", MODULES)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'daemon'}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, prompts = inputs
    config = write_config(tmp_path / "grpo.yaml", tmp_path / "run", grpo_words(model, prompts, 4))
    live = LiveRun(cluster, tmp_path / "run", config=str(config))
    yield live
    live.cancel()


def test_a_preemption_in_mid_step_is_saved_at_its_end_requeued_resumed_and_finished(
    grpo: LiveRun, cluster: DevCluster
) -> None:
    grpo.submit()
    grpo.wait(lambda: grpo.status().get("step", 0) >= 1, PATIENCE_S)
    seen = len(grpo.events())
    preempt(cluster, int(grpo.job_id), hold_s=1)
    cause = grpo.wait_event("cause", after=seen)
    assert cause["cause"] == "preemption", grpo.story()
    saved = grpo.wait_event("saved", after=seen, emergency=True)
    grpo.wait_event("verified", after=seen, name=saved["name"])
    grpo.wait_event("ended", after=seen, exit_code=25)
    step = read_manifest(grpo.paths.checkpoints / saved["name"]).step
    assert (grpo.paths.checkpoints / saved["name"] / f"global_step_{step}" / "actor").is_dir()
    grpo.wait_event("generation", after=seen, timeout_s=PATIENCE_S, resume=saved["name"])
    grpo.wait_end(timeout_s=PATIENCE_S)
    assert grpo.status()["step"] == 4
    wait_until_gone(str(grpo.paths.root))
