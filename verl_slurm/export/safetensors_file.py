"""Reads the header of a safetensors file, and checks that the file has the length that it states.

The format is 8 bytes little-endian N, N bytes of JSON, then the tensors at `data_offsets` after that:
https://github.com/huggingface/safetensors#format. It has no checksum, so the check finds truncated files.
"""

import os
import struct
from typing import NamedTuple

import msgspec

from verl_slurm.base.bounded import SAFETENSORS_HEADER, decode_json
from verl_slurm.base.errors import UNREADABLE

_NO_HEADER = "a header that is not one of safetensors"


class Tensor(msgspec.Struct, frozen=True):
    """The needed fields of a tensor's entry; `__metadata__` has neither."""

    shape: list[int] | None = None
    data_offsets: tuple[int, int] | None = None


class Header(NamedTuple):
    """The file's own description: the entries by tensor name, and the header's bytes (without the 8 before it)."""

    entries: dict[str, Tensor]
    num_bytes: int


def read_header(fd: int) -> Header | str:
    """Returns the header, or its fault."""
    size = os.fstat(fd).st_size
    first = os.pread(fd, 8, 0)
    if len(first) < 8:
        return f"{size} bytes, less than a header"
    (length,) = struct.unpack("<Q", first)
    # Before it is read: the length is the file's own word.
    if length > min(SAFETENSORS_HEADER.num_bytes, size - 8):
        return f"a header of {length} bytes in a file of {size}"
    try:
        data = os.pread(fd, length, 8)
        return Header(decode_json(data, dict[str, Tensor], SAFETENSORS_HEADER, doubles=False), length)
    except UNREADABLE:
        return _NO_HEADER


def safetensors_problem(fd: int) -> str:
    """Returns the file's fault by its header and its size; empty if there is none."""
    header = read_header(fd)
    if isinstance(header, str):
        return header
    try:
        ends = [_end(entry) for name, entry in header.entries.items() if name != "__metadata__"]
    except ValueError:
        return _NO_HEADER
    expected = 8 + header.num_bytes + max(ends, default=0)
    size = os.fstat(fd).st_size
    # The format has no checksum, and its tensors leave no gap: a file of another length was cut or has a tail.
    return "" if size == expected else f"{size} bytes, its header says {expected}"


def _end(entry: Tensor) -> int:
    # A missing pair must not count as an empty tensor at 0.
    start, end = entry.data_offsets or (-1, -1)
    if not 0 <= start <= end:
        raise ValueError("no place in the file")
    return end
