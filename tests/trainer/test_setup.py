"""What rank 0 does with the models that do not train before anything else begins."""

from pathlib import Path

from tests.fakes.daemon import Daemon
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import RunConfig
from verl_slurm.dataset.fingerprint.record import Fingerprint, fingerprint
from verl_slurm.loops.session import Session
from verl_slurm.trainer import setup
from verl_slurm.trainer.state.orchestration import describe, moved
from verl_slurm.wire.messages import Notice


def test_a_start_finds_a_frozen_copy_that_rotted_tells_the_daemon_and_makes_a_new_one(tmp_path: Path) -> None:
    paths, model, line = RunPaths(tmp_path / "run"), tmp_path / "model", Daemon()
    model.mkdir()
    (model / "config.json").write_bytes(b"{}")
    seen, session = fingerprint(model), Session(line, rank=0, world_size=1)
    setup._store(paths, {model: seen}, session)
    assert line.told == []
    (paths.frozen / seen.digest / "config.json").write_bytes(b"[]")
    setup._store(paths, {model: seen}, session)
    (notice,) = line.told
    assert isinstance(notice, Notice)
    assert (notice.topic, notice.loud) == ("frozen", True)
    assert "it is stored anew" in notice.text
    assert (paths.frozen / seen.digest / "config.json").read_bytes() == b"{}"


def test_a_run_that_goes_on_on_another_kind_of_device_says_so(tmp_path: Path) -> None:
    """`device: auto`, and a node whose GPU is gone."""
    config = RunConfig()
    first = describe(config, tmp_path, Fingerprint(digest="d", files={}), "gloo, nccl")
    assert moved(first, "gloo, nccl") == ""
    assert moved(first, "gloo").startswith("goes on with gloo, and began with gloo, nccl")
