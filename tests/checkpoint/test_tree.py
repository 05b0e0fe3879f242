"""A tree in which others work."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from verl_slurm.base.bounded import TooMuch
from verl_slurm.checkpoint.store.tree import list_tree, open_directory


@pytest.mark.scenario("C03")
@pytest.mark.parametrize("gone", ["a/2", "a", "b"])
def test_what_is_removed_while_we_walk_is_left_out_and_the_rest_is_there(
    tmp_path: Path, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/1", "a/2", "b/3", "c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    real = os.scandir

    @contextmanager
    def and_then(fd: int) -> Iterator[Any]:
        with real(fd) as names:
            seen = list(names)
        if {name.name for name in seen} >= set(gone.rpartition("/")[2]):  # listed, and not looked at yet
            path = tmp_path / gone
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield iter(seen)

    monkeypatch.setattr(os, "scandir", and_then)
    with open_directory(tmp_path) as root:
        found = {entry.path for entry in list_tree(root)}
    assert found == {"a", "a/1", "a/2", "b", "b/3", "c"} - {gone, *(f"{gone}/{n}" for n in "123")}


@pytest.mark.scenario("SEC05")
@pytest.mark.parametrize("deep", [False, True])
def test_a_tree_of_more_entries_than_asked_for_is_not_walked_to_its_end(
    tmp_path: Path, deep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        path = tmp_path / f"{number}/file" if deep else tmp_path / f"{number}"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    count = 60 if deep else 30
    with open_directory(tmp_path) as root:
        assert len(list_tree(root, count)) == count
        looked: list[str] = []
        real = os.scandir

        def noted(names: Any) -> Iterator[Any]:
            for name in names:
                looked.append(name.name)
                yield name

        @contextmanager
        def counting(fd: int) -> Iterator[Any]:
            with real(fd) as names:
                yield noted(names)

        monkeypatch.setattr(os, "scandir", counting)
        for most in (0, 20, count - 1):
            looked.clear()
            with pytest.raises(TooMuch, match=f"more than {most} files"):
                list_tree(root, most)
            assert len(looked) == most + 1
