import hashlib
import os
from pathlib import Path

import pytest

from verl_slurm.checkpoint import data_hash
from verl_slurm.checkpoint.data_hash import hash_files
from verl_slurm.checkpoint.data_tree import FileDigest
from verl_slurm.checkpoint.data_walk import parse_line, walk
from verl_slurm.checkpoint.fingerprint import fingerprint
from verl_slurm.errors import DataError


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of every size that matters: none, small, as large as small may be, one byte more, of some blocks."""
    monkeypatch.setattr(data_hash, "_SMALL_BYTES", 4096)
    monkeypatch.setattr(data_hash, "_PROBE", 3)
    monkeypatch.setattr(data_hash, "_BATCH", 2)
    for index, size in enumerate([0, 1, 5, 4095, 4096, 4097, 100_000, 2, 2, 2, 2, 2]):
        (tmp_path / f"{index:02d}").write_bytes(bytes([index]) * size)
    return tmp_path


@pytest.mark.parametrize("threads", [None, 1, 5])
def test_large_and_small_files_hash_to_what_they_hold(root: Path, threads: int | None) -> None:
    found = {
        parse_line(line).path: entry for line, entry in hash_files(root, walk(root), threads=threads).items()
    }
    assert found == {
        path.name: FileDigest(size=path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
        for path in root.iterdir()
    }


@pytest.mark.parametrize("name", ["02", "06"])
def test_what_changed_since_the_walk_comes_back_as_it_is_now(root: Path, name: str) -> None:
    lines = walk(root)
    size = (root / name).stat().st_size
    (root / name).write_bytes(b"x" * size)
    found = hash_files(root, lines)
    digests = {parse_line(line).path: entry.sha256 for line, entry in found.items()}
    assert digests[name] == hashlib.sha256(b"x" * size).hexdigest()


@pytest.mark.parametrize("name", ["02", "06"])
def test_what_is_gone_since_the_walk_is_a_data_error(root: Path, name: str) -> None:
    lines = walk(root)
    (root / name).unlink()
    with pytest.raises(DataError, match="changes while it is read"):
        hash_files(root, lines)


def test_a_file_that_became_a_pipe_is_no_trap(root: Path) -> None:
    lines = walk(root)
    (root / "06").unlink()
    os.mkfifo(root / "06")
    with pytest.raises(DataError, match="changes while it is read"):
        hash_files(root, lines)


def test_a_large_file_that_is_written_at_each_look_is_given_up(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = data_hash.hash_fd

    def slow(fd: int) -> tuple[int, str]:
        result = real(fd)
        with (root / "06").open("a") as file:
            file.write("more\n")
        return result

    monkeypatch.setattr(data_hash, "hash_fd", slow)
    with pytest.raises(DataError, match="changes while it is read"):
        fingerprint(root, threads=1)
