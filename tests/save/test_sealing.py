"""Sealing while writing: the files are those that sealing them whole would give, on every medium, each nonce once."""

import errno
import hashlib
import os
import threading
from pathlib import Path

import msgspec
import pytest

from verl_slurm.base.errors import KeyRefused
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.keys import MasterKey, new_key_file
from verl_slurm.checkpoint.format.encryption import TAG_BYTES, CheckpointCipher
from verl_slurm.checkpoint.format.specification import CHUNK_BYTES, FileEntry
from verl_slurm.checkpoint.store.chunks import entry_of
from verl_slurm.config.schema import EncryptionConfig
from verl_slurm.save.writer import file_sealing as module
from verl_slurm.save.writer.arena import Arena
from verl_slurm.save.writer.file_sealing import Sealer
from verl_slurm.save.writer.handle import SaverDied, SaverProcess
from verl_slurm.save.writer.protocol import ArenaFile, Sealing, Write, Written
from verl_slurm.save.writer.writing import write_and_hash

KEY, OTHER = MasterKey(bytes(range(32))), MasterKey(bytes(range(1, 33)))
NAME = "step_000012"
MARK = b"SQUEAMISH OSSIFRAGE "
SIZES = (4096, CHUNK_BYTES, CHUNK_BYTES + 4096, 2 * CHUNK_BYTES - 4096, 3 * CHUNK_BYTES)


def new_sealing(key: MasterKey = KEY) -> Sealing:
    return Sealing(name=NAME, encryption=CheckpointCipher.begin(key, NAME).record)


