import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl_slurm.base.errors import DataError
from verl_slurm.dataset.fingerprint import file_hashing, small_files
from verl_slurm.dataset.fingerprint.data_record import fingerprint
from verl_slurm.dataset.fingerprint.file_hashing import Hashed, hash_files, stamp_of
from verl_slurm.dataset.fingerprint.small_files import NO_DIGEST, RECORD, read_files

PROGRAM = [sys.executable, "-I", "-S", "-X", "utf8", small_files.__file__]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of every size that matters: none, small, as large as small may be, one byte more, of some blocks."""
    monkeypatch.setattr(small_files, "SMALL_BYTES", 4096)
    for index, size in enumerate([0, 1, 5, 4095, 4096, 4097, 100_000, 2, 2, 2, 2]):
        (tmp_path / f"{index:02d}").write_bytes(bytes([index]) * size)
    (tmp_path / "a name\nof two lines and \u00e9").write_text("x")
    return tmp_path


def alone(root: Path) -> dict[str, Hashed]:
    found = {}
    for name in os.listdir(root):
        info = (root / name).stat()
        digest = hashlib.sha256((root / name).read_bytes()).hexdigest()
        found[name] = Hashed(stamp_of(info), digest, info.st_mode)
    return found


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Those that were started to hash; every few files are worth one."""
    started = []
    real = subprocess.Popen

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(real(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(file_hashing, "_FILES_A_PROCESS", 1)
    monkeypatch.setattr(file_hashing, "num_threads", lambda: 3)
    monkeypatch.setattr(subprocess, "Popen", start)
    return started


def test_large_and_small_files_hash_to_what_they_hold_and_few_start_no_process(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    assert hash_files(root, os.listdir(root)) == alone(root)


def test_many_files_are_hashed_by_processes_too_and_none_is_left(
    root: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    assert hash_files(root, os.listdir(root)) == alone(root)
    assert [process.returncode for process in processes] == [0, 0]


@pytest.mark.parametrize("program", ["raise SystemExit(1)", "print('0' * 63)"])
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
    assert hash_files(root, os.listdir(root)) == alone(root)
    assert len(processes) == 2


def test_where_no_process_can_be_started_all_is_done_here(
    root: Path, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert hash_files(root, os.listdir(root)) == alone(root)
    assert not processes


def test_a_process_that_hangs_ends_with_the_look(
    root: Path, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> bytes:
        raise OSError("storage")

    monkeypatch.setattr(file_hashing, "read_files", fails)
    monkeypatch.setattr(small_files, "__file__", "/dev/stdin")  # it waits for a program that never comes
    with pytest.raises(OSError, match="storage"):
        hash_files(root, os.listdir(root))
    assert None not in [process.returncode for process in processes]


def test_where_storage_has_to_be_waited_for_eight_threads_read(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    real = os.open

    def noted(*args: Any) -> int:
        import threading

        threads.add(threading.get_ident())
        return real(*args)

    class Usage:
        waits = 0

        @property
        def ru_nvcsw(self) -> int:
            Usage.waits += 99
            return Usage.waits

    monkeypatch.setattr(small_files, "_PROBE", 3)
    monkeypatch.setattr(small_files.resource, "getrusage", lambda who: Usage())
    monkeypatch.setattr(os, "open", noted)
    names = os.listdir(root)
    found = [record[-1].hex() for record in RECORD.iter_unpack(read_files(f"{root}/", names, follow=True))]
    expected = alone(root)
    assert [
        digest in (expected[name].sha256, NO_DIGEST.hex()) for name, digest in zip(names, found, strict=True)
    ] == [True] * 12
    assert found.count(NO_DIGEST.hex()) == 2
    assert len(threads) > 1


@pytest.mark.parametrize("name", ["02", "06"])
@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.unlink(),
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), path.symlink_to(path.name)),
    ],
)
def test_what_is_gone_or_no_file_any_more_is_left_out(
    root: Path, name: str, change: Callable[[Path], Any]
) -> None:
    names = os.listdir(root)
    expected = alone(root)
    change(root / name)
    del expected[name]
    assert hash_files(root, names, follow=False) == expected


def test_a_link_is_followed_where_it_is_asked(root: Path) -> None:
    (root / "link").symlink_to("02")
    assert hash_files(root, ["link"])["link"].sha256 == alone(root)["02"].sha256
    assert hash_files(root, ["link"], follow=False) == {}


def test_a_large_file_that_is_written_at_each_look_is_given_up(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = file_hashing.hash_fd

    def slow(fd: int) -> tuple[int, str]:
        result = real(fd)
        with (root / "06").open("a") as file:
            file.write("more\n")
        return result

    monkeypatch.setattr(file_hashing, "hash_fd", slow)
    with pytest.raises(DataError, match="changes while it is read"):
        fingerprint(root)


def test_a_file_that_cannot_be_read_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int) -> tuple[int, str]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(file_hashing, "hash_fd", broken)
    with pytest.raises(DataError, match="cannot be read.*/06.*Input/output error"):
        fingerprint(root)


def test_the_program_says_what_the_function_says_and_imports_nothing_that_takes_long(root: Path) -> None:
    names = [name for name in os.listdir(root) if name not in ("05", "06")]
    argv = [*PROGRAM[:1], "-X", "importtime", *PROGRAM[1:], "follow"]
    done = subprocess.run(
        argv, cwd=root, input=os.fsencode("\0".join(names)), capture_output=True, check=True
    )
    assert done.stdout == read_files(f"{root}/", names, follow=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.decode().splitlines()}
    assert "hashlib" in imported
    assert not imported & {"typing", "collections", "re", "enum", "subprocess", "threading", "site"}
