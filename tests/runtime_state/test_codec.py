import io
import shutil
import struct
import subprocess
import tracemalloc
from collections.abc import Callable
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
from verl_slurm.runtime_state import frames, planes
from verl_slurm.runtime_state.codec import decode, encode
from verl_slurm.runtime_state.container import pack, specify, unpack
from verl_slurm.runtime_state.format import (
    CHUNK_ITEMS,
    DTYPES,
    FREE_BYTES,
    HISTORY_ROWS,
    MAX_CONTENT_BYTES,
    MAX_EXPANSION,
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    RecordHeader,
    RuntimeState,
)


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


def container(header_frame: bytes, *rest: bytes) -> bytes:
    """What format.py, section 1, says; from the outside."""
    return (
        struct.pack("<II8sI", 0x184D2A5B, 12, b"VSLRTST2", len(header_frame)) + header_frame + b"".join(rest)
    )


def taken_apart(data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """The header as a map, and the frames behind it."""
    (size,) = struct.unpack_from("<I", data, 16)
    header = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(data[20 : 20 + size]))
    at, found = 20 + size, []
    for length in header["frames"]:
        found.append(data[at : at + length])
        at += length
    return header, found


def put_together(header: dict[str, Any], *content: bytes, **options: Any) -> bytes:
    """A container of that header, and one frame for each of `content`."""
    packed = [frame(part, **options) for part in content]
    header = header | {"frames": [len(part) for part in packed]}
    return container(frame(msgspec.msgpack.encode(header)), *packed)


def array_of(**change: Any) -> dict[str, Any]:
    return {"group": "rewards", "name": "x", "dtype": "uint8", "shape": [1], "bits": 8} | change


def records(blobs: dict[str, Any]) -> RecordHeader:
    return RecordHeader(step=0, micro_batch=0, arrays=specify("r", blobs), frames=[])


@pytest.fixture
def header(state: RuntimeState) -> dict[str, Any]:
    """Of a state without arrays."""
    return taken_apart(encode(msgspec.structs.replace(state, rollouts={}, rewards={}, rng={})))[0]


def test_a_state_comes_back_bit_for_bit(state: RuntimeState) -> None:
    back = decode(encode(state))
    for field in RuntimeState.__struct_fields__:
        assert same(getattr(state, field), getattr(back, field)), field
    back.rollouts["sample_id"][0] = 7  # its own, writable
    assert encode(decode(encode(state))) == encode(state)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "bytes"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 5)])
def test_every_dtype_and_shape_comes_back(state: RuntimeState, dtype: str, shape: tuple[int, ...]) -> None:
    raw = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    back = decode(encode(msgspec.structs.replace(state, rewards={"x": raw})))
    assert same(back.rewards["x"], raw)


def test_big_endian_and_strided_arrays_are_stored_by_value(state: RuntimeState) -> None:
    big = np.arange(6, dtype=">i4")
    strided = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::3].T
    back = decode(encode(msgspec.structs.replace(state, rewards={"big": big, "strided": strided})))
    assert back.rewards["big"].dtype == np.int32
    assert (back.rewards["big"] == big).all()
    assert same(back.rewards["strided"], np.ascontiguousarray(strided))


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