def layout(sizes: tuple[int, ...]) -> tuple[memoryview, list[ArenaFile]]:
    files, at = [], 0
    for number, size in enumerate(sizes):
        files.append(ArenaFile(path=f"part{number % 2}/rank_{number:04d}.bin", at=at, size=size))
        at += size
    arena = memoryview(bytearray((MARK * (at // len(MARK) + 1))[:at]))
    return arena, files


@pytest.fixture(autouse=True)
def short_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks, so that every buffer is used again and again."""
    monkeypatch.setattr(module, "RING_CHUNKS", 2)


def right(place: Path, entries: tuple[FileEntry, ...], files: list[ArenaFile], sealing: Sealing) -> bool:
    """Whether each file there is what sealing it whole would give, and its entry says so."""
    arena, _ = layout(SIZES)
    cipher = CheckpointCipher(KEY, NAME, sealing.encryption)
    wholes = [cipher.seal(file.path, bytes(arena[file.at : file.at + file.size])) for file in files]
    assert [(place / file.path).read_bytes() for file in files] == wholes
    expected = (
        msgspec.structs.replace(entry_of(file.path, whole), plain_size=file.size)
        for file, whole in zip(files, wholes, strict=True)
    )
    return entries == tuple(expected) and not any(MARK in whole for whole in wholes)


@pytest.mark.parametrize("threads", [1, 3])
def test_every_medium_gets_what_sealing_the_whole_file_would_give(tmp_path: Path, threads: int) -> None:
    arena, files = layout(SIZES)
    before, sealing = hashlib.sha256(arena).digest(), new_sealing()
    places = [str(tmp_path / "a"), str(tmp_path / "b")]
    sealed = Sealer(KEY).begin(sealing, arena, files)
    entries, outcomes = write_and_hash(arena, files, places, hashers=threads, sealed=sealed)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert [outcome.files for outcome in outcomes] == [entries, entries]
    assert all(right(Path(place), entries, files, sealing) for place in places)
    assert hashlib.sha256(arena).digest() == before


def test_a_medium_that_fails_early_or_late_does_not_hold_the_other_up(tmp_path: Path) -> None:
    (arena, files), sealing = layout(SIZES), new_sealing()
    late = tmp_path / "late" / files[-1].path
    late.parent.mkdir(parents=True)
    late.write_text("in the way")
    (tmp_path / "file").write_text("in the way")
    places = [str(tmp_path / name) for name in ("file", "good", "late")]
    sealed = Sealer(KEY).begin(sealing, arena, files)
    entries, outcomes = write_and_hash(arena, files, places, hashers=2, sealed=sealed)
    assert [outcome.error is None for outcome in outcomes] == [False, True, False]
    assert right(tmp_path / "good", entries, files, sealing)


@pytest.mark.parametrize("breaks", [False, True], ids=["goes on", "and the fast one breaks"])
def test_a_medium_that_stands_still_holds_no_other_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    (arena, files), sealing = layout(SIZES), new_sealing()
    places = [tmp_path / "slow", tmp_path / "fast"]
    done: list[str] = []
    go_on = threading.Event()
    pwrite = os.pwrite

    def slow(fd: int, data: memoryview, at: int) -> int:
        where = os.readlink(f"/proc/self/fd/{fd}")
        if "/slow/" in where:
            assert go_on.wait(60)
        elif breaks and where.endswith(files[-1].path):
            go_on.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data, at)

    def told(written: Written) -> None:
        done.append(Path(written.directory).name)
        go_on.set()

    monkeypatch.setattr(os, "pwrite", slow)
    sealed = Sealer(KEY).begin(sealing, arena, files)
    entries, outcomes = write_and_hash(
        arena, files, [str(place) for place in places], sealed=sealed, on_done=told
    )
    assert [outcome.error is None for outcome in outcomes] == [True, not breaks]
    assert breaks or done == ["fast", "slow"]
    assert right(places[0], entries, files, sealing)


def test_an_arena_that_changes_between_two_media_is_not_sealed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two texts under one nonce would give away their difference: the save fails on all media."""
    arena, files = layout(SIZES)
    go_on = threading.Event()
    pwrite = os.pwrite

    def slow(fd: int, data: memoryview, at: int) -> int:
        if "/slow/" in os.readlink(f"/proc/self/fd/{fd}"):
            assert go_on.wait(60)
        return pwrite(fd, data, at)

    def change(written: Written) -> None:
        arena[-1] ^= 1
        go_on.set()

    monkeypatch.setattr(os, "pwrite", slow)
    sealed = Sealer(KEY).begin(new_sealing(), arena, files)
    with pytest.raises(ValueError, match="its nonce must not be used again"):
        write_and_hash(
            arena, files, [str(tmp_path / "slow"), str(tmp_path / "fast")], sealed=sealed, on_done=change
        )


def test_where_no_medium_takes_it_there_are_no_entries(tmp_path: Path) -> None:
    arena, files = layout(SIZES)
    (tmp_path / "file").write_text("in the way")
    sealed = Sealer(KEY).begin(new_sealing(), arena, files)
    entries, outcomes = write_and_hash(arena, files, [str(tmp_path / "file")], sealed=sealed)
    assert entries == ()
    assert outcomes[0].error is not None


def test_tags_that_reach_over_the_border_of_a_chunk_are_hashed_as_they_lie_on_disk(tmp_path: Path) -> None:
    """A last chunk that leaves less room in its leaf than the tags take."""
    size = 2 * CHUNK_BYTES - TAG_BYTES
    arena = memoryview(bytearray(size))
    files, sealing = [ArenaFile(path="f", at=0, size=size)], new_sealing()
    sealed = Sealer(KEY).begin(sealing, arena, files)
    (entry,), _ = write_and_hash(arena, files, [str(tmp_path / "a")], sealed=sealed)
    whole = (tmp_path / "a" / "f").read_bytes()
    assert len(entry.leaves) == 3
    assert entry == msgspec.structs.replace(entry_of("f", whole), plain_size=size)


def test_a_salt_serves_once_and_only_the_key_that_it_names() -> None:
    arena, files = layout((4096,))
    sealer, sealing = Sealer(KEY), new_sealing()
    sealer.begin(sealing, arena, files)
    with pytest.raises(ValueError, match="nonces"):
        sealer.begin(sealing, arena, files)
    with pytest.raises(KeyRefused) as caught:
        sealer.begin(new_sealing(OTHER), arena, files)
    assert OTHER.id in caught.value.one_line()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir(0o700)
    new_key_file(folder / "run.key")
    return folder / "run.key"


def test_the_saver_process_reads_the_key_for_itself_and_shows_it_nowhere(
    tmp_path: Path, key_file: Path
) -> None:
    from verl_slurm.base.keys import read_key_file

    key = read_key_file(key_file)
    arena = Arena(8192)
    arena.view[: len(MARK)] = MARK
    files = (ArenaFile(path="actor/rank_0000.bin", at=0, size=8192),)
    saver = SaverProcess(arena, encryption=EncryptionConfig(key_file=str(key_file)))
    try:
        saver.wait_ready()
        argv = Path(f"/proc/{saver.pid}/cmdline").read_bytes()
        sealing = new_sealing(key)
        (written,) = saver.write(Write(files=files, directories=(str(tmp_path),), sealing=sealing))
    finally:
        saver.close()
        arena.close()
    (entry,) = written.files
    data = (tmp_path / entry.path).read_bytes()
    plain = MARK + bytes(8192 - len(MARK))
    assert data == CheckpointCipher(key, NAME, sealing.encryption).seal(entry.path, plain)
    secret = key_file.read_bytes().strip()
    assert secret not in argv
    assert bytes.fromhex(secret.decode()) not in argv
    assert str(key_file).encode() in argv


@pytest.mark.parametrize("with_key", [True, False])
def test_a_saver_and_a_rank_that_disagree_on_encrypting_write_nothing(
    tmp_path: Path, key_file: Path, with_key: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    arena = Arena(4096)
    files = (ArenaFile(path="x.bin", at=0, size=4096),)
    sealing = None if with_key else new_sealing()
    saver = SaverProcess(arena, encryption=EncryptionConfig(key_file=str(key_file)) if with_key else None)
    try:
        saver.wait_ready()
        with pytest.raises(SaverDied):
            saver.write(Write(files=files, directories=(str(tmp_path),), sealing=sealing))
    finally:
        saver.close()
        arena.close()
    assert not (tmp_path / "x.bin").exists()
    assert "do not agree on whether to encrypt" in capfd.readouterr().err


def test_a_saver_without_its_key_ends_with_one_line_and_the_exit_code_of_keys(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arena = Arena(4096)
    saver = SaverProcess(arena, encryption=EncryptionConfig(key_file=str(tmp_path / "gone.key")))
    try:
        with pytest.raises(SaverDied):
            saver.wait_ready()
    finally:
        saver.close()
        arena.close()
    assert saver._process.returncode == ExitCode.KEY
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert "gone.key" in said[0]
