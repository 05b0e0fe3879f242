"""Frozen models are stored once, whole or not at all."""

import os
import queue
import shutil
import threading
from pathlib import Path

import pytest

from verl_slurm.base.errors import Fenced
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store import frozen
from verl_slurm.checkpoint.store.frozen import FrozenCopies, check_frozen, frozen_digests, store_frozen
from verl_slurm.checkpoint.store.scrub import scrub_frozen
from verl_slurm.dataset.fingerprint import stored_tree
from verl_slurm.dataset.fingerprint.data_record import fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "abc").write_bytes(b"weights")
    (tmp_path / "model" / "sub").mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "sub" / "w.safetensors").symlink_to(tmp_path / "blobs" / "abc")
    (tmp_path / "model" / "empty").mkdir()
    return tmp_path / "model"


def test_a_model_is_stored_by_its_digest_and_once(model: Path, tmp_path: Path) -> None:
    paths, seen = RunPaths(private_dir(tmp_path / "run")), fingerprint(model)
    stored = store_frozen(paths, model, seen)
    assert stored == paths.frozen / seen.digest
    assert (stored / "sub" / "w.safetensors").read_bytes() == b"weights"
    assert not (stored / "sub" / "w.safetensors").is_symlink()
    assert (stored / "config.json").stat().st_mode & 0o777 == 0o600
    shutil.rmtree(model)
    assert store_frozen(paths, model, seen) == stored, "the source is not read again"


def rot(stored: Path) -> None:
    """One bit; size and times as before."""
    file = stored / "sub" / "w.safetensors"
    before = file.stat()
    file.write_bytes(b"weighus")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_copy_that_rotted_is_set_aside_loudly_and_stored_anew(model: Path, tmp_path: Path) -> None:
    paths, seen, said = RunPaths(private_dir(tmp_path / "run")), fingerprint(model), list[str]()
    stored = store_frozen(paths, model, seen, notice=said.append)
    rot(stored)
    assert store_frozen(paths, model, seen, notice=said.append) == stored
    assert (stored / "sub" / "w.safetensors").read_bytes() == b"weights"
    assert len(said) == 1
    assert "sub/w.safetensors: sha256" in said[0]
    (aside,) = (paths.frozen / "quarantine").glob(f"{seen.digest}.*[0-9a-f]")
    assert (aside / "sub" / "w.safetensors").read_bytes() == b"weighus"
    assert store_frozen(paths, model, seen, notice=said.append) == stored
    assert len(said) == 1


@pytest.mark.parametrize("harm", ["missing", "extra", "longer", "link"])
def test_a_copy_is_exactly_the_model_or_damaged(model: Path, tmp_path: Path, harm: str) -> None:
    paths, seen = RunPaths(private_dir(tmp_path / "run")), fingerprint(model)
    file = store_frozen(paths, model, seen) / "config.json"
    if harm == "missing":
        file.unlink()
    elif harm == "extra":
        (file.parent / "sub" / "more.json").write_bytes(b"")
    elif harm == "longer":
        file.write_bytes(b"{}\n")
    else:
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    verdict = check_frozen(paths, seen.digest)
    assert verdict.damaged
    assert scrub_frozen(paths, seen.digest, set_aside=True).set_aside is not None
    assert frozen_digests(paths) == []


def test_a_copy_that_cannot_be_read_now_is_said_and_left(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, seen, said = RunPaths(private_dir(tmp_path / "run")), fingerprint(model), list[str]()
    stored = store_frozen(paths, model, seen)

    def failing(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fadvise", failing)
        assert store_frozen(paths, model, seen, notice=said.append) == stored
    assert "Input/output error" in said[0]
    assert stored.is_dir()


def test_without_its_record_a_copy_is_not_judged_and_the_next_start_records_it_anew(
    model: Path, tmp_path: Path
) -> None:
    paths, seen = RunPaths(private_dir(tmp_path / "run")), fingerprint(model)
    store_frozen(paths, model, seen)
    record = paths.frozen / f"{seen.digest}.json"
    for harm in (
        record.unlink,
        lambda: record.write_bytes(record.read_bytes().replace(b"config", b"konfig")),
    ):
        harm()
        verdict = check_frozen(paths, seen.digest)
        assert (verdict.ok, verdict.damaged) == (False, False)
        store_frozen(paths, model, seen)
        assert check_frozen(paths, seen.digest).ok


def test_the_copy_of_a_model_that_is_no_longer_there_is_read_back_too(model: Path, tmp_path: Path) -> None:
    paths, seen, said = RunPaths(private_dir(tmp_path / "run")), fingerprint(model), list[str]()
    rot(store_frozen(paths, model, seen))
    copies = FrozenCopies(paths, said.append)
    copies.read_back({seen.digest})
    assert said == []
    copies.read_back({"0" * 64})
    assert "the model it was made of is not what the run starts with now" in said[0]
    assert frozen_digests(paths) == []


def test_a_full_disk_leaves_nothing_and_what_a_dead_start_left_goes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, seen = RunPaths(private_dir(tmp_path / "run")), fingerprint(model)
    (paths.frozen / ".abc.0123.tmp").mkdir(parents=True)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stored_tree, "fsync_path", full)
    with pytest.raises(OSError, match="No space"):
        store_frozen(paths, model, seen)
    assert list(paths.frozen.iterdir()) == []


def test_a_model_that_changes_while_it_is_copied_is_not_stored(model: Path, tmp_path: Path) -> None:
    paths, seen = RunPaths(private_dir(tmp_path / "run")), fingerprint(model)
    (model / "config.json").write_text("{ }")
    with pytest.raises(Fenced, match="has changed while it was copied"):
        store_frozen(paths, model, seen)
    assert list(paths.frozen.iterdir()) == []


def test_a_large_copy_is_read_back_once_the_training_begins(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the disk and the cores are the start's."""
    monkeypatch.setattr(frozen, "_READ_AT_ONCE", 0)
    paths, said = RunPaths(private_dir(tmp_path / "run")), queue.SimpleQueue[str]()
    rot(store_frozen(paths, model, fingerprint(model)))
    copies = FrozenCopies(paths, said.put)
    copies.read_back(set())
    assert not [one for one in threading.enumerate() if one.name == "frozen"]
    assert said.empty()
    copies.begin()
    assert "set aside" in said.get(timeout=60)
    copies.read_back(set())  # the training goes on, and this begins at once
    for one in threading.enumerate():
        if one.name == "frozen":
            one.join(60)
    assert frozen_digests(paths) == []
