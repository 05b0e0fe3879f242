import hashlib
import os
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from verl_slurm.base.errors import DataError
from verl_slurm.dataset.fingerprint import hashing as data_hash, small_files
from verl_slurm.dataset.fingerprint.hashing import hash_files
from verl_slurm.dataset.fingerprint.record import fingerprint
from verl_slurm.dataset.fingerprint.walk import parse_line, walk


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of every size that matters: none, small, as large as small may be, one byte more, of some blocks."""
    monkeypatch.setattr(small_files, "SMALL_BYTES", 4096)
    monkeypatch.setattr(data_hash, "_PROBE", 3)
    monkeypatch.setattr(data_hash, "_BATCH", 2)
    for index, size in enumerate([0, 1, 5, 4095, 4096, 4097, 100_000, 2, 2, 2, 2, 2]):
        (tmp_path / f"{index:02d}").write_bytes(bytes([index]) * size)
    return tmp_path


def alone(root: Path) -> data_hash.Digests:
    return {
        line: hashlib.sha256((root / parse_line(line).path).read_bytes()).hexdigest() for line in walk(root)
    }


@pytest.mark.parametrize("threads", [None, 1, 5])
def test_large_and_small_files_hash_to_what_they_hold(root: Path, threads: int | None) -> None:
    assert hash_files(root, walk(root), threads=threads) == alone(root)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Those that were started to hash; every few files are worth one."""
    started = []
    real = subprocess.Popen

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(real(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(data_hash, "_FILES_A_PROCESS", 1)
    monkeypatch.setattr(data_hash, "_voluntary_waits", lambda: 0)
    monkeypatch.setattr(subprocess, "Popen", start)
    return started


def test_files_in_memory_are_hashed_by_processes_too_and_none_is_left(
    root: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    assert hash_files(root, walk(root), threads=3) == alone(root)
    assert len(processes) == 2
    assert [process.poll() is not None for process in processes] == [True, True]


def test_one_thread_starts_no_process(root: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    assert hash_files(root, walk(root), threads=1) == alone(root)
    assert not processes


def test_a_process_does_what_it_is_asked(root: Path) -> None:
    lines = [line for line in walk(root) if parse_line(line).size < 4096]
    with data_hash._process(f"{root}/") as process:
        assert process is not None
        found = data_hash._have_done("/nowhere/", process, deque([[line] for line in lines]))
    assert dict(found) == {line: digest for line, digest in alone(root).items() if line in lines}


@pytest.mark.parametrize("program", ["raise SystemExit(1)", "print('0' * 63)", "input(); input()"])
def test_what_a_process_that_fails_leaves_undone_is_done_here(
    root: Path,
    processes: list[subprocess.Popen[bytes]],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
) -> None:
    path = tmp_path_factory.mktemp("program") / "program.py"
    path.write_text(program)
    monkeypatch.setattr(small_files, "__file__", str(path))
    assert hash_files(root, walk(root), threads=3) == alone(root)
    assert len(processes) == 2


def test_where_no_process_can_be_started_all_is_done_here(
    root: Path, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert hash_files(root, walk(root), threads=3) == alone(root)
    assert not processes


def test_where_storage_has_to_be_waited_for_threads_read_in_the_order_of_inodes(
    root: Path, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    real = data_hash._work

    def work(base: str, batches: deque[list[str]]) -> object:
        taken.extend(line for batch in list(batches) for line in batch)
        return real(base, batches)

    monkeypatch.setattr(data_hash, "_voluntary_waits", iter((0, 99)).__next__)
    monkeypatch.setattr(data_hash, "_work", work)
    lines = walk(root)
    assert hash_files(root, lines, threads=1) == alone(root)
    inodes = [parse_line(line).inode for line in taken]
    assert len(inodes) == 12 - 3
    assert inodes == sorted(inodes)
    assert not processes


@pytest.mark.parametrize("name", ["02", "06"])
def test_what_changed_since_the_walk_comes_back_as_it_is_now(root: Path, name: str) -> None:
    lines = walk(root)
    size = (root / name).stat().st_size
    (root / name).write_bytes(b"x" * size)
    found = hash_files(root, lines)
    digests = {parse_line(line).path: digest for line, digest in found.items()}
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
        fingerprint(root)
