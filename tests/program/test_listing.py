"""Which files of a tree are the user's code."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.program.repos import git, new_repo
from verl_slurm.base.errors import ConfigError
from verl_slurm.program import listing
from verl_slurm.program.git import commit_of, diff_of
from verl_slurm.program.listing import Listing, list_tree

pytestmark = pytest.mark.slow  # git


def listed(root: Path, **options: Any) -> Listing:
    return list_tree(root, **{"max_mb": 1, **options})


def test_of_a_work_tree_git_says_what_belongs_to_it(tmp_path: Path) -> None:
    repo = new_repo(tmp_path / "repo", train="", parts__loop="", gone="")
    (repo / ".gitignore").write_text("build\n*.bin\n")
    (repo / "new.py").write_text("")
    (repo / "weights.bin").write_text("")
    (repo / "gone.py").unlink()
    assert listed(repo).names == [".gitignore", "new.py", "parts/loop.py", "train.py"]
    assert listed(repo).of_git
    (repo / "build").mkdir()
    (repo / "build/ext.so").write_text("")
    assert "build/ext.so" in listed(repo, include=["build/*.so"]).names


def test_submodules_and_repositories_inside_are_listed_too(tmp_path: Path) -> None:
    inner = new_repo(tmp_path / "inner", recipe="")
    repo = new_repo(tmp_path / "repo", train="")
    git(repo, "submodule", "add", "-q", str(inner), "sub")
    new_repo(repo / "beside", other="")
    (repo / "empty").mkdir()
    assert listed(repo).names == [".gitmodules", "beside/other.py", "sub/recipe.py", "train.py"]


def test_a_directory_without_git_is_taken_without_hidden_names(tmp_path: Path) -> None:
    for name in (
        "train.py",
        "parts/loop.py",
        ".cache/x.py",
        ".env",
        "__pycache__/train.pyc",
        "parts/old.pyc",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert listed(tmp_path).names == ["parts/loop.py", "train.py"]
    assert not listed(tmp_path).of_git


@pytest.mark.parametrize("of_git", [True, False])
def test_runs_environments_and_what_the_user_excludes_are_left_out(tmp_path: Path, of_git: bool) -> None:
    root = tmp_path / "repo"
    root.mkdir()
    for name in (
        "venv/pyvenv.cfg",
        "venv/lib/x.py",
        "conda/conda-meta/y",
        "runs/a/run.yaml",
        "runs/a/control/z",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    for name in ("train.py", "notes.ipynb", "assets/deep/logo.py", "data/rows.py", "runs/README.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    if of_git:
        git(root, "init", "-q")
    found = listed(root, exclude=["*.ipynb", "assets"], left_out=[root / "data"])
    assert found.names == ["runs/README.py", "train.py"]


def test_files_with_the_name_of_a_secret_are_left_out_and_said(tmp_path: Path) -> None:
    repo = new_repo(tmp_path / "repo", train="")
    for name in (".env", "id_ed25519", "cloud.pem"):
        (repo / name).write_text("sesame")
    git(repo, "add", ".")
    found = listed(repo)
    assert found.names == ["train.py"]
    assert found.notes == [
        "left out of the copy of the code, since its name is of a secret: .env, cloud.pem, id_ed25519"
    ]
    assert diff_of(repo, found.names) == b""


def test_links_are_not_followed_and_pipes_are_no_code(tmp_path: Path) -> None:
    root, outside = tmp_path / "code", tmp_path / "outside"
    outside.mkdir()
    (outside / "big.py").write_text("")
    root.mkdir()
    (root / "train.py").write_text("")
    (root / "there").symlink_to(outside)
    (root / "same.py").symlink_to("train.py")
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as place:
        place.bind(str(root / "socket"))
    found = listed(root)
    assert found.names == ["same.py", "there", "train.py"]
    assert found.notes == [
        "left out of the copy of the code, since it is no file: pipe, socket",
        "not in the copy of the code: it is behind a link that leads out of the tree: there",
    ]


def test_a_tree_that_is_too_large_is_refused_with_its_largest_files(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with open(tmp_path / "rows.bin", "wb") as file:
        file.truncate(3_000_000)
    with pytest.raises(ConfigError, match=r"3 MB; the largest: rows\.bin 3\.0 MB"):
        listed(tmp_path)
    assert listed(tmp_path, max_mb=4).num_bytes == 3_000_000


@pytest.mark.parametrize("of_git", [True, False])
def test_a_tree_with_too_many_files_is_refused_with_the_directory_that_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_git: bool
) -> None:
    monkeypatch.setattr(listing, "MOST_FILES", 3)
    (tmp_path / "code/rows").mkdir(parents=True)
    for name in ("train.py", "rows/1", "rows/2", "rows/3"):
        (tmp_path / "code" / name).touch()
    if of_git:
        git(tmp_path / "code", "init", "-q")
    with pytest.raises(ConfigError, match=r"found 4, of which 3 in rows, expected at most 3"):
        listed(tmp_path / "code")


@pytest.mark.parametrize("place", ["/", "/tmp", "home", "above"])
def test_a_home_directory_or_one_above_it_is_never_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    git(home, "init", "-q")
    root = {"home": home, "above": tmp_path}.get(place, Path(place))
    with pytest.raises(ConfigError, match="not copied from a directory that holds other things"):
        listed(root)


def test_no_program_that_a_repository_names_is_run(tmp_path: Path) -> None:
    repo = new_repo(tmp_path / "repo", train="one\n")
    trap = tmp_path / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/sprung\n")
    trap.chmod(0o755)
    for key in ("core.fsmonitor", "diff.external", "diff.mine.textconv", "diff.mine.command"):
        git(repo, "config", key, str(trap))
    (repo / ".gitattributes").write_text("*.py diff=mine\n")
    (repo / "train.py").write_text("two\n")
    names = listed(repo).names
    assert commit_of(repo).dirty
    diff = diff_of(repo, names)
    assert diff is not None
    assert b"-one\n+two\n" in diff
    assert not (tmp_path / "sprung").exists()


def test_a_work_tree_that_git_does_not_open_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/.git").write_text("gitdir: /nowhere\n")
    with pytest.raises(ConfigError, match="git does not tell which files the code has.*code.tree"):
        listed(tmp_path / "code")


def test_a_glob_that_finds_nothing_or_leads_out_is_refused(tmp_path: Path) -> None:
    for pattern in ("build/*.so", "../*", "/etc/*"):
        with pytest.raises(ConfigError, match="code.include"):
            listed(tmp_path, include=[pattern])
