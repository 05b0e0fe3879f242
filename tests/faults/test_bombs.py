"""Small files that claim to be large: refused in bounded memory. Beside tests/fuzz and runtime_state/test_codec.py."""

import struct

import pytest
import zstandard

from tests.fuzz.engine import _memory_of
from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.checkpoint.format import manifest
from verl_slurm.runtime_state import codec

BUDGET = 50_000_000
"""Bytes by which memory may grow."""
GIB = 1 << 30


def _endless_zstd(size: int) -> bytes:
    """A frame of `size` zeros that does not say how many."""
    compressor = zstandard.ZstdCompressor().compressobj()
    pieces = [compressor.compress(bytes(1 << 20)) for _ in range(size >> 20)]
    return b"".join([*pieces, compressor.flush()])


def _record(head: bytes) -> bytes:
    return struct.pack("<II8sI", 0x184D2A5B, 12, b"VSRECRD1", len(head)) + head


def _of_msgpack(content: bytes) -> bytes:
    return _record(zstandard.ZstdCompressor(write_checksum=True).compress(content))


RUNTIME_STATES = {
    "a head that unpacks to a gibibyte and does not say so": lambda: _record(_endless_zstd(GIB)),
    "an array of four thousand million": lambda: _of_msgpack(b"\xdd\xff\xff\xff\xff" + bytes(64)),
    "a map of four thousand million": lambda: _of_msgpack(b"\xdf\xff\xff\xff\xff" + bytes(64)),
    "a string of four gibibytes": lambda: _of_msgpack(b"\xdb\xff\xff\xff\xff" + bytes(64)),
    "bytes of four gibibytes": lambda: _of_msgpack(b"\xc6\xff\xff\xff\xff" + bytes(64)),
    "an extension of four gibibytes": lambda: _of_msgpack(b"\xc9\xff\xff\xff\xff\x01" + bytes(64)),
    "a million arrays in each other": lambda: _of_msgpack(b"\x91" * 1_000_000 + b"\xc0"),
    "a known field that is a million maps in each other": lambda: _of_msgpack(
        b"\x93\x81\xa7history" + b"\x81\xa1x" * 1_000_000 + b"\xc0"
    ),
    "an unknown field that is a million maps in each other": lambda: _of_msgpack(
        b"\x93\x81\xa1x" + b"\x81\xa1x" * 1_000_000 + b"\xc0"
    ),
    "a million small maps for arrays": lambda: _of_msgpack(
        b"\x93\x80\xdd\0\x0f\x42\x40" + b"\x80" * 1_000_000
    ),
    "skippable frames without end": lambda: struct.pack("<II", 0x184D2A50, 0) * 100_000,
}

MANIFESTS = {
    "a million lists in each other": lambda: b"[" * 1_000_000,
    "a million maps in each other": lambda: b'{"a":' * 1_000_000,
    "a number of a million digits": lambda: b'{"step":' + b"9" * 1_000_000 + b"}",
    "a power beyond all": lambda: b'{"step":1e999999999}',
    "too many bytes": lambda: b" " * ((64 << 20) + 1),
}


@pytest.mark.parametrize("name", RUNTIME_STATES)
def test_a_runtime_state_that_is_a_bomb_is_refused_in_little_memory(name: str) -> None:
    data = RUNTIME_STATES[name]()
    assert len(data) < 2 << 20

    def decode() -> None:
        with pytest.raises(CheckpointCorrupt):
            codec.decode(data)

    assert _memory_of(decode) < BUDGET


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_is_a_bomb_is_refused_in_little_memory(name: str) -> None:
    data = MANIFESTS[name]()

    def parse() -> None:
        with pytest.raises(CheckpointCorrupt):
            manifest.parse(data, where="test")

    assert _memory_of(parse) < BUDGET
