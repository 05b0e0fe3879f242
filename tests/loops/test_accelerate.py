"""accelerate's FSDP2 in guests, two ranks on CPUs: under the Hugging Face Trainer, and in a loop of the user's own."""

from pathlib import Path

import pytest

from tests.loops.frames_kit import Run, two_ranks
from verl_slurm.checkpoint.store.verify import verify

pytest.importorskip("accelerate", reason="NOT RUN: accelerate is not installed (pip install '.[dev]')")
pytestmark = [pytest.mark.torch, pytest.mark.long]

WORKER = Path(__file__).with_name("fsdp_worker.py")


@pytest.mark.variant
def test_a_sharded_trainer_that_was_stopped_ends_bit_for_bit_alike(tmp_path: Path) -> None:
    Run(tmp_path / "straight"), Run(tmp_path / "stopped")
    two_ranks(WORKER, str(tmp_path), "huggingface")
    verdict = verify(tmp_path / "stopped/checkpoints/step_000003")
    assert verdict.ok
    assert verdict.manifest is not None
    files = {entry.path for entry in verdict.manifest.files}
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        expected = {f"guest/{part}/{name}" for name in (".metadata", "__0_0.distcp", "__1_0.distcp")}
        assert expected <= files


def test_a_sharded_loop_that_was_killed_ends_bit_for_bit_alike(tmp_path: Path) -> None:
    two_ranks(WORKER, str(tmp_path), "loop")
    names = sorted(path.name for path in (tmp_path / "stopped/checkpoints").iterdir())
    assert names[-1] == "step_000009"
    assert (tmp_path / "stopped/checkpoints" / names[-1] / "guest/rank_0001.bin").exists()
