"""A tree in which others work."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from verl_slurm.base import tree
from verl_slurm.base.bounded import TooMuch
from verl_slurm.base.tree import list_tree, open_directory


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


def listed(root: Path, **options: Any) -> dict[str, str]:
    with open_directory(root) as fd:
        found = list_tree(fd, **options)
    assert [entry.path for entry in found] == sorted(entry.path for entry in found)
    return {entry.path: entry.kind + (", followed" if entry.followed else "") for entry in found}


@pytest.mark.parametrize("numbers", [True, False])
@pytest.mark.parametrize("follow", [True, False])
def test_each_kind_of_entry_is_told_and_links_are_followed_where_it_is_asked(
    tmp_path: Path, follow: bool, numbers: bool
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "part").mkdir(parents=True)
    outside.mkdir()
    (root / "part/a\nb").touch()
    (root / os.fsdecode(b"\xff")).touch()
    (outside / "c").touch()
    os.mkfifo(root / "pipe")
    for name, target in (
        ("there", outside),
        ("file", "part/a\nb"),
        ("nowhere", "gone"),
        ("itself", "itself"),
    ):
        (root / name).symlink_to(target)
    plain = {"part": "directory", "part/a\nb": "file", os.fsdecode(b"\xff"): "file", "pipe": "special file"}
    links = {"there": "link", "file": "link", "nowhere": "link", "itself": "link"}
    if follow:
        links |= {"there": "directory, followed", "there/c": "file", "file": "file, followed"}
    assert listed(root, follow=follow, numbers=numbers) == plain | links


def test_a_tree_that_is_entered_from_within_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/up").symlink_to(tmp_path / "a")
    assert listed(tmp_path)["a/b/up"] == "link"
    with pytest.raises(OSError, match="directory above") as refused:
        listed(tmp_path, follow=True)
    assert refused.value.filename == "a/b/up"


def test_what_a_filter_refuses_is_neither_listed_nor_entered(tmp_path: Path) -> None:
    for name in ("a/1", "b/2"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert listed(tmp_path, keep=lambda entry: entry.path != "a") == {"b": "directory", "b/2": "file"}


def test_directories_that_are_too_deep_are_named_and_not_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "DEEPEST", 1)
    (tmp_path / "a/b/c").mkdir(parents=True)
    assert listed(tmp_path) == {"a": "directory", "a/b": "directory"}
