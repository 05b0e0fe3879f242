"""What a start says about the one before it."""

from pathlib import Path

from verl_slurm.config.schema import RunConfig
from verl_slurm.dataset.fingerprint.data_record import Fingerprint
from verl_slurm.trainer.state.orchestration import describe, moved


def test_a_run_that_goes_on_on_another_kind_of_device_says_so(tmp_path: Path) -> None:
    """`device: auto`, and a node whose GPU is gone."""
    config = RunConfig()
    first = describe(config, tmp_path, Fingerprint(digest="d", files={}), "gloo, nccl")
    assert moved(first, "gloo, nccl") == ""
    assert moved(first, "gloo").startswith("goes on with gloo, and began with gloo, nccl")
