import io
from collections.abc import Callable
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
import zstandard

from verl_slurm.errors import CheckpointCorrupt
from verl_slurm.runtime_state import container
from verl_slurm.runtime_state.codec import decode, encode
from verl_slurm.runtime_state.container import pack, unpack
from verl_slurm.runtime_state.format import (
    DTYPES,
    HISTORY_ROWS,
    MAX_CONTENT_BYTES,
    MAX_HEADER_BYTES,
    ArraySpec,
    RecordHeader,
    RuntimeState,
    StateHeader,
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


def bins(data: bytes) -> list[bytes]:
    """What lies in a container: the header, then the arrays."""
    return list(msgpack.Unpacker(io.BytesIO(zstandard.ZstdDecompressor().decompress(data))))


def frame(content: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**({"write_checksum": True} | options)).compress(content)


def from_bins(*parts: Any) -> bytes:
    return frame(b"".join(msgpack.packb(p) for p in parts))


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


def test_a_frame_that_declares_too_much_is_refused_before_it_is_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bomb = frame(bytes(8 << 20))
    assert len(bomb) < 2000
    monkeypatch.setattr(container.zstandard, "ZstdDecompressor", None)
    with pytest.raises(CheckpointCorrupt, match="at most 1024"):
        unpack(bomb, StateHeader, where="x", limit=1024)
    # Nobody declares what the format allows at most plus one, without being refused.
    huge = b"\x28\xb5\x2f\xfd\xe4" + (MAX_CONTENT_BYTES + 1).to_bytes(8, "little")
    with pytest.raises(CheckpointCorrupt, match="at most"):
        decode(huge)


def test_frames_that_lie_about_their_size_or_leave_it_or_the_checksum_out_are_refused() -> None:
    lying = bytearray(frame(bytes(1000), level=1))
    assert zstandard.get_frame_parameters(bytes(lying)).content_size == 1000
    lying[5:7] = (100).to_bytes(2, "little")
    for data in (
        bytes(lying),
        frame(bytes(1000), write_content_size=False),
        frame(bytes(1000), write_checksum=False),
    ):
        with pytest.raises(CheckpointCorrupt):
            decode(data)


@pytest.mark.parametrize(
    "content",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1
        b"\xdf\xff\xff\xff\xff",  # a map of as many
        b"\xc6\xff\xff\xff\xff",  # a bin of as many bytes
        b"\xdb\xff\xff\xff\xff",  # a string
        b"\x91" * 100_000,  # arrays in arrays
        b"\x80" * 100_000,  # many small maps
        b"\xc7\x01\x05a",  # an extension type
        b"\xc0",
        b"\x01",
        b"\xc1",
        b"",
    ],
)
def test_msgpack_that_would_grow_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointCorrupt):
        decode(frame(content))
    with pytest.raises(CheckpointCorrupt):
        decode(from_bins(content))


def test_a_header_must_be_canonical(state: RuntimeState) -> None:
    head, *arrays = bins(encode(state))
    raw = msgspec.msgpack.decode(head)

    def header(change: dict[str, Any]) -> bytes:
        return msgspec.msgpack.encode(raw | change)

    decode(from_bins(head, *arrays))
    doubled = bytes([head[0] + 1]) + head[1:] + msgpack.packb("step") + msgpack.packb(13)
    assert head[0] & 0xF0 == 0x80
    for broken in (
        doubled,
        head + b"\xc0",
        header({"kl_coef": 1}),
        header({"step": -1}),
        header({"step": 12.0}),
        header({"rank": 2}),
        header({"version": 2}),
        header({"phase": "rest"}),
        header({"run_this": 1}),
        header({"history": [{}]}),
        header({"arrays": []}),
        header({"kl_window": ["x"]}),
        b"\x00" * (MAX_HEADER_BYTES + 1),
    ):
        with pytest.raises(CheckpointCorrupt):
            decode(from_bins(broken, *arrays))


@pytest.mark.parametrize(
    ("change", "data"),
    [
        ({"dtype": "object"}, b"\0" * 8),
        ({"dtype": "V8"}, b"\0" * 8),
        ({"dtype": "float64", "shape": [2]}, b"\0" * 8),
        ({"dtype": "bool", "shape": [8]}, b"\2" * 8),
        ({"shape": [2**31, 2**31, 2**31]}, b"\0" * 8),
        ({"shape": [0, 2**30, 2**30, 2**30]}, b""),
        ({"shape": [-1]}, b"\0" * 8),
        ({"name": "../x"}, b"\0" * 8),
        ({"group": "weights"}, b"\0" * 8),
        ({"dtype": "bytes", "shape": [8]}, b"\0" * 8),
    ],
)
def test_an_array_that_is_not_what_it_says_is_refused(
    state: RuntimeState, change: dict[str, Any], data: bytes
) -> None:
    spec = {"group": "rewards", "name": "x", "dtype": "float64", "shape": [1]}
    head = msgspec.msgpack.decode(bins(encode(state))[0])
    good = msgspec.msgpack.encode(head | {"arrays": [spec]})
    assert decode(from_bins(good, bytes(8))).rewards["x"].shape == (1,)
    broken = msgspec.msgpack.encode(head | {"arrays": [spec | change]})
    with pytest.raises(CheckpointCorrupt):
        decode(from_bins(broken, data))


def test_an_array_twice_or_too_few_or_too_many_are_refused(state: RuntimeState) -> None:
    head = msgspec.msgpack.decode(bins(encode(state))[0])
    spec = {"group": "rewards", "name": "x", "dtype": "uint8", "shape": [1]}
    for specs, arrays in (([spec, spec], 2), ([spec], 0), ([spec], 2)):
        broken = msgspec.msgpack.encode(head | {"arrays": specs})
        with pytest.raises(CheckpointCorrupt):
            decode(from_bins(broken, *[b"\0"] * arrays))


def test_an_error_names_the_file_and_the_remedy() -> None:
    with pytest.raises(CheckpointCorrupt, match="runtime_state.rank_0003") as caught:
        decode(b"garbage", where="runtime_state.rank_0003.msgpack.zst")
    assert caught.value.remedy is not None


def test_an_older_header_is_read_through_its_migration(state: RuntimeState) -> None:
    head, *arrays = bins(encode(state))
    old = msgspec.msgpack.decode(head)
    old["episodes"] = old.pop("episode_id")
    data = from_bins(msgspec.msgpack.encode(old), *arrays)
    with pytest.raises(CheckpointCorrupt):
        decode(data)

    def upgrade(header: dict[str, Any]) -> dict[str, Any]:
        return {("episode_id" if k == "episodes" else k): v for k, v in header.items()}

    assert decode(data, upgrade=upgrade).episode_id == 1500


def test_the_limit_of_a_record_is_held_when_it_is_written(batch: Callable[..., Any]) -> None:
    header = RecordHeader(
        step=0, micro_batch=0, arrays=[ArraySpec(group="r", name="x", dtype="uint8", shape=[1000])]
    )
    with pytest.raises(ValueError, match="at most 100"):
        pack(header, [np.zeros(1000, np.uint8)], limit=100)


def test_token_ids_shrink_to_little_more_than_their_information() -> None:
    ids = np.random.default_rng(0).integers(0, 256, 100_000)
    header = RecordHeader(
        step=0, micro_batch=0, arrays=[ArraySpec(group="r", name="x", dtype="int64", shape=[100_000])]
    )
    assert len(pack(header, [ids])) < 105_000
