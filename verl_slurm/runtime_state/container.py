"""The container of `format.py`, section 1: a typed header and flat arrays in one zstd frame.

Bytes in, structs and arrays out; knows nothing of files, steps or ranks.
"""

import io
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import msgpack  # type: ignore[import-untyped]
import msgspec
import numpy as np
import zstandard

from verl_slurm.errors import CheckpointCorrupt
from verl_slurm.runtime_state.format import (
    DTYPES,
    MAX_ARRAYS,
    MAX_CONTENT_BYTES,
    MAX_HEADER_BYTES,
    NAME,
    ArraySpec,
)

__all__ = ["Blob", "Upgrade", "pack", "specify", "unpack"]

Header = TypeVar("Header", bound=msgspec.Struct)
Blob = bytes | np.ndarray
Upgrade = Callable[[dict[str, Any]], dict[str, Any]]

# zstd-1: the journal is written between two micro-batches; higher levels cost more than they save.
_LEVEL = 1
# A frame that wants a larger window than this is not ours (level 1 uses far less).
_MAX_WINDOW = 128 << 20


def specify(group: str, blobs: Mapping[str, Blob]) -> list[ArraySpec]:
    """Describe `blobs` for a header, in their own order.

    Raises:
        ValueError: a name or dtype that the format does not know (a bug of the caller).
    """
    specs = []
    for name, blob in blobs.items():
        if not NAME.fullmatch(name):
            raise ValueError(f"{group}: {name!r} is no name for an array")
        if isinstance(blob, bytes):
            specs.append(ArraySpec(group=group, name=name, dtype="bytes", shape=[len(blob)]))
            continue
        if blob.dtype.name not in DTYPES:
            raise ValueError(f"{group}.{name}: dtype {blob.dtype} is not one of {', '.join(DTYPES)}")
        specs.append(ArraySpec(group=group, name=name, dtype=blob.dtype.name, shape=list(blob.shape)))
    return specs


def pack(header: msgspec.Struct, blobs: Iterable[Blob], *, limit: int = MAX_CONTENT_BYTES) -> bytes:
    """One container: `header` (whose `arrays` must describe `blobs`, in order) and the bytes of `blobs`.

    Raises:
        ValueError: it would be larger than the format allows.
    """
    head = msgspec.msgpack.encode(header)
    if len(head) > MAX_HEADER_BYTES:
        raise ValueError(f"header of {len(head)} bytes, at most {MAX_HEADER_BYTES}")
    packer = msgpack.Packer()
    out = io.BytesIO()
    out.write(packer.pack(head))
    for blob in blobs:
        out.write(packer.pack(blob if isinstance(blob, bytes) else _shuffle(blob)))
    content = out.getbuffer()
    if len(content) > limit:
        raise ValueError(f"content of {len(content)} bytes, at most {limit}")
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(content)


def unpack(
    data: bytes,
    header_type: type[Header],
    *,
    where: object,
    limit: int = MAX_CONTENT_BYTES,
    upgrade: Upgrade | None = None,
) -> tuple[Header, dict[str, dict[str, Blob]]]:
    """Read a container back: its header, and its arrays by group and name (each its own, writable).

    Args:
        data: the whole file or record.
        header_type: the struct its header must be.
        where: named in an error.
        limit: decompressed bytes allowed.
        upgrade: turns the header map of an older schema into one of `header_type`.

    Raises:
        CheckpointCorrupt: anything at all is not as `format.py` says.
    """
    try:
        content = _decompress(data, limit)
        stream = msgpack.Unpacker(
            max_buffer_size=max(len(content), 1),
            max_bin_len=len(content),
            max_str_len=0,
            max_array_len=0,
            max_map_len=0,
            max_ext_len=0,
        )
        stream.feed(content)
        header = _header(_next_bin(stream), header_type, upgrade)
        groups: dict[str, dict[str, Blob]] = {}
        specs = cast(list[ArraySpec], header.arrays)  # type: ignore[attr-defined]
        if len(specs) > MAX_ARRAYS:
            raise ValueError(f"{len(specs)} arrays, at most {MAX_ARRAYS}")
        for spec in specs:
            group = groups.setdefault(spec.group, {})
            if spec.name in group:
                raise ValueError(f"array {spec.group}.{spec.name} is there twice")
            group[spec.name] = _array(spec, _next_bin(stream))
        if stream.tell() != len(content):
            raise ValueError(f"{len(content) - stream.tell()} bytes behind the last array")
    except (ValueError, TypeError, OverflowError, MemoryError, msgspec.MsgspecError) as error:
        # ValueError covers msgpack and our own refusals; TypeError and OverflowError come from numpy for
        # absurd shapes. Any of them means the same thing here.
        raise CheckpointCorrupt(
            "runtime state cannot be read",
            where=where,
            found=error,
            expected="a container as runtime_state/format.py specifies",
            remedy="resume from an older checkpoint (verl-slurm checkpoints)",
        ) from error
    return header, groups


