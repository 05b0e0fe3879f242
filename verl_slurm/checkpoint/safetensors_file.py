"""The header of a safetensors file, and whether the file is as long as it says.

The format is 8 bytes little-endian N, N bytes of JSON, then the tensors at `data_offsets` behind that:
https://github.com/huggingface/safetensors#format. There is no checksum in it: what is found is a file that was cut off.
"""

import os
import struct
from typing import Any, NamedTuple

import msgspec

from verl_slurm.errors import UNREADABLE

__all__ = ["Header", "read_header", "safetensors_problem"]

# The limit of the safetensors library: https://github.com/huggingface/safetensors#format
_MAX_HEADER_BYTES = 100_000_000
_NO_HEADER = "a header that is not one of safetensors"


class Header(NamedTuple):
    """What the file says of itself: the entries by tensor name, and its own bytes (without the 8 before it)."""

    entries: dict[str, dict[str, Any]]
    num_bytes: int


def read_header(fd: int) -> Header | str:
    """The header, or what is wrong with it. Called by: submit.model_files."""
    size = os.fstat(fd).st_size
    first = os.pread(fd, 8, 0)
    if len(first) < 8:
        return f"{size} bytes, less than a header"
    (length,) = struct.unpack("<Q", first)
    if length > min(_MAX_HEADER_BYTES, size - 8):
        return f"a header of {length} bytes in a file of {size}"
    try:
        return Header(msgspec.json.decode(os.pread(fd, length, 8), type=dict[str, dict[str, Any]]), length)
    except UNREADABLE:
        return _NO_HEADER


def safetensors_problem(fd: int) -> str:
    """What is wrong with the file, by its header and its size; empty where nothing is.

    Called by: submit.model_files, verl.shards.
    """
    header = read_header(fd)
    if isinstance(header, str):
        return header
    try:
        ends = [_end(entry) for name, entry in header.entries.items() if name != "__metadata__"]
    except (LookupError, TypeError, ValueError):
        return _NO_HEADER
    expected = 8 + header.num_bytes + max(ends, default=0)
    size = os.fstat(fd).st_size
    return "" if size == expected else f"{size} bytes, its header says {expected}"


def _end(entry: dict[str, Any]) -> int:
    start, end = entry["data_offsets"]
    if not (isinstance(start, int) and isinstance(end, int) and 0 <= start <= end):
        raise ValueError
    return end
