"""Packs and reads one record (`format.py`, section 1): a typed head and named arrays.

Bytes in, structs and arrays out; knows nothing of files, steps or ranks.
"""

import hashlib
import math
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Generic, TypeVar, cast

import msgpack
import msgspec
import numpy as np
import zstandard

from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.runtime_state.format import (
    DTYPES,
    FREE_BYTES,
    MAX_CONTENT_BYTES,
    MAX_EXPANSION,
    MAX_FRAME_BYTES,
    MAX_HEAD_BYTES,
    NAME,
    SPARSE_FRAME_BYTES,
    Arrays,
    ArraySpec,
    Frames,
    Specs,
)

Fields = TypeVar("Fields")
Read = Callable[[int, int], memoryview]
"""Offset and size → these bytes, or fewer at the end."""

# Magic and length of a skippable frame, then our fields: a name that ends in the version, and a length.
_START = struct.Struct("<II8sI")
_START_MAGIC = 0x184D2A5B
_NAME = b"VSRECRD1"
HEAD_BYTES = MAX_HEAD_BYTES + (64 << 10)
"""Bytes that `unpack_head` needs of a record: compression hardly makes the head longer."""
_NUMPY = {name: np.dtype(name) for name in DTYPES}


# The ledger is written between two micro-batches; higher levels cost more than they save.
_LEVEL = 1
# The bytes of numbers hardly repeat: a small match table goes straight to their entropy, in half the time, and the
# result is smaller.
_LARGE = zstandard.ZstdCompressionParameters.from_level(
    _LEVEL, source_size=MAX_FRAME_BYTES, window_log=19, hash_log=6, min_match=7, write_checksum=True
)
# In a smaller frame level 1's own table finds more: a rollout's record would be 2 to 5 % longer without it.
_LARGE_BYTES = 1 << 18


class _Zstd(threading.local):
    """One thread's: two threads must not share one. Kept, as making one takes longer than a record."""

    def __init__(self) -> None:
        self.small = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        self.large = zstandard.ZstdCompressor(compression_params=_LARGE)
        self.unpacker = zstandard.ZstdDecompressor(max_window_size=0)


_ZSTD = _Zstd()


class _Head(msgspec.Struct, Generic[Fields], frozen=True, array_like=True, forbid_unknown_fields=True):
    fields: Fields
    arrays: Specs
    frames: Frames


@lru_cache
def _decoder(fields: Any) -> msgspec.msgpack.Decoder[_Head[Any]]:
    return msgspec.msgpack.Decoder(_Head[fields])


def pack(fields: object, arrays: Mapping[str, np.ndarray], *, limit: int = MAX_CONTENT_BYTES) -> bytes:
    """Packs one record.

    Args:
        fields: what the head says besides its arrays: a struct, or plain objects that msgpack has.
        limit: bytes allowed, of the arrays and of the record.

    Raises:
        ValueError: a name or dtype that the format does not know, or the record would be larger than it allows.
    """
    specs = [_spec(name, array.dtype, array.shape) for name, array in arrays.items()]
    size = sum(map(_num_bytes, specs))
    packed = b""
    # Before anything is packed: a record that a reader would refuse must not reach the disk.
    if size <= limit:
        packed = _packed(fields, specs, arrays, MAX_FRAME_BYTES)
        # Arrays that are nearly empty compress beyond MAX_EXPANSION, where a reader takes them for a bomb.
        if size > FREE_BYTES + MAX_EXPANSION * len(packed):
            packed = _packed(fields, specs, arrays, SPARSE_FRAME_BYTES)
    if max(size, len(packed)) > limit:
        raise ValueError(f"arrays of {size} bytes in a record of {len(packed)}, at most {limit}")
    return packed


