"""Sealing while writing: the files are those that sealing them whole would give, on every medium, each nonce once."""

import errno
import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from verl_slurm.base.errors import KeyRefused
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.keys import MasterKey, new_key_file
from verl_slurm.checkpoint.format.encryption import TAG_BYTES, CheckpointCipher
from verl_slurm.checkpoint.format.specification import CHUNK_BYTES
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


@pytest.fixture
def short_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks, so that every buffer is used again and again."""
    monkeypatch.setattr(module, "RING_CHUNKS", 2)


@pytest.mark.parametrize("threads", [1, 3])
def test_every_medium_gets_what_sealing_the_whole_file_would_give(
    short_ring: None, tmp_path: Path, threads: int
) -> None:
    arena, files = layout(SIZES)
    before = hashlib.sha256(arena).digest()
    sealing = new_sealing()
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir(0o700)
    entries, outcomes = write_and_hash(
        arena,
        files,
        [str(place) for place in places],
        hashers=threads,
        stream=Sealer(KEY).begin(sealing, arena, files),
    )
    assert [outcome.error for outcome in outcomes] == [None, None]
    cipher = CheckpointCipher(KEY, NAME, sealing.encryption)
    for file, entry in zip(files, entries, strict=True):
        plain = bytes(arena[file.at : file.at + file.size])
        whole = cipher.seal(file.path, plain)
        assert all((place / file.path).read_bytes() == whole for place in places)
        assert entry == msgspec.structs.replace(entry_of(file.path, whole), plain_size=file.size)
        assert MARK not in whole
        assert cipher.open(entry, whole) == plain
    assert hashlib.sha256(arena).digest() == before


def test_a_medium_that_fails_early_or_late_does_not_hold_the_other_up(
    short_ring: None, tmp_path: Path
) -> None:
    arena, files = layout(SIZES)
    (tmp_path / "good").mkdir()
    late = tmp_path / "late" / files[-1].path
    late.parent.mkdir(parents=True)
    late.write_text("in the way")
    (tmp_path / "file").write_text("in the way")
    places = [str(tmp_path / name) for name in ("file", "good", "late")]
    entries, outcomes = write_and_hash(
        arena, files, places, hashers=2, stream=Sealer(KEY).begin(new_sealing(), arena, files)
    )
    assert [outcome.error is None for outcome in outcomes] == [False, True, False]
    for entry in entries:
        data = (tmp_path / "good" / entry.path).read_bytes()
        assert (
            entry_of(entry.path, data).sha256,
            len(data),
        ) == (entry.sha256, entry.size)


@pytest.mark.parametrize("breaks", [False, True], ids=["goes on", "and the fast one breaks"])
def test_a_medium_that_stands_still_is_left_behind_and_catches_up(
    short_ring: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    arena, files = layout(SIZES)
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
    entries, outcomes = write_and_hash(
        arena,
        files,
        [str(place) for place in places],
        stream=Sealer(KEY).begin(new_sealing(), arena, files, 0.0),
        on_done=told,
    )
    assert [outcome.error is None for outcome in outcomes] == [True, not breaks]
    assert breaks or done == ["fast", "slow"]
    for entry in entries:
        data = (places[0] / entry.path).read_bytes()
        assert entry_of(entry.path, data).sha256 == entry.sha256
    assert len(entries) == len(files)


def test_what_the_fast_medium_does_not_give_back_is_not_copied(
    short_ring: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena, files = layout(SIZES)
    go_on = threading.Event()
    pwrite = os.pwrite

    def slow(fd: int, data: memoryview, at: int) -> int:
        if "/slow/" in os.readlink(f"/proc/self/fd/{fd}"):
            assert go_on.wait(60)
        return pwrite(fd, data, at)

    def rot(written: Written) -> None:
        if written.directory.endswith("fast"):
            (tmp_path / "fast" / files[2].path).write_bytes(bytes(files[2].size))
            go_on.set()

    monkeypatch.setattr(os, "pwrite", slow)
    _, (outcome, _) = write_and_hash(
        arena,
        files,
        [str(tmp_path / "slow"), str(tmp_path / "fast")],
        stream=Sealer(KEY).begin(new_sealing(), arena, files, 0.0),
        on_done=rot,
    )
    assert outcome.errno == errno.EIO
    assert "give back" in (outcome.error or "")


def test_where_no_medium_takes_it_nothing_goes_on_and_there_are_no_entries(
    short_ring: None, tmp_path: Path
) -> None:
    arena, files = layout(SIZES)
    (tmp_path / "file").write_text("in the way")
    entries, outcomes = write_and_hash(
        arena, files, [str(tmp_path / "file")], stream=Sealer(KEY).begin(new_sealing(), arena, files)
    )
    assert entries == ()
    assert outcomes[0].error is not None


def test_a_sealer_that_breaks_ends_the_readers_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena, files = layout(SIZES)
    stream = Sealer(KEY).begin(new_sealing(), arena, files)

    def broken(*_: object) -> bytes:
        raise ValueError("a bug")

    monkeypatch.setattr("verl_slurm.checkpoint.format.encryption.ChunkSealer.seal_into", broken)
    with pytest.raises(ValueError, match="a bug"):
        write_and_hash(arena, files, [str(tmp_path)], hashers=2, stream=stream)


def test_tags_that_reach_over_the_border_of_a_chunk_are_hashed_as_they_lie_on_disk() -> None:
    last, tags = os.urandom(CHUNK_BYTES - TAG_BYTES), os.urandom(3 * TAG_BYTES)
    leaves = module._end_leaves(memoryview(last), memoryview(tags))
    whole = last + tags
    parts = [whole[start : start + CHUNK_BYTES] for start in range(0, len(whole), CHUNK_BYTES)]
    assert len(parts) == 2
    assert leaves == [hashlib.sha256(part).digest() for part in parts]


def test_a_salt_serves_once_and_only_the_key_that_it_names() -> None:
    arena, files = layout((4096,))
    sealer, sealing = Sealer(KEY), new_sealing()
    sealer.begin(sealing, arena, files)
    with pytest.raises(ValueError, match="nonces"):
        sealer.begin(sealing, arena, files)
    with pytest.raises(KeyRefused) as caught:
        sealer.begin(new_sealing(OTHER), arena, files)
    assert OTHER.id in caught.value.one_line()


def test_every_attempt_draws_a_salt_of_its_own() -> None:
    # 256 random bits: that they are drawn anew is what can break.
    with ThreadPoolExecutor(4) as pool:
        salts = list(pool.map(lambda _: new_sealing().encryption.salt, range(2000)))
    assert len(set(salts)) == len(salts)


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
    plain = CheckpointCipher(key, NAME, sealing.encryption).open(entry, data)
    assert plain == MARK + bytes(8192 - len(MARK))
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
