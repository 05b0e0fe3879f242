"""The copy of a tree in the run's directory, and what is found when it is read back."""

import errno
import os
import stat
from pathlib import Path

import pytest

from verl_slurm.base.errors import ConfigError, DataError, Fenced
from verl_slurm.base.paths import RunPaths
from verl_slurm.dataset.fingerprint import entries
from verl_slurm.dataset.fingerprint.entries import FileDigest, render, sealed
from verl_slurm.program.code_record import files_of
from verl_slurm.program.copying import check_copy, copy_tree, read_tree

NAMES = ["data", "link", "parts/loop.py", "run.sh", "train.py"]


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    (tmp_path / "run").mkdir(mode=0o700)
    return RunPaths(tmp_path / "run")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "code"
    (root / "parts").mkdir(parents=True)
    (root / "train.py").write_text("from parts import loop\n")
    (root / "parts/loop.py").write_text("steps = 3\n")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to(root / "train.py")  # absolute, and inside
    (root / "data").symlink_to("../data")
    return root


def copied(paths: RunPaths, root: Path) -> str:
    return copy_tree(paths, root, read_tree(root, NAMES))


def test_a_copy_is_private_read_only_and_has_the_same_content(paths: RunPaths, root: Path) -> None:
    digest = copied(paths, root)
    copy = paths.code_tree(digest)
    modes = {str(path.relative_to(copy)): stat.S_IMODE(path.lstat().st_mode) for path in copy.rglob("*")}
    assert {name: oct(mode) for name, mode in modes.items() if name not in ("link", "data")} == {
        "parts": "0o700",
        "parts/loop.py": "0o400",
        "run.sh": "0o500",
        "train.py": "0o400",
    }
    assert (copy / "parts/loop.py").read_text() == "steps = 3\n"
    assert os.readlink(copy / "link") == "train.py"  # of the copy, not of the tree
    assert os.readlink(copy / "data") == str(root.parent / "data")
    assert check_copy(paths, digest) == []
    assert sorted(path.name for path in paths.code.iterdir()) == [digest, f"{digest}.json"]


def test_the_same_content_has_one_copy_and_other_content_another(paths: RunPaths, root: Path) -> None:
    first = copied(paths, root)
    os.utime(root / "train.py", (0, 0))
    assert copied(paths, root) == first
    (root / "run.sh").chmod(0o644)
    second = copied(paths, root)
    (root / "train.py").write_text("")
    assert len({first, second, copied(paths, root)}) == 3
    assert check_copy(paths, first) == []


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("echo >> parts/loop.py", r"1 changed \(parts/loop\.py\)"),
        ("rm parts/loop.py", r"1 removed \(parts/loop\.py\)"),
        ("rm -r parts; touch parts", r"1 removed \(parts/loop\.py\)"),
        ("chmod -x run.sh", r"1 changed \(run\.sh\)"),
        ("ln -sf run.sh link", r"1 changed \(link\)"),
        ("rm train.py; mkfifo train.py", r"1 removed \(train\.py\)"),
        ("rm train.py; ln -s run.sh train.py", r"1 changed \(train\.py\)"),
    ],
)
def test_a_damaged_copy_is_found_and_copied_again(
    paths: RunPaths, root: Path, damage: str, told: str
) -> None:
    digest = copied(paths, root)
    copy = paths.code_tree(digest)
    assert os.system(f"cd {copy} && chmod -R u+w . && chmod u-w run.sh && {damage}") == 0
    with pytest.raises(DataError, match=told):
        check_copy(paths, digest)
    assert copied(paths, root) == digest
    assert check_copy(paths, digest) == []
    assert len([path for path in paths.code.iterdir() if ".damaged." in path.name]) == 1


def test_a_list_that_was_changed_proves_nothing(paths: RunPaths, root: Path) -> None:
    digest = copied(paths, root)
    other = sealed({"x": FileDigest(size=1, sha256="0" * 64)})
    paths.code_files(digest).write_bytes(render(other))
    with pytest.raises(DataError, match="list of the run's code is gone, or was changed"):
        check_copy(paths, digest)
    paths.code_files(digest).unlink()
    with pytest.raises(DataError, match="is gone, or was changed"):
        check_copy(paths, digest)


def test_storage_that_does_not_answer_is_no_damage(
    paths: RunPaths, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = copied(paths, root)

    def no_answer(*_: object) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(entries, "read_regular", no_answer)
    with pytest.raises(OSError, match="Stale file handle"):
        check_copy(paths, digest)


@pytest.mark.parametrize("path", ["../x", "/x", "a//b", "./a", "a/../b"])
def test_a_list_with_a_name_that_leads_out_is_refused(paths: RunPaths, path: str) -> None:
    tree = sealed({path: FileDigest(size=1, sha256="0" * 64)})
    paths.code.mkdir()
    paths.code_files(tree.digest).write_bytes(render(tree))
    with pytest.raises(DataError, match="changed"):
        files_of(paths, tree.digest)


def test_further_files_are_told_only_if_python_could_import_them(paths: RunPaths, root: Path) -> None:
    digest = copied(paths, root)
    copy = paths.code_tree(digest)
    (copy / "out").mkdir()
    (copy / "__pycache__").mkdir()
    for name in ("out/log.txt", "__pycache__/train.pyc", "random.py"):
        (copy / name).touch()
    (copy / "out/__pycache__").symlink_to(root)
    assert check_copy(paths, digest) == ["out/__pycache__", "random.py"]
    assert not (copy / "__pycache__/train.pyc").exists()  # it would run in place of train.py


@pytest.mark.parametrize("removed", [False, True])
def test_a_file_that_changes_while_it_is_copied_leaves_nothing(
    paths: RunPaths, root: Path, removed: bool
) -> None:
    files = read_tree(root, NAMES)
    (root / "train.py").write_text("other\n")
    if removed:
        (root / "train.py").unlink()
    with pytest.raises(Fenced, match="train.py"):
        copy_tree(paths, root, files)
    assert list(paths.code.iterdir()) == []


def test_a_file_that_cannot_be_read_is_named(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.py"):
        read_tree(root, ["missing.py"])
