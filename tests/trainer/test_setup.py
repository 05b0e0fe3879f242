"""What rank 0 does with the models that do not train before anything else begins."""

import threading
from pathlib import Path

import pytest

from tests.fakes.daemon import Daemon
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import RunConfig
from verl_slurm.dataset.fingerprint.data_record import Fingerprint, fingerprint
from verl_slurm.loops.session import Session
from verl_slurm.trainer.state import frozen_copies
from verl_slurm.trainer.state.frozen_copies import FrozenCopies
from verl_slurm.trainer.state.orchestration import describe, moved
from verl_slurm.wire.messages import RankNotice


def test_a_start_finds_a_frozen_copy_that_rotted_tells_the_daemon_and_makes_a_new_one(tmp_path: Path) -> None:
    paths, model, line = RunPaths(tmp_path / "run"), tmp_path / "model", Daemon()
    model.mkdir()
    (model / "config.json").write_bytes(b"{}")
    seen, copies = fingerprint(model), FrozenCopies(paths, Session(line, rank=0, world_size=1))
    copies.store({model: seen})
    assert line.told == []
    (paths.frozen / seen.digest / "config.json").write_bytes(b"[]")
    copies.store({model: seen})
    (notice,) = line.told
    assert isinstance(notice, RankNotice)
    assert (notice.topic, notice.loud) == ("frozen", True)
    assert "it is stored anew" in notice.text
    assert (paths.frozen / seen.digest / "config.json").read_bytes() == b"{}"


def test_a_large_copy_is_read_back_once_the_training_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the disk and the cores are the start's."""
    paths, read = RunPaths(tmp_path / "run"), threading.Event()
    monkeypatch.setattr(frozen_copies, "_READ_AT_ONCE", 0)
    monkeypatch.setattr(frozen_copies, "read_back_others", lambda *_, **__: read.set())
    paths.frozen.mkdir(parents=True)
    (paths.frozen / "a").write_bytes(b"1")
    copies = FrozenCopies(paths, Session(Daemon(), rank=0, world_size=1))
    copies.read_back(set())
    assert not [one for one in threading.enumerate() if one.name == "frozen"]
    assert not read.is_set()
    copies.begin()
    assert read.wait(60)
    read.clear()
    copies.read_back(set())  # a reward that was replaced in flight
    assert read.wait(60)


def test_a_run_that_goes_on_on_another_kind_of_device_says_so(tmp_path: Path) -> None:
    """`device: auto`, and a node whose GPU is gone."""
    config = RunConfig()
    first = describe(config, tmp_path, Fingerprint(digest="d", files={}), "gloo, nccl")
    assert moved(first, "gloo, nccl") == ""
    assert moved(first, "gloo").startswith("goes on with gloo, and began with gloo, nccl")
