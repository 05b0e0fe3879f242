"""Encryption at rest: what is sealed opens, and nothing else does."""

import hmac
import itertools
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings, strategies as st

from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.base.keys import MasterKey, Secret
from verl_slurm.checkpoint.format import encryption, specification
from verl_slurm.checkpoint.format.encryption import TAG_BYTES, CheckpointCipher, ChunkOpener, ChunkSealer
from verl_slurm.checkpoint.format.specification import PLAIN_FILES, Encryption, sealed_chunks, sealed_size

KEY = MasterKey(bytes(range(32)))
OTHER = MasterKey(bytes(range(1, 33)))
PATH = "actor/rank_0000.bin"
SMALL = 16
"""Bytes in a chunk of these tests: the borders are what matters."""


def file_key(
    name: str = "step_000012", path: str = PATH, key: MasterKey = KEY, salt: str = "ab" * 32
) -> Secret:
    return CheckpointCipher(key, name, Encryption(key_id=key.id, salt=salt)).file_key(path)


def text(size: int) -> bytes:
    return bytes(i * 37 % 251 for i in range(size))


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    """The borders of chunks are what matters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encryption, "SEALED_CHUNK_BYTES", SMALL)
        patch.setattr(specification, "SEALED_CHUNK_BYTES", SMALL)
        yield


def seal(key: Secret, plain: bytes) -> bytes:
    sealer, out = ChunkSealer(key, PATH, len(plain)), bytearray(len(plain))
    at = [slice(i * SMALL, i * SMALL + sealer.length(i)) for i in range(sealer.num_chunks)]
    tags = [sealer.seal_into(i, memoryview(plain)[part], memoryview(out)[part]) for i, part in enumerate(at)]
    return bytes(out) + b"".join(tags)


def opened(data: bytes, plain_size: int, key: Secret | None = None, path: str = PATH) -> bytes | None:
    """Its plain bytes as a reader gets them; None: it is refused."""
    opener, out = ChunkOpener(key or file_key(), path, plain_size), bytearray(plain_size)
    if len(data) != sealed_size(plain_size):
        return None
    try:
        for i in range(opener.num_chunks):
            part = slice(i * SMALL, i * SMALL + opener.length(i))
            tag = data[plain_size + i * TAG_BYTES :][:TAG_BYTES]
            opener.open_into(i, memoryview(data)[part], tag, memoryview(out)[part])
    except CheckpointCorrupt:
        return None
    return bytes(out)


@pytest.mark.scenario("M12")
@given(size=st.integers(0, 4 * SMALL + 1), data=st.data())
@settings(max_examples=200, deadline=None)
def test_what_was_sealed_opens_and_no_other_bytes_do(size: int, data: st.DataObject) -> None:
    plain = data.draw(st.binary(min_size=size, max_size=size))
    sealed = seal(file_key(), plain)
    assert sealed == CheckpointCipher(KEY, "step_000012", Encryption(key_id=KEY.id, salt="ab" * 32)).seal(
        PATH, plain
    )
    assert len(sealed) == sealed_size(size)
    assert opened(sealed, size) == plain
    changed = bytearray(sealed)
    changed[data.draw(st.integers(0, len(sealed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert opened(bytes(changed), size) is None
    assert opened(sealed[: data.draw(st.integers(0, len(sealed) - 1))], size) is None
    # A forger who drops the last chunk takes its tag along and changes the size: the last one is marked.
    for less in range(SMALL, size, SMALL):
        assert opened(sealed[:less] + sealed[size : size + less // SMALL * TAG_BYTES], less) is None
    others = [
        file_key(path="actor/rank_0001.bin"),
        file_key(name="step_000013"),
        file_key(salt="cd" * 32),
        file_key(key=OTHER),
    ]
    foreign = data.draw(st.sampled_from(others))
    assert opened(sealed, size, foreign) is None
    assert opened(sealed, size, path="critic/rank_0000.bin") is None
    # One chunk of the same bytes from another file, checkpoint, attempt or key.
    chunk = data.draw(st.integers(0, max(0, (size - 1) // SMALL)))
    mixed, theirs = bytearray(sealed), seal(foreign, plain)
    for part in (slice(chunk * SMALL, min(size, (chunk + 1) * SMALL)), slice(size + chunk * TAG_BYTES, None)):
        mixed[part] = theirs[part]
    assert opened(bytes(mixed), size) is None


@pytest.mark.scenario("M12")
def test_chunks_in_another_order_are_noticed() -> None:
    size = 3 * SMALL
    sealed = seal(file_key(), text(size))
    body = [sealed[i : i + SMALL] for i in range(0, size, SMALL)]
    tags = [sealed[i : i + TAG_BYTES] for i in range(size, len(sealed), TAG_BYTES)]
    for order in itertools.permutations(range(3)):
        data = b"".join([body[i] for i in order] + [tags[i] for i in order])
        assert (opened(data, size) is None) is (order != (0, 1, 2))


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
def test_a_nonce_serves_for_one_text_even_by_threads() -> None:
    """Sealed again for another medium a chunk is the same; with other bytes nothing of it comes out."""
    sealer = ChunkSealer(file_key(), PATH, SMALL)
    results: list[tuple[bytes, bytes]] = []
    start = threading.Barrier(4)

    def seal_text(plain: bytes) -> None:
        out = bytearray(SMALL)
        start.wait()
        try:
            results.append((sealer.seal_into(0, memoryview(plain), memoryview(out)), bytes(out)))
        except ValueError as error:
            assert "nonce" in str(error)  # noqa: PT017
            assert out == bytes(SMALL)

    threads = [threading.Thread(target=seal_text, args=(plain,)) for plain in [text(SMALL), b"x" * SMALL] * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert len(set(results)) == 1


@pytest.mark.parametrize(
    ("index", "given", "room"), [(2, 1, 1), (-1, 16, 16), (0, 15, 16), (0, 16, 17), (1, 16, 16)]
)
def test_lengths_that_do_not_fit_are_refused_before_anything_is_written(
    index: int, given: int, room: int
) -> None:
    sealer = ChunkSealer(file_key(), PATH, SMALL + 1)
    out = bytearray(b"x" * room)
    with pytest.raises(ValueError):
        sealer.seal_into(index, memoryview(bytes(given)), memoryview(out))
    assert out == b"x" * room


@pytest.mark.scenario("M12")
def test_what_does_not_open_leaves_no_plaintext_behind() -> None:
    plain = text(SMALL)
    out, found = bytearray(SMALL), bytearray(b"x" * SMALL)
    tag = ChunkSealer(file_key(), PATH, SMALL).seal_into(0, memoryview(plain), memoryview(out))
    opener = ChunkOpener(file_key(), PATH, SMALL)
    with pytest.raises(CheckpointCorrupt):
        opener.open_into(0, memoryview(out), bytes(TAG_BYTES), memoryview(found))
    assert found == bytes(SMALL)
    opener.open_into(0, memoryview(out), tag, memoryview(found))
    assert found == plain


@pytest.mark.scenario("M12")
def test_a_tag_that_was_cut_is_refused() -> None:
    opener = ChunkOpener(file_key(), PATH, 1)
    with pytest.raises(ValueError):
        opener.open_into(0, memoryview(b"x"), bytes(4), memoryview(bytearray(1)))


def test_the_files_that_stay_plain_stay_plain() -> None:
    cipher = CheckpointCipher.begin(KEY, "step_000012")
    for path in PLAIN_FILES:
        assert cipher.seal(path, b"text") == b"text"


@pytest.mark.parametrize("size", [0, 5, 2 * SMALL, 2 * SMALL + 5])
def test_a_sealed_file_is_what_the_specification_says_by_the_library_s_one_shot_interface(size: int) -> None:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    # RFC 5869: extract, then the first 32 bytes of expand.
    info = b"verl-slurm file v1\0step_000012\0" + PATH.encode()
    extracted = hmac.digest(bytes.fromhex("ab" * 32), bytes(range(32)), "sha256")
    cipher = AESGCM(hmac.digest(extracted, info + b"\1", "sha256"))
    plain, count = text(size), sealed_chunks(size)
    body, tags = b"", b""
    for index in range(count):
        aad = struct.pack(">QQB", index, size, index == count - 1) + PATH.encode()
        made = cipher.encrypt(index.to_bytes(12, "big"), plain[index * SMALL :][:SMALL], aad)
        body, tags = body + made[:-TAG_BYTES], tags + made[-TAG_BYTES:]
    assert seal(file_key(), plain) == body + tags
