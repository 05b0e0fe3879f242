"""The container of `format.py`, section 1: a typed header and flat arrays in zstd frames.

Bytes in, structs and arrays out; knows nothing of files, steps or ranks.
"""

import hashlib
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeVar, cast

import msgpack
import msgspec
import numpy as np

from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.runtime_state.format import (
    CHUNK_ITEMS,
    DTYPES,
    FREE_BYTES,
    MAX_ARRAYS,
    MAX_CONTENT_BYTES,
    MAX_EXPANSION,
    MAX_HEADER_BYTES,
    NAME,
    ArraySpec,
)
from verl_slurm.runtime_state.frames import FrameReader, FrameWriter, Read, compress, decompress
from verl_slurm.runtime_state.planes import join, rounded, small_planes, split, used_bits

Header = TypeVar("Header", bound=msgspec.Struct)
Blob = bytes | np.ndarray

# Magic and length of a skippable frame, then our fields: a name that ends in the version, and a length.
_START = struct.Struct("<II8sI")
_START_MAGIC, _PADDING_MAGIC = 0x184D2A5B, 0x184D2A5C
_NAME = b"VSLRTST2"
_PADDING = struct.Struct("<II")
# Enough for arrays of the greatest size that compress to nothing.
_MAX_PADDING = _PADDING.size + MAX_CONTENT_BYTES // MAX_EXPANSION
HEAD_BYTES = MAX_HEADER_BYTES + (64 << 10)
"""Bytes that `unpack_header` needs of a file: compression hardly makes the header longer."""
_DTYPE_NAMES = {np.dtype(name): name for name in DTYPES if name != "bytes"}
"""Cached: numpy takes longer to name a dtype than to hash it."""
_ITEM_BYTES = {name: dtype.itemsize for dtype, name in _DTYPE_NAMES.items()} | {"bytes": 1}


def specify(group: str, blobs: Mapping[str, Blob]) -> list[ArraySpec]:
    """Describes `blobs` for a header, in their own order.

    Raises:
        ValueError: a name or dtype that the format does not know (a bug of the caller).
    """
    specs = []
    for name, blob in blobs.items():
        if isinstance(blob, bytes):
            # All 8 bits of opaque bytes are stored, so that `bytes` come back by a plain copy.
            specs.append(_spec(group, name, "bytes", (len(blob),), 8))
            continue
        dtype = _DTYPE_NAMES.get(blob.dtype) or blob.dtype.name  # the other byte order has the same name
        if dtype not in DTYPES:
            raise ValueError(f"{group}.{name}: dtype {blob.dtype} is not one of {', '.join(DTYPES)}")
        specs.append(_spec(group, name, dtype, blob.shape, used_bits(blob)))
    return specs


@lru_cache(maxsize=MAX_ARRAYS)
def _spec(group: str, name: str, dtype: str, shape: tuple[int, ...], bits: int) -> ArraySpec:
    # Cached: the batches of a run are all alike.
    if not NAME.fullmatch(name):
        raise ValueError(f"{group}: {name!r} is no name for an array")
    return ArraySpec(group=group, name=name, dtype=dtype, shape=list(shape), bits=bits)


def pack(header: msgspec.Struct, blobs: Iterable[Blob], *, limit: int = MAX_CONTENT_BYTES) -> bytes:
    """Packs one container: `header` (whose `arrays` must describe `blobs`, in order) and the bytes of `blobs`.

    Args:
        header: its `frames` are filled in here.
        limit: bytes of arrays allowed.

    Raises:
        ValueError: it would be larger than the format allows.
    """
    specs = cast(list[ArraySpec], header.arrays)  # type: ignore[attr-defined]
    size = sum(_num_bytes(spec) for spec in specs)
    if size > limit:
        raise ValueError(f"arrays of {size} bytes, at most {limit}")
    writer = FrameWriter()
    for spec, blob in zip(specs, blobs, strict=True):
        array = np.frombuffer(blob, np.uint8) if isinstance(blob, bytes) else blob
        # Small arrays in one go: what a ledger record costs is the number of numpy's calls, not its bytes.
        small = small_planes(array, spec.bits)
        if small is not None:
            writer.add_small(small)
            continue
        for piece in split(array, spec.bits):
            writer.add(piece, floats=array.dtype.kind == "f")
    writer.close()
    # The header comes last, since it names the length of each frame.
    head = msgspec.msgpack.encode(
        msgspec.structs.replace(header, frames=[len(frame) for frame in writer.frames])
    )
    if len(head) > MAX_HEADER_BYTES:
        raise ValueError(f"header of {len(head)} bytes, at most {MAX_HEADER_BYTES}")
    # Before anything is written: a header that the readers would refuse must not reach the disk.
    _require_agreement(head)
    first = compress(head)
    parts = [_START.pack(_START_MAGIC, _START.size - 8, _NAME, len(first)), first, *writer.frames]
    # Arrays that are nearly empty compress beyond MAX_EXPANSION, where a reader takes them for a bomb.
    missing = (size - FREE_BYTES) // MAX_EXPANSION - sum(len(part) for part in parts)
    if missing >= 0:
        parts.append(_PADDING.pack(_PADDING_MAGIC, missing + 1) + bytes(missing + 1))
    return b"".join(parts)


