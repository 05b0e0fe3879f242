"""Encryption at rest: what is sealed opens, and nothing else does."""

import importlib.util
import itertools
import os
import struct
import threading
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings, strategies as st

from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.base.keys import MasterKey, Secret
from verl_slurm.checkpoint.format.encryption import (
    SEALED_CHUNK_BYTES,
    TAG_BYTES,
    CheckpointCipher,
    ChunkOpener,
    ChunkSealer,
    open_bytes,
    seal_bytes,
)
from verl_slurm.checkpoint.format.specification import (
    PLAIN_FILES,
    Encryption,
    FileEntry,
    sealed_chunks,
    sealed_size,
)

KEY = MasterKey(bytes(range(32)))
OTHER = MasterKey(bytes(range(1, 33)))
PATH = "actor/rank_0000.bin"
SMALL = 16
"""Bytes in a chunk of these tests: the borders are what matters."""


def load_plain_gcm() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plain_gcm", Path(__file__).with_name("plain_gcm.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plain_gcm = load_plain_gcm()


def file_key(
    name: str = "step_000012", path: str = PATH, key: MasterKey = KEY, salt: str = "ab" * 32
) -> Secret:
    return CheckpointCipher(key, name, Encryption(key_id=key.id, salt=salt)).file_key(path)


def entry_of(path: str, plain: bytes) -> FileEntry:
    return FileEntry(path=path, size=sealed_size(len(plain)), sha256="0" * 64, plain_size=len(plain))


def text(size: int) -> bytes:
    return bytes(i * 37 % 251 for i in range(size))


def small_open(data: bytes, plain_size: int, key: Secret | None = None, path: str = PATH) -> bytes:
    return open_bytes(key or file_key(), path, plain_size, data, chunk_bytes=SMALL)


def refused(data: bytes, plain_size: int, key: Secret | None = None, path: str = PATH) -> bool:
    try:
        small_open(data, plain_size, key, path)
    except CheckpointCorrupt:
        return True
    return False


@given(st.integers(0, 5 * SMALL + 1), st.data())
@settings(max_examples=80, deadline=None)
def test_what_was_sealed_opens_at_every_size_around_the_borders(size: int, data: st.DataObject) -> None:
    plain = data.draw(st.binary(min_size=size, max_size=size))
    sealed = seal_bytes(file_key(), PATH, plain, chunk_bytes=SMALL)
    assert len(sealed) == sealed_size(size, SMALL)
    assert small_open(sealed, size) == plain