def test_bombs_are_refused_by_what_they_declare(
    header: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = frame(bytes(MAX_FRAME_BYTES + 1))
    huge = b"\x28\xb5\x2f\xfd\xe4" + (1 << 40).to_bytes(8, "little") + bytes(20)
    assert len(bomb) < 200
    big = header | {"arrays": [array_of(shape=[MAX_FRAME_BYTES + 1])]}
    for broken in (bomb, huge):
        with_it = msgspec.msgpack.encode(big | {"frames": [len(broken)]})
        with pytest.raises(CheckpointCorrupt, match="at most"):
            decode(container(frame(with_it), broken))
    monkeypatch.setattr(frames.zstandard, "ZstdDecompressor", None)
    for broken in (frame(bytes(MAX_HEADER_BYTES + 1)), huge):
        with pytest.raises(CheckpointCorrupt, match="at most"):
            decode(container(broken))


def test_arrays_that_are_mostly_claims_are_refused_before_they_are_made(header: dict[str, Any]) -> None:
    for shape, dtype, bits in (
        ([MAX_CONTENT_BYTES], "uint8", 0),
        ([MAX_CONTENT_BYTES], "uint8", 8),
        ([1 << 15, 1 << 15], "int64", 0),
        ([FREE_BYTES + (1 << 20)], "bool", 0),
    ):
        claim = header | {"arrays": [array_of(shape=shape, dtype=dtype, bits=bits)]}
        tracemalloc.start()
        try:
            with pytest.raises(CheckpointCorrupt, match="at most"):
                decode(put_together(claim))
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
    half = array_of(shape=[FREE_BYTES // 2 + 500_000], bits=0)
    both = [half, half | {"name": "y"}]
    with pytest.raises(CheckpointCorrupt, match="at most"):
        decode(put_together(header | {"arrays": both}))


def test_what_is_large_and_empty_is_padded_and_comes_back(state: RuntimeState) -> None:
    empty = np.zeros(FREE_BYTES + 3_000_000, np.uint8)
    data = encode(msgspec.structs.replace(state, rewards={"x": empty}))
    assert empty.nbytes <= FREE_BYTES + MAX_EXPANSION * len(data)
    assert len(data) < 5_000
    assert same(decode(data).rewards["x"], empty)
    spoiled = data[:-1] + b"\1"
    for broken in (spoiled, data + b"\0", data[:-1], data + data[-300:]):
        with pytest.raises(CheckpointCorrupt):
            decode(broken)


def test_decoding_needs_the_arrays_and_one_frame_besides() -> None:
    blobs = {"x": np.random.default_rng(0).integers(0, 150_000, 1_500_000)}
    data = pack(records(blobs), blobs.values())
    tracemalloc.start()
    try:
        unpack(data, RecordHeader, where="x")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < blobs["x"].nbytes + 8 * MAX_FRAME_BYTES
    assert peak < 2 * blobs["x"].nbytes


def test_frames_that_lie_about_their_size_or_leave_it_or_the_checksum_out_are_refused(
    header: dict[str, Any],
) -> None:
    lying = bytearray(frame(bytes(1000), level=1))
    assert zstandard.get_frame_parameters(bytes(lying)).content_size == 1000
    lying[5:7] = (100).to_bytes(2, "little")
    claim = header | {"arrays": [array_of(shape=[1000])]}
    decode(put_together(claim, bytes(1000)))
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
        head = frame(msgspec.msgpack.encode(claim | {"frames": [len(broken)]}))
        with pytest.raises(CheckpointCorrupt):
            decode(container(head, broken))
        with pytest.raises(CheckpointCorrupt):
            decode(container(broken))
        with pytest.raises(CheckpointCorrupt):
            decode(broken)


def test_frames_or_padding_that_do_not_add_up_are_refused(header: dict[str, Any]) -> None:
    claim = header | {"arrays": [array_of(shape=[1000])]}
    good = frame(bytes(1000))
    padding = b"\x5c\x2a\x4d\x18\x04\0\0\0\0\0\0\0"
    decode(container(frame(msgspec.msgpack.encode(claim | {"frames": [len(good)]})), good, padding))
    for sizes, rest in (
        ([], good),
        ([len(good) - 1], good),
        ([len(good) + 1], good),
        ([len(good)], good + good),
        ([len(good)] * 2, good + good),
        ([len(good)], good + padding + padding),
        ([len(good)], good + padding[:-1] + b"\1"),
        ([len(good)], good + padding[:6]),
        ([len(good)], padding + good),
        ([2**31], good),
        ([1] * 70_000, good),
        ([0], good),
        ([-1], good),
    ):
        with pytest.raises(CheckpointCorrupt):
            decode(container(frame(msgspec.msgpack.encode(claim | {"frames": sizes})), rest))


def test_a_piece_lies_in_one_frame(header: dict[str, Any]) -> None:
    claim = header | {"arrays": [array_of(shape=[4]), array_of(name="y", shape=[4])]}
    for good in ([b"abcd", b"efgh"], [b"abcdefgh"]):
        assert bytes(decode(put_together(claim, *good)).rewards["y"]) == b"efgh"
    for broken in ([b"abcde", b"fgh"], [b"abc", b"defgh"], [b"abcd", b"efg", b"h"], [b"abcd"]):
        with pytest.raises(CheckpointCorrupt):
            decode(put_together(claim, *broken))


@pytest.mark.parametrize(
    "content",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1
        b"\xdf\xff\xff\xff\xff",  # a map of as many
        b"\xc6\xff\xff\xff\xff",  # a bin of as many bytes
        b"\xdb\xff\xff\xff\xff",  # a string
        b"\x91" * 100_000,  # arrays in arrays
        b"\x81\xa1a" * 100_000,  # maps in maps
        b"\x80" * 100_000,  # many small maps
        b"\xc7\x01\x05a",  # an extension type
        b"\xc0",
        b"\x01",
        b"\xc1",
        b"\x00" * MAX_HEADER_BYTES,
    ],
)
def test_msgpack_that_would_grow_is_refused(content: bytes, header: dict[str, Any]) -> None:
    with pytest.raises(CheckpointCorrupt):
        decode(container(frame(content)))
    # And where the header has room for anything: an unknown key, a row of the history.
    raw = msgspec.msgpack.encode(header)
    assert raw[0] & 0xF0 == 0x80
    with pytest.raises(CheckpointCorrupt):
        decode(container(frame(bytes([raw[0] + 1]) + raw[1:] + b"\xa1x" + content)))
    at = raw.index(b"\xa7history") + 8
    with pytest.raises(CheckpointCorrupt):
        decode(container(frame(raw[:at] + b"\x91" + content)))


@pytest.mark.parametrize("misreading", [{}, None, {1: object()}, ValueError("truncated")])
def test_a_header_that_msgpack_reads_differently_is_neither_written_nor_read(
    misreading: object, header: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = container(frame(msgspec.msgpack.encode(header)))
    state = decode(data)

    def misread(_: bytes) -> object:
        if isinstance(misreading, Exception):
            raise misreading
        return misreading

    monkeypatch.setattr(msgpack, "unpackb", misread)
    with pytest.raises(CheckpointCorrupt, match="read the header differently"):
        decode(data)
    with pytest.raises(ValueError, match="read the header differently"):
        encode(state)


def test_a_header_must_be_canonical(header: dict[str, Any]) -> None:
    raw = msgspec.msgpack.encode(header)
    decode(container(frame(raw)))
    doubled = bytes([raw[0] + 1]) + raw[1:] + msgpack.packb("step") + msgpack.packb(13)
    assert raw[0] & 0xF0 == 0x80
    for broken in (doubled, raw + b"\xc0", raw + raw, b"\xde\x00" + bytes([raw[0] & 15]) + raw[1:]):
        with pytest.raises(CheckpointCorrupt):
            decode(container(frame(broken)))
    change: dict[str, Any]
    for change in (
        {"kl_coef": 1},
        {"step": -1},
        {"step": 12.0},
        {"rank": 2},
        {"version": 1},
        {"phase": "rest"},
        {"run_this": 1},
        {"history": [{}]},
        {"arrays": [array_of()]},
        {"kl_window": ["x"]},
    ):
        with pytest.raises(CheckpointCorrupt):
            decode(put_together(header | change))


@pytest.mark.parametrize(
    ("change", "data"),
    [
        ({"dtype": "object"}, b"\0" * 8),
        ({"dtype": "V8"}, b"\0" * 8),
        ({"dtype": "float64", "shape": [2], "bits": 64}, b"\0" * 8),
        ({"dtype": "bool", "shape": [8]}, b"\2" * 8),
        ({"dtype": "int16", "bits": 32}, b"\2" * 4),
        ({"bits": 3}, b"\0"),
        ({"bits": -1}, b"\0"),
        ({"bits": 16}, b"\0\0"),
        ({"shape": [2**31, 2**31, 2**31]}, b"\0" * 8),
        ({"shape": [0, 2**30, 2**30, 2**30]}, b""),
        ({"shape": [-1]}, b"\0" * 8),
        ({"shape": [1] * 9}, b"\0"),
        ({"name": "../x"}, b"\0"),
        ({"name": "x\n"}, b"\0"),
        ({"group": "weights"}, b"\0"),
        ({"dtype": "bytes"}, b"\0"),
        ({"dtype": "bytes", "group": "rng", "shape": [1, 1]}, b"\0"),
        ({"dtype": "bytes", "group": "rng", "bits": 4}, b"\0"),
    ],
)
def test_an_array_that_is_not_what_it_says_is_refused(
    header: dict[str, Any], change: dict[str, Any], data: bytes
) -> None:
    good = put_together(header | {"arrays": [array_of()]}, b"\7")
    assert decode(good).rewards["x"].tolist() == [7]
    parts = [data] if data else []
    with pytest.raises(CheckpointCorrupt):
        decode(put_together(header | {"arrays": [array_of(**change)]}, *parts))


def test_an_array_twice_or_too_few_or_too_many_are_refused(header: dict[str, Any]) -> None:
    for specs, content in (
        ([array_of()] * 2, b"ab"),
        ([array_of()], b""),
        ([array_of()], b"ab"),
        ([array_of(name=str(i), shape=[0]) for i in range(257)], b""),
    ):
        parts = [content] if content else []
        with pytest.raises(CheckpointCorrupt):
            decode(put_together(header | {"arrays": specs}, *parts))


def test_an_error_names_the_file_and_the_remedy() -> None:
    with pytest.raises(CheckpointCorrupt, match="runtime_state.rank_0003") as caught:
        decode(b"garbage", where="runtime_state.rank_0003.msgpack.zst")
    assert caught.value.remedy is not None


def test_a_container_of_version_1_is_refused_as_that() -> None:
    with pytest.raises(CheckpointCorrupt, match="version 2"):
        decode(frame(b"\xc4\x01a" * 20))


def test_the_limit_of_a_record_is_held_when_it_is_written(batch: Callable[..., Any]) -> None:
    blobs = {"x": np.zeros(1000, np.uint8)}
    with pytest.raises(ValueError, match="at most 100"):
        pack(records(blobs), blobs.values(), limit=100)


def test_token_ids_shrink_to_little_more_than_their_information() -> None:
    blobs = {"x": np.random.default_rng(0).integers(0, 256, 100_000)}
    assert len(pack(records(blobs), blobs.values())) < 101_000
    blobs = {"x": np.random.default_rng(0).integers(0, 150_000, 100_000)}
    assert len(pack(records(blobs), blobs.values())) < 100_000 * 18 // 8 + 1000


def test_text_that_repeats_and_floats_of_a_kind_are_compressed() -> None:
    draw = np.random.default_rng(0)
    prompts = np.repeat(draw.integers(0, 150_000, (100, 300)), 8, axis=0)
    assert len(pack(records({"x": prompts}), [prompts])) < prompts.nbytes / 8
    logprobs = -draw.gamma(0.35, 1.0, 200_000).astype(np.float32)
    assert len(pack(records({"x": logprobs}), [logprobs])) < 0.87 * logprobs.nbytes


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_arrays_of_any_values_come_back_over_chunks_and_frames(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([d for d in DTYPES if d != "bytes"]))
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=24))
    array = data.draw(hnp.arrays(kind, shape))
    if array.dtype.kind in "iu":  # every number of bits, not only all of them
        array = array >> array.dtype.type(data.draw(st.integers(0, array.dtype.itemsize * 8 - 1)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planes, "CHUNK_ITEMS", 16)
        patch.setattr(frames, "_OWN_FRAME", data.draw(st.sampled_from([4, 32])))
        packed = pack(records({"x": array, "y": b"0123456789"}), [array, b"0123456789"])
        _, groups = unpack(packed, RecordHeader, where="x")
    assert same(groups["r"]["x"], array)
    assert groups["r"]["y"] == b"0123456789"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_small_arrays_are_written_in_the_same_bytes_as_large_ones(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([np.dtype(d) for d in DTYPES if d != "bytes"]))
    array = data.draw(hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6)))
    if dtype.kind in "iu" and data.draw(st.booleans()):
        array = array & dtype.type(data.draw(st.integers(0, 127)))  # every width that planes can have
    array = data.draw(st.sampled_from([array, array.T, array[..., ::2] if array.ndim else array]))
    bits = planes.used_bits(array)
    assert planes.small_planes(array, bits) == b"".join(p.tobytes() for p in planes.split(array, bits))


