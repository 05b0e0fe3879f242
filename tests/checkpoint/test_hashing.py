"""Many chunks at once: hashlib's digests always, and what happens to a hasher that finds others."""

import ctypes
import hashlib
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import stringzilla

from tests.checkpoint.conftest import FILES, manifest_of, owns_it, stage
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.tree import open_directory
from verl_slurm.checkpoint import hashing
from verl_slurm.checkpoint.format.specification import CHUNK_BYTES, FileEntry
from verl_slurm.checkpoint.hashing import FEWEST, LANES, Hasher, process_hasher, reading_hasher
from verl_slurm.checkpoint.store import chunks
from verl_slurm.checkpoint.store.chunks import Reading, Wanted, make_entry, read_checked
from verl_slurm.checkpoint.store.commit import commit
from verl_slurm.checkpoint.store.verify import read_manifest, verify
from verl_slurm.save.writer.arena import Arena
from verl_slurm.save.writer.protocol import ArenaFile
from verl_slurm.save.writer.writing import write_and_hash

make_hasher = process_hasher.__wrapped__


def each(pieces: Sequence[memoryview | bytes]) -> list[bytes]:
    return [hashlib.sha256(piece).digest() for piece in pieces]


def pieces_of(sizes: Sequence[int]) -> list[memoryview]:
    memory = memoryview(random.Random(7).randbytes(sum(sizes)))
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [memory[end - size : end] for end, size in zip(ends, sizes, strict=True)]


class Lanes:
    """stringzilla.Sha256s, but for what `changed` makes of a digest: it is told the lane, too."""

    def __init__(self, count: int) -> None:
        self._found: list[bytes] = []

    def update(self, pieces: Sequence[memoryview]) -> "Lanes":
        self._found = [self.changed(lane, digest) for lane, digest in enumerate(each(pieces))]
        return self

    def digest(self) -> list[bytes]:
        return self._found

    def changed(self, lane: int, digest: bytes) -> bytes:
        return digest


class Wrong(Lanes):
    """The same wrong function of the content always: what it has written it finds right again."""

    def changed(self, lane: int, digest: bytes) -> bytes:
        return hashlib.sha256(digest).digest()


class WrongOnOneLane(Lanes):
    def changed(self, lane: int, digest: bytes) -> bytes:
        return bytes(32) if lane == 5 else digest


@pytest.mark.parametrize("count", [1, FEWEST - 1, FEWEST, LANES - 1, LANES, LANES + 1, 3 * LANES])
def test_any_number_of_pieces_has_hashlibs_digests(count: int) -> None:
    some = pieces_of([4096] * count)
    assert Hasher(stringzilla.Sha256s).digests(some, 1) == each(some)


@pytest.mark.parametrize("length", [0, 1, 55, 56, 63, 64, 65, 119, 120, 127, 128, 1000, 100_003])
def test_every_length_of_the_padding_has_hashlibs_digests(length: int) -> None:
    some = pieces_of([length] * LANES)
    assert Hasher(stringzilla.Sha256s).digests(some, 1) == each(some)


def test_pieces_of_several_lengths_keep_their_order() -> None:
    some = pieces_of([64, 4096, 0] * 5 + [17])
    assert Hasher(stringzilla.Sha256s).digests(some, 1) == each(some)