@pytest.mark.parametrize(
    "size", [0, 1, SEALED_CHUNK_BYTES - 1, SEALED_CHUNK_BYTES, SEALED_CHUNK_BYTES + 1, 2 * SEALED_CHUNK_BYTES]
)
def test_what_was_sealed_opens_with_the_real_chunks(size: int) -> None:
    cipher = CheckpointCipher.begin(KEY, "step_000012")
    plain = os.urandom(size)
    sealed = cipher.seal(PATH, plain)
    assert len(sealed) == size + TAG_BYTES * max(1, -(-size // SEALED_CHUNK_BYTES))
    assert cipher.open(entry_of(PATH, plain), sealed) == plain


@pytest.mark.scenario("M12")
@pytest.mark.parametrize("size", [0, 1, SMALL, 2 * SMALL + 5])
def test_every_changed_bit_is_noticed(size: int) -> None:
    sealed = seal_bytes(file_key(), PATH, text(size), chunk_bytes=SMALL)
    for bit in range(8 * len(sealed)):
        bad = bytearray(sealed)
        bad[bit // 8] ^= 1 << bit % 8
        assert refused(bytes(bad), size), bit


@pytest.mark.scenario("M12")
def test_every_cut_is_noticed_with_the_size_it_had_and_with_any_other() -> None:
    size = 3 * SMALL
    sealed = seal_bytes(file_key(), PATH, text(size), chunk_bytes=SMALL)
    for length in range(len(sealed)):
        assert refused(sealed[:length], size)
    # A forger who drops the last chunk takes its tag along and changes the size: the last one is marked.
    for chunks in (1, 2):
        plain = chunks * SMALL
        assert refused(sealed[:plain] + sealed[size : size + chunks * TAG_BYTES], plain)
    assert refused(sealed + bytes(SMALL + TAG_BYTES), size + SMALL)


@pytest.mark.scenario("M12")
def test_chunks_in_another_order_are_noticed() -> None:
    size = 3 * SMALL
    sealed = seal_bytes(file_key(), PATH, text(size), chunk_bytes=SMALL)
    body = [sealed[i : i + SMALL] for i in range(0, size, SMALL)]
    tags = [sealed[i : i + TAG_BYTES] for i in range(size, len(sealed), TAG_BYTES)]
    for order in itertools.permutations(range(3)):
        data = b"".join([body[i] for i in order] + [tags[i] for i in order])
        assert refused(data, size) is (order != (0, 1, 2))


@pytest.mark.scenario("M12")
def test_a_chunk_of_another_file_checkpoint_attempt_or_key_is_noticed() -> None:
    size = 2 * SMALL
    sealed = seal_bytes(file_key(), PATH, text(size), chunk_bytes=SMALL)
    others = [
        file_key(path="actor/rank_0001.bin"),
        file_key(name="step_000013"),
        file_key(salt="cd" * 32),
        file_key(key=OTHER),
    ]
    for key in others:
        assert refused(sealed, size, key)
        foreign = seal_bytes(key, PATH, text(size), chunk_bytes=SMALL)
        mixed = (
            foreign[:SMALL]
            + sealed[SMALL:size]
            + foreign[size : size + TAG_BYTES]
            + sealed[size + TAG_BYTES :]
        )
        assert refused(mixed, size)
    assert refused(sealed, size, path="critic/rank_0000.bin")


def test_name_and_path_cannot_be_shifted_into_each_other() -> None:
    assert file_key("a", "b/c").reveal() != file_key("a/b", "c").reveal()


@pytest.mark.scenario("M12")
def test_two_attempts_at_one_checkpoint_share_no_key() -> None:
    first, second = (CheckpointCipher.begin(KEY, "step_000012") for _ in range(2))
    assert first.record.salt != second.record.salt
    assert first.file_key(PATH).reveal() != second.file_key(PATH).reveal()


@pytest.mark.scenario("M12")
@pytest.mark.parametrize(
    "saves", [2000, pytest.param(1_000_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_no_key_and_nonce_come_twice_in_so_many_saves_of_one_step(saves: int) -> None:
    """A nonce is a chunk's number; so a key is never there twice, though name, path and master key are the same."""
    keys = {CheckpointCipher.begin(KEY, "step_000012").file_key(PATH).reveal() for _ in range(saves)}
    assert len(keys) == saves


@pytest.mark.scenario("M12")
def test_a_chunk_is_sealed_once_and_never_again_even_by_threads() -> None:
    sealer = ChunkSealer(file_key(), PATH, SMALL, chunk_bytes=SMALL)
    done: list[bytes] = []
    start = threading.Barrier(4)

    def seal() -> None:
        start.wait()
        try:
            done.append(sealer.seal_into(0, memoryview(bytes(SMALL)), memoryview(bytearray(SMALL))))
        except ValueError as error:
            assert "nonce" in str(error)  # noqa: PT017

    threads = [threading.Thread(target=seal) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 1


@pytest.mark.parametrize(
    ("index", "given", "room"), [(2, 1, 1), (-1, 16, 16), (0, 15, 16), (0, 16, 17), (1, 16, 16)]
)
def test_lengths_that_do_not_fit_are_refused_before_anything_is_written(
    index: int, given: int, room: int
) -> None:
    sealer = ChunkSealer(file_key(), PATH, SMALL + 1, chunk_bytes=SMALL)
    out = bytearray(b"x" * room)
    with pytest.raises(ValueError):
        sealer.seal_into(index, memoryview(bytes(given)), memoryview(out))
    assert out == b"x" * room


@pytest.mark.scenario("M12")
def test_what_does_not_open_leaves_no_plaintext_behind() -> None:
    plain = text(SMALL)
    out, opened = bytearray(SMALL), bytearray(b"x" * SMALL)
    tag = ChunkSealer(file_key(), PATH, SMALL, chunk_bytes=SMALL).seal_into(
        0, memoryview(plain), memoryview(out)
    )
    opener = ChunkOpener(file_key(), PATH, SMALL, chunk_bytes=SMALL)
    with pytest.raises(CheckpointCorrupt):
        opener.open_into(0, memoryview(out), bytes(TAG_BYTES), memoryview(opened))
    assert opened == bytes(SMALL)
    opener.open_into(0, memoryview(out), tag, memoryview(opened))
    assert opened == plain


@pytest.mark.scenario("M12")
def test_a_tag_that_was_cut_is_refused() -> None:
    opener = ChunkOpener(file_key(), PATH, 1, chunk_bytes=SMALL)
    with pytest.raises(ValueError):
        opener.open_into(0, memoryview(b"x"), bytes(4), memoryview(bytearray(1)))


def test_the_files_that_stay_plain_stay_plain() -> None:
    cipher = CheckpointCipher.begin(KEY, "step_000012")
    for path in PLAIN_FILES:
        assert cipher.seal(path, b"text") == b"text"
        assert cipher.open(FileEntry(path=path, size=4, sha256="0" * 64), b"text") == b"text"


@pytest.mark.parametrize(
    ("key", "iv", "plain", "aad", "cipher", "tag"),
    # McGrew and Viega, "The Galois/Counter Mode of Operation (GCM)", test cases 13, 14 and 16.
    [
        ("00" * 32, "00" * 12, "", "", "", "530f8afbc74536b9a963b4f1c4cb738b"),
        (
            "00" * 32,
            "00" * 12,
            "00" * 16,
            "",
            "cea7403d4d606b6e074ec5d3baf39d18",
            "d0d1c8a799996bf0265b98b5d48ab919",
        ),
        (
            "feffe9928665731c6d6a8f9467308308" * 2,
            "cafebabefacedbaddecaf888",
            (
                "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
                "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39"
            ),
            "feedfacedeadbeeffeedfacedeadbeefabaddad2",
            (
                "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
                "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662"
            ),
            "76fc6ece0f4e1768cddf8853bb2d551b",
        ),
    ],
)
def test_the_independent_gcm_is_right(key: str, iv: str, plain: str, aad: str, cipher: str, tag: str) -> None:
    sealed = plain_gcm.seal(*map(bytes.fromhex, (key, iv, plain, aad)))
    assert sealed == (bytes.fromhex(cipher), bytes.fromhex(tag))


def test_the_independent_hkdf_is_right() -> None:
    """RFC 5869, test case 1, its first 32 bytes."""
    made = plain_gcm.hkdf32(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)))
    assert made.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"


@pytest.mark.parametrize("size", [0, 5, 2 * SMALL, 2 * SMALL + 5])
def test_a_sealed_file_is_what_the_specification_says_by_an_independent_implementation(size: int) -> None:
    plain = text(size)
    info = b"verl-slurm file v1\0step_000012\0" + PATH.encode()
    key = plain_gcm.hkdf32(bytes(range(32)), bytes.fromhex("ab" * 32), info)
    body, tags = b"", b""
    count = sealed_chunks(size, SMALL)
    for index in range(count):
        aad = struct.pack(">QQB", index, size, index == count - 1) + PATH.encode()
        cipher, tag = plain_gcm.seal(key, index.to_bytes(12, "big"), plain[index * SMALL :][:SMALL], aad)
        body, tags = body + cipher, tags + tag
    assert seal_bytes(file_key(), PATH, plain, chunk_bytes=SMALL) == body + tags


def test_a_whole_file_agrees_with_the_one_shot_interface_of_the_library() -> None:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    plain = os.urandom(SEALED_CHUNK_BYTES + 7)
    sealed = seal_bytes(file_key(), PATH, plain)
    for index, (start, end) in enumerate(
        [(0, SEALED_CHUNK_BYTES), (SEALED_CHUNK_BYTES, SEALED_CHUNK_BYTES + 7)]
    ):
        tag = sealed[len(plain) + index * TAG_BYTES :][:TAG_BYTES]
        aad = struct.pack(">QQB", index, len(plain), index == 1) + PATH.encode()
        opened = AESGCM(file_key().reveal()).decrypt(index.to_bytes(12, "big"), sealed[start:end] + tag, aad)
        assert opened == plain[start:end]