def _decompress(data: bytes, limit: int) -> bytes:
    """The content of the one zstd frame in `data`; sizes are checked before anything is allocated."""
    try:
        frame = zstandard.get_frame_parameters(data)
        size = frame.content_size
        if size in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
            raise ValueError("the zstd frame does not say its content size")
        if size > limit or (frame.window_size > max(_MAX_WINDOW, size)):
            raise ValueError(f"{size} bytes decompressed, at most {limit}")
        if not frame.has_checksum:
            raise ValueError("the zstd frame has no checksum")
        # A declared size that the data cannot reach is refused by zstd; one that it exceeds, too.
        content = zstandard.ZstdDecompressor(max_window_size=0).decompress(
            data, max_output_size=max(size, 1), allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise ValueError(f"not one whole zstd frame: {error}") from error
    if len(content) != size:
        raise ValueError(f"{len(content)} bytes decompressed, {size} declared")
    return content


def _next_bin(stream: "msgpack.Unpacker") -> bytes:
    try:
        item = stream.unpack()
    except msgpack.OutOfData as error:
        raise ValueError("the content ends in the middle") from error
    except msgpack.UnpackException as error:
        raise ValueError(f"not msgpack: {error}") from error
    if isinstance(item, bytes):
        return item
    raise ValueError(f"{type(item).__name__} where a bin object belongs")


def _header(data: bytes, header_type: type[Header], upgrade: Upgrade | None) -> Header:
    if len(data) > MAX_HEADER_BYTES:
        raise ValueError(f"header of {len(data)} bytes, at most {MAX_HEADER_BYTES}")
    if upgrade is not None:
        raw = msgspec.msgpack.decode(data, type=dict[str, Any])
        if msgspec.msgpack.encode(raw) != data:
            raise ValueError("the header is not canonical (duplicate key, trailing bytes)")
        return msgspec.convert(upgrade(raw), header_type)
    header = msgspec.msgpack.decode(data, type=header_type)
    if msgspec.msgpack.encode(header) != data:
        raise ValueError("the header is not canonical (duplicate key, other number type, trailing bytes)")
    return header


def _array(spec: ArraySpec, data: bytes) -> Blob:
    if not NAME.fullmatch(spec.name) or not NAME.fullmatch(spec.group):
        raise ValueError(f"{spec.group!r}.{spec.name!r} is no name for an array")
    if spec.dtype not in DTYPES:
        raise ValueError(f"array {spec.name}: dtype {spec.dtype!r} is not allowed")
    itemsize = 1 if spec.dtype == "bytes" else np.dtype(spec.dtype).itemsize
    expected = math.prod(spec.shape) * itemsize
    if len(data) != expected:
        raise ValueError(f"array {spec.name}: {len(data)} bytes, {expected} declared")
    if spec.dtype == "bytes":
        if len(spec.shape) != 1:
            raise ValueError(f"array {spec.name}: bytes have one dimension")
        return data
    flat = np.frombuffer(data, dtype=np.uint8)
    if spec.dtype == "bool" and flat.size and flat.max() > 1:
        raise ValueError(f"array {spec.name}: a bool that is neither 0 nor 1")
    planes = flat.reshape(itemsize, -1) if itemsize > 1 else flat.reshape(1, -1)
    items = np.ascontiguousarray(planes.T).reshape(-1).copy()
    dtype = np.dtype(spec.dtype).newbyteorder("<")
    return items.view(dtype).astype(spec.dtype, copy=False).reshape(spec.shape)


def _shuffle(array: np.ndarray) -> bytes:
    """Little-endian bytes of `array` in C order, byte planes first."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    flat = little.reshape(-1).view(np.uint8)
    if array.dtype.itemsize == 1:
        return flat.tobytes()
    return np.ascontiguousarray(flat.reshape(-1, array.dtype.itemsize).T).tobytes()