def unpack(
    data: bytes, fields: type[Fields], *, where: object, limit: int = MAX_CONTENT_BYTES
) -> tuple[Fields, Arrays]:
    """Reads a record back: what its head says, and its arrays by name (each its own, writable).

    Needs the size of the arrays and some MB.

    Args:
        fields: the type that the head's fields must have.
        limit: bytes of arrays allowed.

    Raises:
        CheckpointCorrupt: it violates `format.py`.
    """
    view, arrays = memoryview(data), {}
    with _explained(where):
        # Slices of a view: a frame is not copied before it is decompressed.
        head, content = _open(lambda at, size: view[at : at + size], len(data), fields, limit)
        for spec in head.arrays:
            array, at = np.empty(math.prod(spec.shape), _NUMPY[spec.dtype]), 0
            for part in _parts(spec, content):
                array[at : at + part.size] = part
                at += part.size
            arrays[spec.name] = array.reshape(spec.shape)
        content.close()
    return head.fields, arrays


def digests(
    read: Read, num_bytes: int, fields: type[Fields], *, where: object
) -> tuple[Fields, dict[str, tuple[str, tuple[int, ...], str]]]:
    """Returns what a record's head says, and by name each array's dtype, shape and SHA-256.

    Needs some MB, however large the arrays are.

    Raises:
        CheckpointCorrupt: it violates `format.py`.
    """
    found = {}
    with _explained(where):
        head, content = _open(read, num_bytes, fields, MAX_CONTENT_BYTES)
        for spec in head.arrays:
            digest = hashlib.sha256()
            for part in _parts(spec, content):
                digest.update(part.data)
            found[spec.name] = spec.dtype, tuple(spec.shape), digest.hexdigest()
        content.close()
    return head.fields, found


def unpack_head(
    data: memoryview | bytes, fields: type[Fields], *, where: object
) -> tuple[Fields, list[ArraySpec]]:
    """Returns what a record's head says; its arrays are described and not read.

    Args:
        data: the first bytes of the record; HEAD_BYTES of them are always enough.

    Raises:
        CheckpointCorrupt: it violates `format.py`.
    """
    with _explained(where):
        head, _ = _head(memoryview(data), fields)
        _check(head.arrays, MAX_CONTENT_BYTES)
    return head.fields, head.arrays


@contextmanager
def _explained(where: object) -> Iterator[None]:
    try:
        yield
    # ValueError covers our own refusals and msgspec's; TypeError and OverflowError come from numpy for absurd shapes.
    # All of them mean the same here.
    except (ValueError, TypeError, OverflowError, MemoryError, RecursionError) as error:
        raise CheckpointCorrupt(
            "a record cannot be read",
            where=where,
            found=error,
            expected="a record as runtime_state/format.py specifies",
            remedy="resume from an older checkpoint (verl-slurm list RUN)",
        ) from error


# ---- writing


@lru_cache(maxsize=1024)
def _spec(name: str, dtype: "np.dtype[Any]", shape: tuple[int, ...]) -> ArraySpec:
    # Cached: the batches of a run are all alike, and numpy takes longer to name a dtype than to compress a small array.
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name for an array")
    if dtype.name not in DTYPES:  # the other byte order has the same name
        raise ValueError(f"{name}: dtype {dtype} is not one of {', '.join(DTYPES)}")
    return ArraySpec(name, dtype.name, list(shape))


def _packed(
    fields: object, specs: list[ArraySpec], arrays: Mapping[str, np.ndarray], frame_bytes: int
) -> bytes:
    frames = list(_frames(arrays, frame_bytes))
    # After the frames, since it names the length of each. The lengths are here and not before each frame, so that a
    # reader knows that they add up before it reads one.
    head = msgspec.msgpack.encode(_Head(fields, specs, [len(frame) for frame in frames]))
    if len(head) > MAX_HEAD_BYTES:
        raise ValueError(f"a head of {len(head)} bytes, at most {MAX_HEAD_BYTES}")
    # Holds the limits of `Specs` and `Frames`, which msgspec looks at when it reads: without it a record of too many
    # arrays would be written, and be refused by each reader.
    _decoder(object).decode(head)
    _require_agreement(head)
    first = _ZSTD.small.compress(head)
    return b"".join([_START.pack(_START_MAGIC, _START.size - 8, _NAME, len(first)), first, *frames])