def test_the_examples_of_the_standard() -> None:
    """FIPS 180-2, appendix B: "abc", and a million letters."""
    for text, digest in (
        (b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
        (b"a" * 1_000_000, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"),
    ):
        found = Hasher(stringzilla.Sha256s).digests([memoryview(text)] * LANES, 1)
        assert found == [bytes.fromhex(digest)] * LANES


@pytest.mark.parametrize("count", [0, 1, FEWEST - 1, FEWEST, LANES, LANES + 3, 3 * LANES - 1])
def test_jobs_that_are_too_few_for_a_batch_come_one_by_one(count: int) -> None:
    jobs = list(range(count))
    batches = Hasher(Lanes).batches(jobs)
    assert [job for batch in batches for job in batch] == jobs
    assert all(len(batch) == 1 or FEWEST <= len(batch) <= LANES for batch in batches)
    assert Hasher().batches(jobs) == [[job] for job in jobs]


@pytest.mark.parametrize(
    ("able", "at_once"),
    [
        ("serial westmere goldmont haswell skylake icelake", LANES),
        ("serial westmere haswell skylake", LANES),
        ("serial westmere haswell", LANES),
        ("serial westmere goldmont haswell", 1),
        ("serial westmere goldmont", 1),
        ("serial neon", 1),
    ],
)
def test_lanes_are_used_where_they_are_faster(
    monkeypatch: pytest.MonkeyPatch, able: str, at_once: int
) -> None:
    fake = SimpleNamespace(__capabilities__=tuple(able.split()), Sha256s=stringzilla.Sha256s)
    monkeypatch.setitem(sys.modules, "stringzilla", fake)
    assert make_hasher().at_once == at_once


@pytest.mark.parametrize(
    ("able", "at_once"),
    [
        ("serial westmere goldmont haswell skylake icelake", 1),
        ("serial westmere haswell skylake", LANES),
        ("serial westmere haswell", LANES),
        ("serial neon", 1),
    ],
)
def test_a_reading_hashes_chunk_by_chunk_where_hashlib_keeps_up_with_the_disk(
    monkeypatch: pytest.MonkeyPatch, able: str, at_once: int
) -> None:
    fake = SimpleNamespace(__capabilities__=tuple(able.split()), Sha256s=stringzilla.Sha256s)
    monkeypatch.setitem(sys.modules, "stringzilla", fake)
    monkeypatch.setattr(hashing, "process_hasher", make_hasher)
    assert reading_hasher.__wrapped__().at_once == at_once


def test_without_stringzilla_hashlib_does_it_and_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "stringzilla", None)
    assert make_hasher().at_once == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("lanes", [Wrong, WrongOnOneLane])
def test_one_that_errs_at_the_start_is_not_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lanes: type[Lanes]
) -> None:
    fake = SimpleNamespace(__capabilities__=("skylake",), Sha256s=lanes)
    monkeypatch.setitem(sys.modules, "stringzilla", fake)
    assert make_hasher().at_once == 1
    assert "another SHA-256 than hashlib" in capsys.readouterr().err


def test_a_release_with_another_interface_is_not_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "stringzilla", SimpleNamespace(__capabilities__=("skylake",)))
    assert make_hasher().at_once == 1
    assert "cannot be used: AttributeError" in capsys.readouterr().err


def test_the_first_batch_shows_one_that_always_errs(capsys: pytest.CaptureFixture[str]) -> None:
    hasher, some = Hasher(Wrong), pieces_of([100] * LANES)
    assert hasher.digests(some, 0) == each(some)
    assert hasher.digests(some, 1) == each(some)
    assert hasher.at_once == 1
    assert capsys.readouterr().err.count("another SHA-256 than hashlib") == 1


def test_sixteen_samples_look_at_every_lane() -> None:
    hasher, some = Hasher(WrongOnOneLane), pieces_of([100] * LANES)
    assert hasher.digests(some, 0) != each(some)
    for number in range(1, 4 * LANES):
        hasher.digests(some, number)
    assert hasher.at_once == 1


def test_work_that_counted_on_wrong_digests_is_done_again() -> None:
    some = pieces_of([100] * LANES)
    for lanes, times in ((Lanes, 1), (Wrong, 2)):
        hasher, done = Hasher(lanes), []
        found = hasher.settled(lambda: done.append(1) or [hasher.digests(some, n) for n in (3, 4)])  # noqa: B023
        assert found == [each(some)] * 2
        assert len(done) == times