def unpack(
    data: bytes,
    header_type: type[Header],
    *,
    where: object,
    limit: int = MAX_CONTENT_BYTES,
) -> tuple[Header, dict[str, dict[str, Blob]]]:
    """Reads a container back: its header, and its arrays by group and name (each its own, writable).

    Needs the size of the arrays plus MAX_FRAME_BYTES.

    Args:
        data: the whole file or record.
        header_type: the struct its header must be.
        where: named in an error.
        limit: bytes of arrays allowed.

    Raises:
        CheckpointCorrupt: anything violates `format.py`.
    """
    view = memoryview(data)
    with _explained(where):
        # Slices of a view: a frame is not copied before it is decompressed.
        header, begin = _header(view, header_type)
        specs, reader = _content(header, lambda at, size: view[at : at + size], begin, len(data), limit)
        groups: dict[str, dict[str, Blob]] = {}
        for spec in specs:
            groups.setdefault(spec.group, {})[spec.name] = _array(spec, reader)
        reader.close()
    return header, groups


def digests(
    read: Read, num_bytes: int, header_type: type[Header], *, where: object
) -> tuple[Header, dict[str, dict[str, tuple[str, tuple[int, ...], str]]]]:
    """Returns a container's header, and by group and name each array's dtype, shape and SHA-256.

    Needs one frame and CHUNK_ITEMS items, however large the arrays are.

    Args:
        read: returns bytes of the container.
        num_bytes: of the container.

    Raises:
        CheckpointCorrupt: it violates `format.py`.
    """
    with _explained(where):
        header, begin = _header(read(0, min(num_bytes, HEAD_BYTES)), header_type)
        specs, reader = _content(header, read, begin, num_bytes, MAX_CONTENT_BYTES)
        groups: dict[str, dict[str, tuple[str, tuple[int, ...], str]]] = {}
        for spec in specs:
            digest, left = hashlib.sha256(), math.prod(spec.shape)
            # In pieces of a chunk, as `split` cut them: the array is never in memory as a whole.
            while left:
                part = np.empty(min(left, CHUNK_ITEMS), np.uint8 if spec.dtype == "bytes" else spec.dtype)
                join(part, spec.bits, reader.take)
                digest.update(part.data)
                left -= part.size
            groups.setdefault(spec.group, {})[spec.name] = spec.dtype, tuple(spec.shape), digest.hexdigest()
        reader.close()
    return header, groups


def unpack_header(head: bytes, header_type: type[Header], *, where: object) -> Header:
    """Returns the header of a container, its arrays described and not read, for inspection.

    Args:
        head: the first bytes of the container; HEAD_BYTES of them are always enough.

    Raises:
        CheckpointCorrupt: it violates `format.py`.
    """
    with _explained(where):
        header, _ = _header(memoryview(head), header_type)
        _check_specs(cast(list[ArraySpec], header.arrays), MAX_CONTENT_BYTES)  # type: ignore[attr-defined]
    return header


@contextmanager
def _explained(where: object) -> Iterator[None]:
    try:
        yield
    # ValueError covers our own refusals; TypeError and OverflowError come from numpy for absurd shapes. All of them
    # mean the same here.
    except (ValueError, TypeError, OverflowError, MemoryError, msgspec.MsgspecError) as error:
        raise CheckpointCorrupt(
            "runtime state cannot be read",
            where=where,
            found=error,
            expected="a container as runtime_state/format.py specifies",
            remedy="resume from an older checkpoint (verl-slurm list RUN)",
        ) from error