def _frames(arrays: Mapping[str, np.ndarray], frame_bytes: int) -> Iterator[bytes]:
    # Small arrays share a frame: one each would be 14 bytes and a call of zstd more, and a rollout has six.
    gathered = bytearray()
    for array in arrays.values():
        for piece in _shuffled(array):
            for at in range(0, len(piece), frame_bytes):
                part = piece[at : at + frame_bytes]
                if len(gathered) + len(part) > frame_bytes:
                    yield _compress(gathered)
                    gathered.clear()
                gathered += part
    if gathered:
        yield _compress(gathered)


def _compress(content: bytearray) -> bytes:
    return (_ZSTD.large if len(content) >= _LARGE_BYTES else _ZSTD.small).compress(content)


def _shuffled(array: np.ndarray) -> Iterator[memoryview]:
    """Yields the pieces of `array`: the first bytes of all items of a chunk, then their second bytes ..."""
    if array.dtype.kind == "b":
        # A view can make a bool of any byte; it means true.
        array = np.not_equal(array.view(np.uint8), 0)
    # No-op for what is contiguous and in this byte order already.
    flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1)
    items = MAX_FRAME_BYTES // flat.itemsize
    for start in range(0, flat.size, items):
        # A transposed copy: shift and cast of each byte is faster for floats, and slower for wide integers.
        by_item = flat[start : start + items].view(np.uint8).reshape(-1, flat.itemsize)
        yield np.ascontiguousarray(by_item.T).reshape(-1).data


# ---- reading


class _Content:
    """Takes pieces from frames of `sizes` bytes, one after the other, from offset `start` on."""

    def __init__(self, read: Read, start: int, sizes: list[int]) -> None:
        self._read, self._at, self._sizes = read, start, iter(sizes)
        self._content, self._used = b"", 0

    def take(self, count: int) -> np.ndarray:
        """Returns the next `count` bytes, uint8 [count], read-only."""
        if len(self._content) - self._used < count:
            parts = [self._content[self._used :]]
            # A piece may lie in several frames: of a record that is nearly empty, each is small.
            missing = count - len(parts[0])
            while missing > 0:
                size = next(self._sizes, None)
                if size is None:
                    raise ValueError("the content ends in the middle")
                parts.append(_decompress(self._read(self._at, size), MAX_FRAME_BYTES))
                self._at += size
                missing -= len(parts[-1])
            self._content, self._used = b"".join(parts), 0
        self._used += count
        return np.frombuffer(self._content, np.uint8, count, self._used - count)

    def close(self) -> None:
        """Ends reading; nothing may be left."""
        if self._used != len(self._content) or next(self._sizes, None) is not None:
            raise ValueError("there is content behind the last array")


def _open(read: Read, num_bytes: int, fields: type[Fields], limit: int) -> tuple[_Head[Fields], _Content]:
    """Returns the head, checked as far as possible before an array is read, and what holds the arrays."""
    head, start = _head(read(0, min(num_bytes, HEAD_BYTES)), fields)
    if start + sum(head.frames) != num_bytes:
        raise ValueError("the frames do not end where the data does")
    # The record's own size bounds its arrays: a few bytes cannot ask for gigabytes.
    _check(head.arrays, min(limit, FREE_BYTES + MAX_EXPANSION * num_bytes))
    return head, _Content(read, start, head.frames)


