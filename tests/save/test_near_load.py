"""Tensors are read from the node's own disk where it has them, and held to the manifest of shared storage."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.world import World
from tests.save.parts import Parts, load_tensors
from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.checkpoint.store.chunks import Reading, read_checked
from verl_slurm.save.ranks import loader
from verl_slurm.save.ranks.collective import Collective, RanksFailed

pytestmark = pytest.mark.torch

NAME = "step_000002"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    tmp_path.chmod(0o700)
    with World.at(tmp_path / "w", two_media=True) as found:
        found.begin(2).result(60)
        yield found


def _loaded(world: World) -> str:
    found = Parts(seed=9)
    shared = world.paths.checkpoints / NAME
    load_tensors(shared, found.tensors(), Collective(None), near=world.local / NAME)
    return found.digest()


def _tensors(place: Path) -> list[Path]:
    found = sorted(path for path in (place / NAME).glob("*/*") if path.suffix not in (".json", ".py"))
    assert found, "there are files of tensors"
    return found


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_the_nodes_own_copy_is_read_and_shared_storage_is_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, int] = {}

    def read(root: int, readings: Sequence[Reading], **more: Any) -> int:
        asked[os.readlink(f"/proc/self/fd/{root}")] = len(readings)
        return read_checked(root, readings, **more)

    monkeypatch.setattr(loader, "read_checked", read)
    _loaded(world)
    assert asked.pop(str(world.local / NAME)) > 0
    assert set(asked.values()) == {0}


@pytest.mark.parametrize("damage", ["flipped", "short", "gone", "a directory", "no copy"])
def test_what_is_wrong_with_the_nodes_copy_is_read_from_shared_storage(world: World, damage: str) -> None:
    whole = _loaded(world)
    for path in _tensors(world.local):
        if damage == "flipped":
            _flip(path)
        elif damage == "short":
            path.write_bytes(path.read_bytes()[:-1])
        else:
            path.unlink()
            if damage == "a directory":
                path.mkdir()
    if damage == "no copy":
        (world.local / NAME).rename(world.local / "elsewhere")
    assert _loaded(world) == whole


def test_what_is_wrong_in_both_places_is_refused(world: World) -> None:
    for path in (*_tensors(world.local), *_tensors(world.paths.checkpoints)):
        _flip(path)
    with pytest.raises((RanksFailed, CheckpointCorrupt), match="changed after it was verified"):
        _loaded(world)
