"""Frozen models are stored once, whole or not at all."""

import shutil
from pathlib import Path

import pytest

from verl_slurm.checkpoint import frozen
from verl_slurm.checkpoint.fingerprint import fingerprint
from verl_slurm.checkpoint.frozen import store_frozen
from verl_slurm.errors import DataError
from verl_slurm.paths import RunPaths


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "abc").write_bytes(b"weights")
    (tmp_path / "model" / "sub").mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "sub" / "w.safetensors").symlink_to(tmp_path / "blobs" / "abc")
    return tmp_path / "model"


def test_a_model_is_stored_by_its_digest_and_once(model: Path, tmp_path: Path) -> None:
    paths, seen = RunPaths(tmp_path / "run"), fingerprint(model)
    stored = store_frozen(paths, model, seen)
    assert stored == paths.frozen / seen.digest
    assert (stored / "sub" / "w.safetensors").read_bytes() == b"weights"
    assert not (stored / "sub" / "w.safetensors").is_symlink()
    assert (stored / "config.json").stat().st_mode & 0o777 == 0o600
    shutil.rmtree(model)
    assert store_frozen(paths, model, seen) == stored, "nothing is read again"


def test_a_model_that_changes_while_it_is_copied_is_not_stored(model: Path, tmp_path: Path) -> None:
    paths, seen = RunPaths(tmp_path / "run"), fingerprint(model)
    (model / "config.json").write_text("{ }")
    with pytest.raises(DataError, match="is not what was read"):
        store_frozen(paths, model, seen)
    assert list(paths.frozen.iterdir()) == []


def test_a_full_disk_leaves_nothing_and_what_a_dead_start_left_goes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, seen = RunPaths(tmp_path / "run"), fingerprint(model)
    (paths.frozen / ".abc.0123.tmp").mkdir(parents=True)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(frozen, "fsync_path", full)
    with pytest.raises(OSError, match="No space"):
        store_frozen(paths, model, seen)
    assert list(paths.frozen.iterdir()) == []