@pytest.mark.parametrize("lanes", [None, stringzilla.Sha256s, Wrong])
@pytest.mark.parametrize("hashers", [1, 3])
def test_a_save_has_hashlibs_digests_whatever_hashes(
    lanes: Callable[[int], Lanes] | None, hashers: int
) -> None:
    sizes = [LANES * CHUNK_BYTES + 4096, 4096, 3 * CHUNK_BYTES]
    arena = Arena(sum(sizes))
    arena.view[: sum(sizes)] = random.Random(1).randbytes(sum(sizes))
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    files = [
        ArenaFile(path=f"f{n}", at=end - size, size=size)
        for n, (end, size) in enumerate(zip(ends, sizes, strict=True))
    ]
    entries, _ = write_and_hash(arena.view, files, [], hashers=hashers, hasher=Hasher(lanes))
    for file, entry in zip(files, entries, strict=True):
        assert entry == chunks.entry_of(file.path, bytes(arena.view[file.at : file.at + file.size]))
    arena.close()


NUM_CHUNKS = 70
CHUNK = 1 << 16
LARGE = "actor/rank_0000.bin"


@pytest.fixture
def large(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`large(lanes)` → a committed checkpoint with one file of 70 chunks, whose digests `lanes` has made.

    Chunks have 64 KiB here: 70 of 4 MiB in every test are too much for a disk.
    """
    monkeypatch.setattr(chunks, "CHUNK_BYTES", CHUNK)

    def make(lanes: Callable[[int], Lanes] = Lanes) -> Path:
        data = random.Random(2).randbytes(NUM_CHUNKS * CHUNK)
        staging = stage(paths, 1, files=FILES | {LARGE: data})
        pieces = [memoryview(data)[at * CHUNK : (at + 1) * CHUNK] for at in range(NUM_CHUNKS)]
        entry = make_entry(LARGE, len(data), lanes(NUM_CHUNKS).update(pieces).digest())
        others = [other for other in manifest_of(staging).files if other.path != LARGE]
        manifest = manifest_of(staging, files=tuple(sorted([*others, entry], key=lambda e: e.path)))
        return commit(staging, manifest, attempt_check=owns_it)

    return make


def flip(final: Path, at: int) -> None:
    with (final / LARGE).open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def entry_of_large(final: Path) -> FileEntry:
    (entry,) = [entry for entry in read_manifest(final).files if entry.path == LARGE]
    return entry


def problems_of(directory: Path, readings: list[Reading], hasher: Hasher) -> list[object]:
    problems: list[object] = []
    with open_directory(directory) as root:
        read_checked(root, readings, on_problem=lambda *problem: problems.append(problem), hasher=hasher)
    return problems


@pytest.fixture
def uses(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], Lanes] | None], Hasher]:
    """`uses(lanes)`: what this process verifies with."""

    def use(lanes: Callable[[int], Lanes] | None) -> Hasher:
        hasher = Hasher(lanes)
        monkeypatch.setattr(chunks, "reading_hasher", lambda: hasher)
        return hasher

    return use


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("lanes", [None, stringzilla.Sha256s])
def test_a_checkpoint_verifies_and_one_flipped_bit_does_not(
    large: Callable[..., Path],
    uses: Callable[[object], Hasher],
    lanes: Callable[[int], Lanes] | None,
    threads: int,
) -> None:
    hasher, final = uses(lanes), large()
    assert verify(final, threads=threads).ok
    for at in (0, 37 * CHUNK + 9, NUM_CHUNKS * CHUNK - 1):
        flip(final, at)
        (problem,) = verify(final, threads=threads).problems
        assert problem.path == LARGE
        start = at - at % CHUNK
        assert problem.what.endswith(f"in bytes {start} to {start + CHUNK}")
        flip(final, at)
    assert hasher.at_once == (1 if lanes is None else LANES)


def test_what_a_wrong_hasher_wrote_and_finds_right_again_is_no_verified_checkpoint(
    large: Callable[..., Path], uses: Callable[[object], Hasher], capsys: pytest.CaptureFixture[str]
) -> None:
    uses(Wrong)
    verdict = verify(large(Wrong), threads=2)
    assert [problem.path for problem in verdict.problems] == [LARGE]
    assert "another SHA-256 than hashlib" in capsys.readouterr().err


@pytest.mark.parametrize("lanes", [Wrong, WrongOnOneLane])
def test_a_wrong_hasher_condemns_no_good_checkpoint(
    large: Callable[..., Path], uses: Callable[[object], Hasher], lanes: type[Lanes]
) -> None:
    hasher, final = uses(lanes), large()
    assert verify(final, threads=2).ok
    assert hasher.at_once == 1


def test_damage_that_a_wrong_hasher_came_across_is_told_once(large: Callable[..., Path]) -> None:
    final = large()
    flip(final, 3)
    assert len(problems_of(final, [Reading(entry_of_large(final))], Hasher(Wrong))) == 1


@pytest.mark.parametrize("count", [1, FEWEST, LANES - 1, LANES, LANES + 1, LANES + FEWEST, NUM_CHUNKS])
def test_the_last_chunk_is_checked_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", CHUNK)
    data = bytearray(random.Random(3).randbytes(count * CHUNK - 5))
    entry = chunks.entry_of("f", bytes(data))
    data[-1] ^= 1
    (tmp_path / "f").write_bytes(data)
    assert len(problems_of(tmp_path, [Reading(entry)], Hasher(stringzilla.Sha256s))) == 1


def test_without_stringzilla_a_checkpoint_is_saved_and_verified(
    large: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "stringzilla", None)
    monkeypatch.setattr(chunks, "reading_hasher", make_hasher)
    assert verify(large()).ok


def test_memory_and_descriptors_stay_within_their_bounds(
    large: Callable[..., Path], uses: Callable[[object], Hasher], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Lanes):
        def update(self, pieces: Sequence[memoryview]) -> Lanes:
            time.sleep(0.1)  # meanwhile all other threads read as far as they may
            return super().update(pieces)

    made: list[int] = []
    real = chunks._Buffer
    monkeypatch.setattr(chunks, "_Buffer", lambda: made.append(1) or real())
    final, before = large(), len(os.listdir("/proc/self/fd"))
    for lanes, most in ((None, 3), (Slow, 3 + 2 * LANES)):
        made.clear()
        uses(lanes)
        assert verify(final, threads=3).ok
        assert len(made) <= most
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_thread_that_dies_leaves_no_other_waiting(large: Callable[..., Path]) -> None:
    final = large()
    flip(final, 20 * CHUNK)

    def fail(path: str, what: object) -> None:
        raise RuntimeError("told")

    with open_directory(final) as root, pytest.raises(RuntimeError, match="told"):
        readings = [Reading(entry) for entry in read_manifest(final).files]
        read_checked(root, readings, threads=2, on_problem=fail, hasher=Hasher(stringzilla.Sha256s))


def test_ranges_arrive_and_nothing_of_a_damaged_chunk_does(large: Callable[..., Path]) -> None:
    final = large()
    data = (final / LARGE).read_bytes()
    ranges = [(3, 2 * CHUNK), (30 * CHUNK + 5, 10), (31 * CHUNK, 20 * CHUNK)]
    damaged = 40 * CHUNK
    for flipped in (False, True):
        if flipped:
            flip(final, damaged)
        targets = [ctypes.create_string_buffer(length) for _, length in ranges]
        wanted = [
            Wanted(at, length, ctypes.addressof(target))
            for (at, length), target in zip(ranges, targets, strict=True)
        ]
        problems = problems_of(final, [Reading(entry_of_large(final), wanted)], Hasher(stringzilla.Sha256s))
        assert len(problems) == flipped
        if flipped:
            start = damaged - ranges[2][0]
            assert targets[2].raw[start : start + CHUNK] == bytes(CHUNK)
        else:
            assert [target.raw for target in targets] == [data[at : at + length] for at, length in ranges]
