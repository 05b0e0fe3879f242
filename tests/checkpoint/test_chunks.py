"""Digests of chunks, and the reader that hands out nothing it has not checked."""

import ctypes
import hashlib
import itertools
import os
import random
from pathlib import Path

import msgspec
import pytest

from verl_slurm.base.tree import open_directory
from verl_slurm.checkpoint.format.specification import CHUNK_BYTES, FileEntry
from verl_slurm.checkpoint.store.chunks import (
    Reading,
    Wanted,
    entry_of,
    hash_file,
    leaf_count,
    leaf_problem,
    read_checked,
)

Problems = list[tuple[str, str | OSError]]


def _bytes(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def _put(root: Path, path: str, data: bytes) -> FileEntry:
    (root / path).write_bytes(data)
    return entry_of(path, data)


def _read(root: Path, readings: list[Reading], *, threads: int = 2) -> tuple[int, Problems]:
    problems: Problems = []
    with open_directory(root) as fd:
        count = read_checked(fd, readings, threads=threads, on_problem=lambda *found: problems.append(found))
    return count, problems


@pytest.mark.parametrize("size", [0, 1, 4095, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES])
def test_a_file_and_its_content_have_the_same_entry(tmp_path: Path, size: int) -> None:
    """The digest of one chunk is plain SHA-256, and of several that of their digests."""
    data = _bytes(size)
    entry = _put(tmp_path, "f", data)
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    try:
        assert hash_file(fd, "f") == entry
    finally:
        os.close(fd)
    leaves = [
        hashlib.sha256(data[at : at + CHUNK_BYTES]).digest() for at in range(0, max(1, size), CHUNK_BYTES)
    ]
    assert len(leaves) == leaf_count(size)
    whole = leaves[0] if len(leaves) == 1 else hashlib.sha256(b"".join(leaves)).digest()
    assert (entry.size, entry.sha256, leaf_problem(entry)) == (size, whole.hex(), None)


def test_leaves_that_do_not_make_the_digest_are_found() -> None:
    entry = entry_of("f", _bytes(CHUNK_BYTES + 5))
    swapped = msgspec.structs.replace(entry, leaves=entry.leaves[::-1])
    assert leaf_problem(swapped) == "the chunk digests do not make the file's"
    assert "1 chunk digests" in (leaf_problem(msgspec.structs.replace(entry, leaves=entry.leaves[:1])) or "")


@pytest.mark.parametrize("size", [10, CHUNK_BYTES, 2 * CHUNK_BYTES + 4096, 2 * CHUNK_BYTES + 77])
def test_ranges_of_several_files_arrive_where_they_are_wanted(tmp_path: Path, size: int) -> None:
    random_numbers = random.Random(size)
    readings, checks = [], []
    for number in range(3):
        data = _bytes(size, seed=number)
        entry = _put(tmp_path, f"f{number}", data)
        cuts = sorted({0, size, *(random_numbers.randrange(size) for _ in range(6))})
        wanted = []
        for low, high in list(itertools.pairwise(cuts))[::2]:
            target = ctypes.create_string_buffer(high - low)
            wanted.append(Wanted(low, high - low, ctypes.addressof(target)))
            checks.append((target, data[low:high]))
        readings.append(Reading(entry, wanted))
    _, problems = _read(tmp_path, readings, threads=3)
    assert problems == []
    assert all(target.raw == expected for target, expected in checks)


def test_only_the_chunks_that_are_touched_are_read(tmp_path: Path) -> None:
    data = _bytes(4 * CHUNK_BYTES)
    entry = _put(tmp_path, "f", data)
    target = ctypes.create_string_buffer(10)
    wanted = [Wanted(2 * CHUNK_BYTES + 3, 10, ctypes.addressof(target))]
    assert _read(tmp_path, [Reading(entry, wanted)]) == (CHUNK_BYTES, [])
    assert _read(tmp_path, [Reading(entry, [])]) == (0, [])
    assert _read(tmp_path, [Reading(entry)]) == (4 * CHUNK_BYTES, [])


def test_a_flipped_bit_is_named_by_its_place_and_nothing_of_its_chunk_is_handed_out(tmp_path: Path) -> None:
    data = bytearray(_bytes(3 * CHUNK_BYTES))
    entry = entry_of("f", bytes(data))
    data[CHUNK_BYTES + 7] ^= 4
    (tmp_path / "f").write_bytes(data)
    target = ctypes.create_string_buffer(16)
    wanted = [Wanted(CHUNK_BYTES, 16, ctypes.addressof(target))]
    _, problems = _read(tmp_path, [Reading(entry, wanted)])
    ((path, what),) = problems
    assert path == "f"
    assert str(what).endswith(f"in bytes {CHUNK_BYTES} to {2 * CHUNK_BYTES}")
    assert target.raw == bytes(16)


def test_a_bad_file_does_not_keep_the_others_from_being_read(tmp_path: Path) -> None:
    good = _put(tmp_path, "good", _bytes(100))
    short = _put(tmp_path, "short", _bytes(CHUNK_BYTES + 100))
    os.truncate(tmp_path / "short", 100)
    missing = entry_of("missing", b"x")
    os.symlink("good", tmp_path / "link")
    link = msgspec.structs.replace(good, path="link")
    before = len(os.listdir("/proc/self/fd"))
    count, problems = _read(tmp_path, [Reading(e) for e in (good, short, missing, link)])
    assert len(os.listdir("/proc/self/fd")) == before
    assert count == 100
    assert {path for path, _ in problems} == {"short", "missing", "link"}
    assert dict(problems)["short"] == f"size 100, expected {CHUNK_BYTES + 100}"
