"""Encryption on two media and in partial saves: sealed once, signed everywhere, and the way home."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.save.parts import Parts, checkpoint_saver, contents, load_tensors
from verl_slurm.base.errors import KeyRefused
from verl_slurm.base.files import private_dir
from verl_slurm.base.keys import Keyring, new_key_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.local_copy import assemble, list_parts, part_problems, send_home
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.config.schema import EncryptionConfig
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.loader import read_whole
from verl_slurm.save.ranks.saver import LocalPlace, SavedCheckpoint

pytestmark = pytest.mark.torch


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    tmp_path.chmod(0o700)
    (tmp_path / "run").mkdir()
    return RunPaths(private_dir(tmp_path / "run"))


@pytest.fixture
def keys(tmp_path: Path, run: RunPaths) -> Keyring:
    return Keyring(new_key_file(tmp_path / "run.key"))


def save(
    run: RunPaths, parts: Parts, step: int = 2, *, key: bool = True, components: tuple[str, ...] = ()
) -> SavedCheckpoint:
    base = run.root.parent
    place = LocalPlace(directory=base / "nvme" / "n1", is_first=True, keep=2)
    encryption = EncryptionConfig(key_file=str(base / "run.key")) if key else None
    saver = checkpoint_saver(run.root, parts, local=place, encryption=encryption)
    try:
        return saver.begin(contents(step), components=components).result()  # type: ignore[arg-type]
    finally:
        saver.close()


def local(run: RunPaths) -> Path:
    return run.root.parent / "nvme" / "n1"


def content(directory: Path) -> dict[str, bytes]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def assert_loads(directory: Path, keys: Keyring, old: Parts) -> None:
    new = Parts(seed=9)
    load_tensors(directory, new.tensors(), Collective(None), keys)
    assert new.digest() == old.digest()


def test_both_media_have_the_same_sealed_bytes_and_the_same_signed_manifest(
    run: RunPaths, keys: Keyring
) -> None:
    parts = Parts(updates=2)
    done = save(run, parts)
    assert (done.on_shared, done.problem) == (True, "")
    shared = run.checkpoints / done.name
    (part,) = list_parts(local(run), keys)
    assert content(part.path) == content(shared)
    assert part_problems(part) == []  # needs no key
    for directory in (part.path, shared):
        assert verify(directory, keys=keys).ok
        assert_loads(directory, keys, parts)
    with pytest.raises(KeyRefused):
        load_tensors(part.path, parts.tensors(), Collective(None))


def test_with_shared_storage_gone_the_sealed_local_copy_comes_home_and_loads(
    run: RunPaths, keys: Keyring
) -> None:
    parts = Parts(updates=2)
    run.checkpoints.write_bytes(b"")
    done = save(run, parts)
    assert not done.on_shared
    run.checkpoints.unlink()
    (part,) = list_parts(local(run), keys)
    send_home(part, run)
    assert [good for _, good, _ in assemble(run, keys)] == [True]
    assert_loads(run.checkpoints / done.name, keys, parts)


def test_a_part_that_nobody_signed_does_not_come_home(run: RunPaths, keys: Keyring) -> None:
    done = save(run, Parts(), key=False)
    shutil.rmtree(run.checkpoints / done.name)
    (forged,) = list_parts(local(run))
    assert list_parts(local(run), keys) == []
    send_home(forged, run)  # by a node that somebody else has in hand
    ((verdict, good, _),) = assemble(run, keys)
    assert (verdict.needs_key, good) == (True, False)
    assert os.listdir(run.checkpoints) == ["latest"]


def test_a_partial_save_is_sealed_and_signed(run: RunPaths, keys: Keyring) -> None:
    parts = Parts(updates=1)
    done = save(run, parts, components=("actor",))
    directory = run.partial.checkpoints / done.name
    assert verify(directory, keys=keys).ok
    with pytest.raises(KeyRefused):
        read_whole(directory, "actor")
    there = read_whole(directory, "actor", keys=keys)
    for name, tensor in parts.tensors()["actor"].items():
        assert torch.equal(there[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