def _head(data: memoryview, fields: type[Fields]) -> tuple[_Head[Fields], int]:
    """Returns the head at the beginning of a record, and where it ends."""
    if len(data) < _START.size:
        raise ValueError(f"{len(data)} bytes are too few")
    magic, length, name, size = _START.unpack_from(data)
    if (magic, length, name) != (_START_MAGIC, _START.size - 8, _NAME):
        raise ValueError("it does not begin as a record of version 1")
    end = _START.size + int(size)
    packed = _decompress(data[_START.size : end], MAX_HEAD_BYTES)
    # Typed: an untyped decoding makes objects of whatever the bytes describe.
    head = cast(_Head[Fields], _decoder(cast(Any, fields)).decode(packed))
    if msgspec.msgpack.encode(head) != packed:
        raise ValueError("the head is not canonical (duplicate key, other number type, trailing bytes)")
    _require_agreement(packed)
    return head, end


def _require_agreement(head: bytes) -> None:
    """Refuses a head that msgpack, which shares no code with msgspec, reads as something else."""
    # The head is canonical, and taken by msgspec: so the objects that msgpack makes of it are few.
    try:
        # Compared as bytes: Python's equality calls 1, 1.0 and True the same.
        same = msgspec.msgpack.encode(msgpack.unpackb(head, strict_map_key=False)) == head
    except (ValueError, TypeError, msgpack.UnpackException):
        same = False
    if not same:
        raise ValueError("msgspec and msgpack read the head differently")


def _check(specs: list[ArraySpec], limit: int) -> None:
    """Checks all that can be checked before anything is allocated."""
    for spec in specs:
        if not NAME.fullmatch(spec.name):
            raise ValueError(f"{spec.name!r} is no name for an array")
        if spec.dtype not in DTYPES:
            raise ValueError(f"array {spec.name}: dtype {spec.dtype!r} is not allowed")
    # The later one would silently replace the earlier.
    if len({spec.name for spec in specs}) < len(specs):
        raise ValueError("two arrays have one name")
    size = sum(map(_num_bytes, specs))
    if size > limit:
        raise ValueError(f"arrays of {size} bytes, at most {limit}")


def _num_bytes(spec: ArraySpec) -> int:
    return math.prod(spec.shape) * _NUMPY[spec.dtype].itemsize


def _parts(spec: ArraySpec, content: _Content) -> Iterator[np.ndarray]:
    """Yields the items of an array chunk by chunk."""
    dtype, left = _NUMPY[spec.dtype], math.prod(spec.shape)
    while left:
        count = min(left, MAX_FRAME_BYTES // dtype.itemsize)
        # Bytes written past each other, and not shifted: with int64 that takes a fifth of the time.
        by_item = np.zeros((count, dtype.itemsize), np.uint8)
        for number, plane in enumerate(content.take(by_item.size).reshape(dtype.itemsize, count)):
            # The upper bytes of token ids are zeros, which are found faster than they are copied.
            if plane.any():
                by_item[:, number] = plane
        if dtype.kind == "b" and by_item.max() > 1:
            raise ValueError(f"array {spec.name}: a bool is neither 0 nor 1")
        yield by_item.reshape(-1).view(dtype.newbyteorder("<"))
        left -= count


def _decompress(data: memoryview, limit: int) -> bytes:
    """Returns the content of `data`, which must be one whole frame with a checksum and a declared size of 1 to `limit`
    bytes."""
    try:
        frame = zstandard.get_frame_parameters(data[:18])  # no frame header is longer
        # The window is memory, too: a small frame may ask the decoder for gigabytes of it. A size that is not declared
        # is one beyond all limits; and without the checksum a flipped bit could pass as content.
        if not (
            0 < frame.content_size <= limit
            and frame.window_size <= max(limit, 1 << 20)
            and frame.has_checksum
            and not frame.dict_id
        ):
            raise ValueError(
                f"a zstd frame of {frame.content_size} bytes, at most {limit} and a checksum expected"
            )
        # zstd refuses a declared size that the data does not reach, and one that it exceeds.
        return _ZSTD.unpacker.decompress(data, max_output_size=limit, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"not one whole zstd frame: {error}") from error
