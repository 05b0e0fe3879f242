"""Packs pieces of content into zstd frames and back (`format.py`, section 1). Knows neither headers nor arrays.

Each frame is small, states its content size and is checked before a byte is allocated for it. So a reader needs the
result and one frame, whatever a file claims.
"""

import threading
from collections.abc import Callable, Sequence

import numpy as np
import zstandard

from verl_slurm.runtime_state.format import MAX_FRAME_BYTES

Read = Callable[[int, int], memoryview]
"""Offset and size → these bytes, or fewer at the end."""

# The ledger is written between two micro-batches; higher levels cost more than they save.
_LEVEL = 1
# Gives up on incompressible content at once and copies it: 10 GB/s in either direction.
_STORE_LEVEL = -50
# The exponents of floats hardly repeat: a small match table goes straight to their entropy, in a third of the time, and
# the result is smaller than with level 1's own.
_FLOATS = zstandard.ZstdCompressionParameters.from_level(
    _LEVEL, source_size=MAX_FRAME_BYTES, window_log=19, hash_log=6, min_match=7, write_checksum=True
)
# Smaller pieces share a frame.
_OWN_FRAME = 1 << 14
# The saving of level 1 on a sample of this size from the middle predicts its saving on all.
_SAMPLE = 1 << 14
# A saving below an eighth is not worth the time to decode it.
_WORTH = 7 / 8


class _Packers(threading.local):
    """The compressors of one thread: two threads must not share one. They are kept, as making one takes longer than a
    record."""

    def __init__(self) -> None:
        self.ints = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        self.floats = zstandard.ZstdCompressor(compression_params=_FLOATS)
        self.store = zstandard.ZstdCompressor(level=_STORE_LEVEL, write_checksum=True)


_PACKERS = _Packers()


class FrameWriter:
    """Gathers pieces into frames; `frames` has them after `close`. For one thread."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self._shared = bytearray()

    def add(self, piece: np.ndarray, *, floats: bool = False) -> None:
        """Appends one piece, at most MAX_FRAME_BYTES long; it is not kept.

        Args:
            piece: uint8 [bytes].
            floats: it holds parts of floating-point numbers.
        """
        if len(piece) < _OWN_FRAME:
            self.add_small(piece.data)
            return
        self.close()
        middle = max(len(piece) - _SAMPLE, 0) // 2
        sample = piece[middle : middle + _SAMPLE]
        packer = _PACKERS.floats if floats else _PACKERS.ints
        if len(packer.compress(sample.data)) > _WORTH * len(sample):
            packer = _PACKERS.store
        self.frames.append(packer.compress(piece.data))

    def add_small(self, pieces: bytes | memoryview) -> None:
        """Appends pieces that lie end to end, less than _OWN_FRAME in total; they share a frame with others."""
        if len(self._shared) + len(pieces) > MAX_FRAME_BYTES:
            self.close()
        self._shared += pieces

    def close(self) -> None:
        """Writes the small pieces that are still gathered."""
        if self._shared:
            self.frames.append(_PACKERS.ints.compress(self._shared))
            self._shared = bytearray()


class FrameReader:
    """Takes pieces from frames one after the other.

    Args:
        read: offset and size → these bytes of the frames' container.
        start: offset of the first frame.
        sizes: bytes of each frame.
    """

    def __init__(self, read: Read, start: int, sizes: Sequence[int]) -> None:
        self._read, self._at, self._sizes = read, start, iter(sizes)
        self._content = np.empty(0, np.uint8)
        self._used = 0
        self._unpacker = zstandard.ZstdDecompressor(max_window_size=0)

    def take(self, count: int) -> np.ndarray:
        """Returns the next `count` bytes, uint8 [count], read-only.

        Raises:
            ValueError: the piece is missing, or lies in two frames, or a frame is not whole.
        """
        if count == 0:
            return self._content[:0]
        if self._used == len(self._content):
            size = next(self._sizes, None)
            if size is None:
                raise ValueError("the content ends in the middle")
            content = decompress(self._read(self._at, size), MAX_FRAME_BYTES, self._unpacker)
            self._at += size
            self._content, self._used = np.frombuffer(content, np.uint8), 0
        # A piece lies in one frame, so a reader needs no buffer to join two.
        if self._used + count > len(self._content):
            raise ValueError(
                f"a piece of {count} bytes where its frame has {len(self._content) - self._used}"
            )
        self._used += count
        return self._content[self._used - count : self._used]

    def close(self) -> None:
        """Ends reading; nothing may be left.

        Raises:
            ValueError: there is more.
        """
        if self._used != len(self._content) or next(self._sizes, None) is not None:
            raise ValueError("there is content behind the last array")


def compress(content: bytes) -> bytes:
    """Returns one frame of `content`, at level 1."""
    return _PACKERS.ints.compress(content)


def decompress(data: memoryview, limit: int, unpacker: zstandard.ZstdDecompressor | None = None) -> bytes:
    """Returns the content of `data`, which is one frame.

    Args:
        limit: bytes of content allowed.
        unpacker: the caller's own, for many frames.

    Raises:
        ValueError: it is not one whole frame with a checksum and a declared size of 1 to `limit` bytes.
    """
    try:
        frame = zstandard.get_frame_parameters(data[:18])  # no frame header is longer
        size = frame.content_size
        if size in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
            raise ValueError("a zstd frame does not say its content size")
        # The window is memory, too: a small frame may ask the decoder for gigabytes of it.
        if not 0 < size <= limit or frame.window_size > max(limit, 1 << 20):
            raise ValueError(f"a zstd frame of {size} bytes decompressed, at most {limit}")
        # Without the checksum a flipped bit could pass as content.
        if not frame.has_checksum or frame.dict_id:
            raise ValueError("a zstd frame without a checksum, or with a dictionary")
        # zstd refuses a declared size that the data does not reach, and one that it exceeds.
        unpacker = unpacker or zstandard.ZstdDecompressor(max_window_size=0)
        content = unpacker.decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"not one whole zstd frame: {error}") from error
    if len(content) != size:
        raise ValueError(f"{len(content)} bytes decompressed, {size} declared")
    return content