def test_an_array_is_small_up_to_a_bound_and_in_our_byte_order_only() -> None:
    assert planes.small_planes(np.ones(16384, np.uint8), 1) == b"\xff" * 2048
    assert planes.small_planes(np.ones(16385, np.uint8), 1) is None
    assert planes.small_planes(np.ones(2, ">i4"), 1) is None


def test_threads_that_write_at_the_same_time_do_not_disturb_each_other() -> None:
    def write(seed: int) -> list[bytes]:
        arrays = {str(i): np.random.default_rng(seed).integers(0, 9, 20_000) for i in range(3)}
        header = RecordHeader(step=seed, micro_batch=0, arrays=specify("rollouts", arrays), frames=[])
        return [pack(header, arrays.values()) for _ in range(5)]

    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(write, range(4)))
    assert made == [write(seed) for seed in range(4)]


def test_a_bool_that_was_made_of_another_byte_is_true(state: RuntimeState) -> None:
    odd = np.array([0, 1, 2, 255], np.uint8).view(np.bool_)
    back = decode(encode(msgspec.structs.replace(state, rewards={"x": odd})))
    assert back.rewards["x"].view(np.uint8).tolist() == [0, 1, 1, 1]


def test_arrays_of_many_chunks_come_back(state: RuntimeState) -> None:
    draw = np.random.default_rng(0)
    size = 2 * CHUNK_ITEMS + 5
    big = {
        "ids": draw.integers(0, 150_000, size),
        "mask": draw.random(size) < 0.5,
        "signed": draw.integers(-5, 5, size).astype(np.int16),
        "logprobs": draw.standard_normal(size).astype(np.float32),
    }
    back = decode(encode(msgspec.structs.replace(state, rewards=big)))
    assert same(back.rewards, big)


def test_the_file_is_one_that_the_zstd_command_reads(state: RuntimeState) -> None:
    data = encode(state)
    content = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True).read()
    assert content.startswith(msgspec.msgpack.encode(taken_apart(data)[0]))
    if shutil.which("zstd"):
        done = subprocess.run(["zstd", "-dc"], input=data, capture_output=True, check=True)
        assert done.stdout == content