def _content(
    header: Header, read: Read, begin: int, num_bytes: int, limit: int
) -> tuple[list[ArraySpec], FrameReader]:
    """Returns the arrays that `header` describes, checked as far as possible before one is read, and their reader."""
    specs = cast(list[ArraySpec], header.arrays)  # type: ignore[attr-defined]
    sizes = cast(list[int], header.frames)  # type: ignore[attr-defined]
    end = begin + sum(sizes)
    # Before the padding is read: its length follows from what the file says of itself.
    if not 0 <= num_bytes - end <= _MAX_PADDING:
        raise ValueError("the frames do not end where the data does")
    _check_padding(read(end, num_bytes - end), num_bytes - end)
    # The container's own size bounds its arrays: a few bytes cannot ask for gigabytes.
    _check_specs(specs, min(limit, FREE_BYTES + MAX_EXPANSION * num_bytes))
    return specs, FrameReader(read, begin, sizes)


def _check_padding(rest: memoryview, size: int) -> None:
    """Checks `rest`, the bytes after the last frame: nothing, or padding."""
    if size == 0:
        return
    if size < _PADDING.size or _PADDING.unpack_from(rest) != (_PADDING_MAGIC, size - _PADDING.size):
        raise ValueError("the frames do not end where the data does")
    # Zeros alone: one content has one form, and nothing can be hidden there.
    if np.frombuffer(rest, np.uint8)[_PADDING.size :].any():
        raise ValueError("padding that is not zero")


def _check_specs(specs: list[ArraySpec], limit: int) -> None:
    """Checks all that can be checked before anything is allocated."""
    if len(specs) > MAX_ARRAYS:
        raise ValueError(f"{len(specs)} arrays, at most {MAX_ARRAYS}")
    seen = set()
    for spec in specs:
        if not NAME.fullmatch(spec.name) or not NAME.fullmatch(spec.group):
            raise ValueError(f"{spec.group!r}.{spec.name!r} is no name for an array")
        # The later one would silently replace the earlier.
        if (spec.group, spec.name) in seen:
            raise ValueError(f"array {spec.group}.{spec.name} is there twice")
        seen.add((spec.group, spec.name))
        if spec.dtype not in DTYPES:
            raise ValueError(f"array {spec.name}: dtype {spec.dtype!r} is not allowed")
        # More bits than an item has would be shifted out of it, and a width that `rounded` does not give has no
        # packing.
        most = 1 if spec.dtype == "bool" else 8 * _itemsize(spec)
        if spec.bits > most or rounded(spec.bits) != spec.bits:
            raise ValueError(f"array {spec.name}: {spec.bits} bits of an item")
        if spec.dtype == "bytes" and (len(spec.shape) != 1 or spec.bits != 8):
            raise ValueError(f"array {spec.name}: bytes have one dimension and all their bits")
    size = sum(_num_bytes(spec) for spec in specs)
    if size > limit:
        raise ValueError(f"arrays of {size} bytes, at most {limit}")


def _itemsize(spec: ArraySpec) -> int:
    return _ITEM_BYTES[spec.dtype]


def _num_bytes(spec: ArraySpec) -> int:
    return math.prod(spec.shape) * _itemsize(spec)


def _header(head: memoryview, header_type: type[Header]) -> tuple[Header, int]:
    """Returns the header at the begin of a container, and where it ends."""
    if len(head) < _START.size:
        raise ValueError(f"{len(head)} bytes are too few")
    magic, length, name, size = _START.unpack_from(head)
    if (magic, length, name) != (_START_MAGIC, _START.size - 8, _NAME):
        raise ValueError("it does not begin as a container of version 2")
    end = _START.size + int(size)
    data = decompress(head[_START.size : end], MAX_HEADER_BYTES)
    # Typed: an untyped decoding makes objects of whatever the bytes describe.
    header = msgspec.msgpack.decode(data, type=header_type)
    if msgspec.msgpack.encode(header) != data:
        raise ValueError("the header is not canonical (duplicate key, other number type, trailing bytes)")
    _require_agreement(data)
    return header, end


def _require_agreement(data: bytes) -> None:
    """Refuse a header that msgpack, which shares no code with msgspec, reads as something else.

    Args:
        data: canonical, and taken by msgspec: so the objects that msgpack makes of it are few.

    Raises:
        ValueError: msgspec does not write the same bytes for what msgpack has read.
    """
    try:
        # Compared as bytes: Python's equality calls 1, 1.0 and True the same.
        same = msgspec.msgpack.encode(msgpack.unpackb(data)) == data
    except (ValueError, TypeError, msgpack.UnpackException):
        same = False
    if not same:
        raise ValueError("msgspec and msgpack read the header differently")


def _array(spec: ArraySpec, reader: FrameReader) -> Blob:
    # Not zeroed: `join` writes every item.
    out = np.empty(spec.shape, np.uint8 if spec.dtype == "bytes" else spec.dtype)
    join(out, spec.bits, reader.take)
    return out.tobytes() if spec.dtype == "bytes" else out
