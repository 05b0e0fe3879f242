"""Arena bytes on one or several media, each with its own fate."""

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_slurm.checkpoint.format.specification import CHUNK_BYTES
from verl_slurm.checkpoint.store.chunks import entry_of
from verl_slurm.save.writer import writing
from verl_slurm.save.writer.arena import Arena
from verl_slurm.save.writer.protocol import ArenaFile
from verl_slurm.save.writer.writing import write_and_hash

SIZE = 2 * CHUNK_BYTES + 8192
FILES = (
    ArenaFile(path="actor/rank_0000.bin", at=0, size=2 * CHUNK_BYTES + 4096),
    ArenaFile(path="critic/rank_0000.bin", at=2 * CHUNK_BYTES + 4096, size=4096),
)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(SIZE)
    made.view[:SIZE] = random.Random(1).randbytes(SIZE)
    yield made
    made.close()


def _directories(root: Path, *names: str) -> list[str]:
    for name in names:
        (root / name).mkdir(mode=0o700)
    return [str(root / name) for name in names]


def test_every_directory_gets_every_file_and_the_digests_are_of_what_lies_there(
    arena: Arena, tmp_path: Path
) -> None:
    directories = _directories(tmp_path, "shared", "local")
    entries, outcomes = write_and_hash(arena.view, FILES, directories, hashers=2)
    assert [outcome.error for outcome in outcomes] == [None, None]
    for directory in directories:
        for entry, file in zip(entries, FILES, strict=True):
            path = Path(directory, file.path)
            data = path.read_bytes()
            assert data == bytes(arena.view[file.at : file.at + file.size])
            assert entry == entry_of(file.path, data)
            assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_medium_that_fails_is_named_and_the_other_is_written(arena: Arena, tmp_path: Path) -> None:
    (tmp_path / "gone").write_text("in the way")
    directories = [str(tmp_path / "gone"), *_directories(tmp_path, "local")]
    _, (gone, local) = write_and_hash(arena.view, FILES, directories)
    assert (gone.errno, local.error) == (errno.ENOTDIR, None)
    assert Path(directories[1], FILES[0].path).stat().st_size == FILES[0].size


def test_a_file_that_is_there_already_is_never_overwritten(arena: Arena, tmp_path: Path) -> None:
    (directory,) = _directories(tmp_path, "shared")
    there = Path(directory, FILES[1].path)
    there.parent.mkdir()
    there.write_bytes(b"precious")
    _, (outcome,) = write_and_hash(arena.view, FILES, [directory])
    assert outcome.errno == errno.EEXIST
    assert there.read_bytes() == b"precious"


def test_a_link_in_the_way_is_not_followed(arena: Arena, tmp_path: Path) -> None:
    directory, elsewhere = _directories(tmp_path, "shared", "elsewhere")
    os.symlink(elsewhere, Path(directory, "actor"))
    _, (outcome,) = write_and_hash(arena.view, FILES, [directory])
    assert outcome.error is not None
    assert os.listdir(elsewhere) == []


def test_a_full_disk_is_an_error_of_that_directory_only(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, good = _directories(tmp_path, "full", "good")
    real = os.pwrite

    def pwrite(fd: int, data: memoryview, at: int) -> int:
        if f"/{Path(full).name}/" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, at)

    monkeypatch.setattr(writing.os, "pwrite", pwrite)
    _, (first, second) = write_and_hash(arena.view, FILES, [full, good])
    assert (first.errno, second.errno) == (errno.ENOSPC, None)


@pytest.mark.parametrize("how", ["short", "cached"])
def test_short_writes_are_gone_on_with_and_where_direct_ones_are_refused_cached_ones_do(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (directory,) = _directories(tmp_path, "shared")
    real = os.pwrite
    if how == "short":
        monkeypatch.setattr(
            writing.os, "pwrite", lambda fd, data, at: real(fd, data[: max(1, len(data) // 3)], at)
        )
    else:
        monkeypatch.setattr(writing, "_set_direct", lambda fd, on: False)
    (entry,), (outcome,) = write_and_hash(arena.view, FILES[1:], [directory])
    assert (outcome.error, outcome.direct) == (None, False)
    assert entry_of(FILES[1].path, Path(directory, FILES[1].path).read_bytes()) == entry


def test_a_failed_fsync_fails_the_directory(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory,) = _directories(tmp_path, "shared")

    def fsync(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(writing.os, "fsync", fsync)
    _, (outcome,) = write_and_hash(arena.view, FILES, [directory])
    assert outcome.errno == errno.EIO
