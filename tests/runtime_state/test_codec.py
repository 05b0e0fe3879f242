import io
import shutil
import struct
import subprocess
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.runtime_state import record
from verl_slurm.runtime_state.codec import decode, encode
from verl_slurm.runtime_state.format import (
    DTYPES,
    FREE_BYTES,
    HISTORY_ROWS,
    MAX_CONTENT_BYTES,
    MAX_EXPANSION,
    MAX_FRAME_BYTES,
    MAX_HEAD_BYTES,
    RuntimeState,
)
from verl_slurm.runtime_state.record import pack, unpack

Head = list[Any]
"""[fields, arrays, frames]."""


def same(a: Any, b: Any) -> bool:
    """Bit for bit, type for type."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and (a.dtype, a.shape, a.tobytes()) == (
            b.dtype,
            b.shape,
            b.tobytes(),
        )
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and repr(a) == repr(b)


def frame(content: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**({"write_checksum": True} | options)).compress(content)


def in_one(head_frame: bytes, *rest: bytes) -> bytes:
    """What format.py, section 1, says; from the outside."""
    return struct.pack("<II8sI", 0x184D2A5B, 12, b"VSRECRD1", len(head_frame)) + head_frame + b"".join(rest)


def head_of(data: bytes) -> Head:
    (size,) = struct.unpack_from("<I", data, 16)
    head: Head = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(data[20 : 20 + size]))
    return head


def put_together(fields: Any, arrays: list[Any], *content: bytes, frames: list[int] | None = None) -> bytes:
    """A record of that head, and one frame for each of `content`."""
    packed = [frame(part) for part in content]
    sizes = [len(part) for part in packed] if frames is None else frames
    return in_one(frame(msgspec.msgpack.encode([fields, arrays, sizes])), *packed)


def array_of(name: str = "rewards.x", dtype: Any = "uint8", shape: Any = (1,)) -> list[Any]:
    return [name, dtype, list(shape)]


def again(arrays: dict[str, Any]) -> dict[str, Any]:
    """Packed and read."""
    return unpack(pack(None, arrays), type(None), where="x")[1]


@pytest.fixture
def fields(state: RuntimeState) -> dict[str, Any]:
    """Of a state without arrays."""
    found: dict[str, Any] = head_of(encode(msgspec.structs.replace(state, rollouts={}, rewards={}, rng={})))[
        0
    ]
    return found


def test_a_state_comes_back_bit_for_bit(state: RuntimeState) -> None:
    back = decode(encode(state))
    for field in RuntimeState.__struct_fields__:
        assert same(getattr(state, field), getattr(back, field)), field
    back.rollouts["sample_id"][0] = 7  # its own, writable
    assert encode(decode(encode(state))) == encode(state)


def test_only_the_tail_of_the_history_travels(state: RuntimeState) -> None:
    rows = [{"step": float(i)} for i in range(HISTORY_ROWS + 5)]
    back = decode(encode(msgspec.structs.replace(state, history=rows)))
    assert back.history == rows[-HISTORY_ROWS:]


@pytest.mark.parametrize(
    "arrays", [{"x": np.array([object()])}, {"x": np.array(["a"])}, {"a/b": np.zeros(1)}, {"": np.zeros(1)}]
)
def test_what_the_format_does_not_know_is_not_written(state: RuntimeState, arrays: Any) -> None:
    with pytest.raises(ValueError, match="rewards"):
        encode(msgspec.structs.replace(state, rewards=arrays))


def test_any_flipped_bit_and_any_truncation_is_refused(state: RuntimeState) -> None:
    data = encode(state)
    for at in range(0, len(data) * 8, 11):
        broken = bytearray(data)
        broken[at // 8] ^= 1 << at % 8
        try:
            back = decode(bytes(broken))
        except CheckpointCorrupt:
            continue
        assert encode(back) == encode(state)  # a bit that zstd does not use
    for end in range(0, len(data), 7):
        with pytest.raises(CheckpointCorrupt):
            decode(data[:end])
    for more in (b"\0", data):
        with pytest.raises(CheckpointCorrupt):
            decode(data + more)


def test_bombs_are_refused_by_what_they_declare(fields: dict[str, Any]) -> None:
    bomb = frame(bytes(MAX_FRAME_BYTES + 1))
    huge = b"\x28\xb5\x2f\xfd\xe4" + (1 << 40).to_bytes(8, "little") + bytes(20)
    assert len(bomb) < 200
    big = [fields, [array_of(shape=[MAX_FRAME_BYTES + 1])]]
    for broken in (bomb, huge):
        with pytest.raises(CheckpointCorrupt, match="at most"):
            decode(in_one(frame(msgspec.msgpack.encode([*big, [len(broken)]])), broken))
    for broken in (frame(bytes(MAX_HEAD_BYTES + 1)), huge):
        with pytest.raises(CheckpointCorrupt, match="at most"):
            decode(in_one(broken))


def test_arrays_that_are_mostly_claims_are_refused_before_they_are_made(fields: dict[str, Any]) -> None:
    half = FREE_BYTES // 2 + 500_000
    for claims in (
        [array_of(shape=[MAX_CONTENT_BYTES])],
        [array_of(shape=[1 << 15, 1 << 15], dtype="int64")],
        [array_of(shape=[FREE_BYTES + (1 << 20)], dtype="bool")],
        [array_of(shape=[half]), array_of("rewards.y", shape=[half])],
    ):
        tracemalloc.start()
        try:
            with pytest.raises(CheckpointCorrupt, match="at most"):
                decode(put_together(fields, claims))
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_what_is_large_and_empty_brings_its_bytes_and_comes_back() -> None:
    empty = {"x": np.zeros((FREE_BYTES + 3_000_000) // 8, np.int64)}
    data = pack(None, empty)
    assert empty["x"].nbytes <= FREE_BYTES + MAX_EXPANSION * len(data)
    assert len(data) < 60_000
    assert same(unpack(data, type(None), where="x")[1], empty)


def test_decoding_needs_the_arrays_and_some_frames_besides() -> None:
    array = np.random.default_rng(0).integers(0, 150_000, 1_500_000)
    data = pack(None, {"x": array})
    tracemalloc.start()
    try:
        unpack(data, type(None), where="x")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < array.nbytes + 8 * MAX_FRAME_BYTES


def test_frames_that_lie_about_their_size_or_leave_it_or_the_checksum_out_are_refused(
    fields: dict[str, Any],
) -> None:
    lying = bytearray(frame(bytes(1000), level=1))
    assert zstandard.get_frame_parameters(bytes(lying)).content_size == 1000
    lying[5:7] = (100).to_bytes(2, "little")
    claim = [fields, [array_of(shape=[1000])]]
    decode(put_together(*claim, bytes(1000)))
    good = frame(bytes(1000))
    for broken in (
        bytes(lying),
        frame(bytes(1000), write_content_size=False),
        frame(bytes(1000), write_checksum=False),
        frame(bytes(999)),
        frame(bytes(1001)),
        frame(b""),
        good[:-1],
        good + b"\0",
        good + good,  # two frames where one was declared
        b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + good,  # a skippable frame before it
        good + b"\x50\x2a\x4d\x18\x04\0\0\0abcd",
        b"\x50\x2a\x4d\x18\xff\xff\xff\xff",
    ):
        head = frame(msgspec.msgpack.encode([*claim, [len(broken)]]))
        with pytest.raises(CheckpointCorrupt):
            decode(in_one(head, broken))
        with pytest.raises(CheckpointCorrupt):
            decode(in_one(broken))
        with pytest.raises(CheckpointCorrupt):
            decode(broken)


def test_frames_that_do_not_add_up_are_refused(fields: dict[str, Any]) -> None:
    claim = [fields, [array_of(shape=[1000])]]
    good, half = frame(bytes(1000)), frame(bytes(500))
    decode(in_one(frame(msgspec.msgpack.encode([*claim, [len(half)] * 2])), half, half))
    for sizes, rest in (
        ([], good),
        ([], b""),
        ([len(good) - 1], good),
        ([len(good) + 1], good),
        ([len(good)], good + good),
        ([len(good)], good + b"\0"),
        ([len(good)] * 2, good + good),
        ([len(half)], half),
        ([2**31], good),
        ([1] * 300_000, good),
        ([0], good),
        ([-1], good),
    ):
        with pytest.raises(CheckpointCorrupt):
            decode(in_one(frame(msgspec.msgpack.encode([*claim, sizes])), rest))


@pytest.mark.parametrize("misreading", [{}, None, {1: object()}, ValueError("truncated")])
def test_a_head_that_msgpack_reads_differently_is_neither_written_nor_read(
    misreading: object, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = put_together(fields, [])
    state = decode(data)

    def misread(_: bytes, **__: object) -> object:
        if isinstance(misreading, Exception):
            raise misreading
        return misreading

    monkeypatch.setattr(msgpack, "unpackb", misread)
    with pytest.raises(CheckpointCorrupt, match="read the head differently"):
        decode(data)
    with pytest.raises(ValueError, match="read the head differently"):
        encode(state)


def test_a_head_must_be_canonical(fields: dict[str, Any]) -> None:
    raw = msgspec.msgpack.encode(fields)
    decode(in_one(frame(b"\x93" + raw + b"\x90\x90")))
    doubled = bytes([raw[0] + 1]) + raw[1:] + msgpack.packb("step") + msgpack.packb(13)
    assert raw[0] & 0xF0 == 0x80
    long_map = b"\xde\x00" + bytes([raw[0] & 15]) + raw[1:]
    for broken in (doubled + b"\x90\x90", raw + b"\x90\x90\xc0", raw + b"\x90", long_map + b"\x90\x90"):
        with pytest.raises(CheckpointCorrupt):
            decode(in_one(frame(b"\x93" + broken)))
    change: dict[str, Any]
    for change in (
        {"kl_coef": 1},
        {"step": -1},
        {"step": 12.0},
        {"rank": 2},
        {"phase": "rest"},
        {"run_this": 1},
        {"history": [{}]},
        {"kl_window": ["x"]},
        {"rng": {"torch": "x"}},
    ):
        with pytest.raises(CheckpointCorrupt):
            decode(put_together(fields | change, []))


@pytest.mark.parametrize(
    ("array", "data"),
    [
        (array_of(dtype="object"), b"\0" * 8),
        (array_of(dtype="V8"), b"\0" * 8),
        (array_of(dtype="bytes"), b"\0"),
        (array_of(dtype="float64", shape=[2]), b"\0" * 8),
        (array_of(dtype="bool", shape=[8]), b"\2" * 8),
        (array_of(shape=[2**31, 2**31, 2**31]), b"\0" * 8),
        (array_of(shape=[0, 2**30, 2**30, 2**30]), b""),
        (array_of(shape=[-1]), b"\0" * 8),
        (array_of(shape=[1] * 9), b"\0"),
        (array_of("rewards.../x"), b"\0"),
        (array_of("rewards.x\n"), b"\0"),
        (array_of("weights.x"), b"\0"),
        (array_of("rewards"), b"\0"),
        ([*array_of(), 8], b"\0"),
    ],
)
def test_an_array_that_is_not_what_it_says_is_refused(
    fields: dict[str, Any], array: list[Any], data: bytes
) -> None:
    assert decode(put_together(fields, [array_of()], b"\7")).rewards["x"].tolist() == [7]
    with pytest.raises(CheckpointCorrupt):
        decode(put_together(fields, [array], *([data] if data else [])))
    # Twice, too few, too many.
    for arrays, content in (
        ([array_of()] * 2, [b"ab"]),
        ([array_of()], []),
        ([array_of()], [b"ab"]),
        ([array_of(f"rewards.{i}", shape=[0]) for i in range(4097)], []),
    ):
        with pytest.raises(CheckpointCorrupt):
            decode(put_together(fields, arrays, *content))


def test_an_error_names_the_file_and_the_remedy_and_another_version(fields: dict[str, Any]) -> None:
    with pytest.raises(CheckpointCorrupt, match="runtime_state.rank_0003") as caught:
        decode(b"garbage", where="runtime_state.rank_0003.msgpack.zst")
    assert caught.value.remedy is not None
    with pytest.raises(CheckpointCorrupt, match="version 1"):
        decode(put_together(fields, []).replace(b"VSRECRD1", b"VSRECRD2"))


def test_the_limit_of_a_record_is_held_when_it_is_written() -> None:
    with pytest.raises(ValueError, match="at most 100"):
        pack(None, {"x": np.zeros(1000, np.uint8)}, limit=100)
    noise = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
    with pytest.raises(ValueError, match="at most 1000"):  # what is around it counts
        pack(None, {"x": noise}, limit=1000)
    with pytest.raises(ValueError, match="a head of"):
        pack(bytes(MAX_HEAD_BYTES), {})


def test_token_ids_repeated_text_and_floats_of_a_kind_shrink() -> None:
    draw = np.random.default_rng(0)
    assert len(pack(None, {"x": draw.integers(0, 256, 100_000)})) < 101_000
    assert len(pack(None, {"x": draw.integers(0, 150_000, 100_000)})) < 240_000
    prompts = np.repeat(draw.integers(0, 150_000, (100, 300)), 8, axis=0)
    assert len(pack(None, {"x": prompts})) < prompts.nbytes / 8
    logprobs = -draw.gamma(0.35, 1.0, 200_000).astype(np.float32)
    assert len(pack(None, {"x": logprobs})) < 0.87 * logprobs.nbytes


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_arrays_of_any_values_come_back_over_chunks_and_frames(data: st.DataObject) -> None:
    arrays = {}
    for name in "abc"[: data.draw(st.integers(1, 3))]:
        kind = data.draw(st.sampled_from(DTYPES))
        array = data.draw(hnp.arrays(kind, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=24)))
        if array.dtype.kind in "iu":  # every number of bits, not only all of them
            array = array >> array.dtype.type(data.draw(st.integers(0, array.dtype.itemsize * 8 - 1)))
        swapped = array.astype(array.dtype.newbyteorder(">"))
        strided = array[..., ::2] if array.ndim else array
        arrays[name] = data.draw(st.sampled_from([array, array.T, strided, swapped]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "MAX_FRAME_BYTES", 64)
        # The limit is crossed, so frames are cut smaller.
        patch.setattr(record, "FREE_BYTES", data.draw(st.sampled_from([0, FREE_BYTES])))
        patch.setattr(record, "MAX_EXPANSION", data.draw(st.sampled_from([1, MAX_EXPANSION])))
        patch.setattr(record, "SPARSE_FRAME_BYTES", data.draw(st.integers(1, 16)))
        kept = {name: np.ascontiguousarray(a).reshape(a.shape) for name, a in arrays.items()}
        assert same(again(arrays), {name: a.astype(a.dtype.newbyteorder("=")) for name, a in kept.items()})


def test_threads_that_write_at_the_same_time_do_not_disturb_each_other() -> None:
    def write(seed: int) -> list[bytes]:
        arrays = {str(i): np.random.default_rng(seed).integers(0, 9, 20_000) for i in range(3)}
        return [pack(seed, arrays) for _ in range(5)]

    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(write, range(4)))
    assert made == [write(seed) for seed in range(4)]


def test_arrays_of_many_chunks_come_back_and_a_bool_of_another_byte_is_true() -> None:
    draw = np.random.default_rng(0)
    size = 2 * MAX_FRAME_BYTES + 5
    big = {
        "ids": draw.integers(0, 150_000, size),
        "mask": draw.random(size) < 0.5,
        "signed": draw.integers(-5, 5, size).astype(np.int16),
        "logprobs": draw.standard_normal(size).astype(np.float32),
    }
    assert same(again(big), big)
    odd = np.array([0, 1, 2, 255], np.uint8).view(np.bool_)
    assert again({"x": odd})["x"].view(np.uint8).tolist() == [0, 1, 1, 1]


def test_the_file_is_one_that_the_zstd_command_reads(state: RuntimeState) -> None:
    data = encode(state)
    content = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True).read()
    assert content.startswith(msgspec.msgpack.encode(head_of(data)))
    if shutil.which("zstd"):
        done = subprocess.run(["zstd", "-dc"], input=data, capture_output=True, check=True)
        assert done.stdout == content
