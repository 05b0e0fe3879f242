"""Cuts arrays into byte planes and back (`format.py`, section 1): plain arithmetic on numpy, no bytes of a file.

Byte k of every item in a chunk forms a plane.
"""

import sys
from collections.abc import Callable, Iterator

import numpy as np

from verl_slurm.runtime_state.format import CHUNK_ITEMS

_UINT = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_SMALL_BYTES = 16384
_LITTLE = sys.byteorder == "little"


def used_bits(array: np.ndarray) -> int:
    """Returns how many low bits of its items are ever set, as a width that planes can have."""
    if array.dtype.kind == "b":
        # A bool by view may hold any byte, and counts as one bit.
        return 1 if array.any() else 0
    if not array.size:
        return 0
    items = array.view(_UINT[array.itemsize]) if array.dtype.isnative else _unsigned(array)
    # One pass: the highest bit of all items together is the widest item's.
    return rounded(int(np.bitwise_or.reduce(items, axis=None)).bit_length())


def small_planes(array: np.ndarray, bits: int) -> bytes | None:
    """Returns all pieces of a small array, end to end, as `split` gives them, in a fraction of the time; None if it is
    large.

    Args:
        bits: from `used_bits`.
    """
    # On another byte order a slice would give the planes in reverse.
    if array.nbytes > min(_SMALL_BYTES, CHUNK_ITEMS) or not (_LITTLE and array.dtype.isnative):
        return None
    # A ledger record has six of them, and its cost grows with the number of calls to numpy: slices of bytes instead.
    items, size = array.tobytes(), array.itemsize
    whole, rest = divmod(bits, 8)
    planes = [items[shift::size] for shift in range(whole)]
    if rest:
        planes.append(_pack(np.frombuffer(items[whole::size], np.uint8), rest).tobytes())
    return b"".join(planes)


def rounded(bits: int) -> int:
    """Returns the next width whose last plane has 1, 2, 4 or 8 bits."""
    whole, rest = divmod(bits, 8)
    return 8 * whole + (0, 1, 2, 4, 4, 8, 8, 8)[rest]


def split(array: np.ndarray, bits: int) -> Iterator[np.ndarray]:
    """Yields the pieces of `array`, each uint8 [bytes]: chunk by chunk, and in it plane by plane.

    A piece may be a view of `array`, or be overwritten when the next one is taken.

    Args:
        bits: from `used_bits`.
    """
    flat = _unsigned(array)
    # One scratch for all chunks, in the second-level cache (`format.CHUNK_ITEMS`).
    scratch = np.empty(min(flat.size, CHUNK_ITEMS), flat.dtype)
    plane = np.empty(scratch.size + 7, np.uint8)
    for start in range(0, flat.size if bits else 0, CHUNK_ITEMS):
        chunk = flat[start : start + CHUNK_ITEMS]
        for shift in range(0, bits, 8):
            # The plane is the chunk itself: no copy.
            if flat.itemsize == 1:
                low = chunk
            elif shift == 0:
                low = plane[: chunk.size]
                np.copyto(low, chunk, casting="unsafe")
            else:
                low = plane[: chunk.size]
                # Shift and cast, which numpy does with vector instructions: a transposed copy took three times as long.
                np.right_shift(chunk, flat.dtype.type(shift), out=scratch[: chunk.size])
                np.copyto(low, scratch[: chunk.size], casting="unsafe")
            width = min(8, bits - shift)
            yield low if width == 8 else _pack(low, width)


def join(out: np.ndarray, bits: int, take: Callable[[int], np.ndarray]) -> None:
    """Fills `out` from its pieces; the inverse of `split`.

    Args:
        out: contiguous, in this machine's byte order. All of it is written.
        take: returns the next `n` bytes as uint8 [n]; they need to stay valid until the next call.
    """
    flat = _unsigned(out)
    # Nothing is stored for an array of zeros.
    if not bits:
        flat[:] = 0
        return
    # Uses the narrowest type that holds the items, two planes at a time: the cost of wide arithmetic grows with its
    # bytes.
    size = min(flat.size, CHUNK_ITEMS)
    narrow = np.dtype(np.uint16 if bits <= 16 else np.uint32 if bits <= 32 else np.uint64)
    pair, sum_, step = np.empty(size, np.uint16), np.empty(size, narrow), np.empty(size, narrow)
    for start in range(0, flat.size, CHUNK_ITEMS):
        chunk = flat[start : start + CHUNK_ITEMS]
        count = chunk.size
        whole = chunk if flat.dtype == narrow else sum_[:count]
        for shift in range(0, bits, 16):
            part: np.ndarray = _plane(take, bits - shift, count)
            if shift + 8 < bits:
                np.copyto(pair[:count], part)  # before the next is taken
                high = _plane(take, bits - shift - 8, count)
                part = pair[:count]
                part |= np.left_shift(high, np.uint16(8), dtype=np.uint16)
            if shift == 0:
                np.copyto(whole, part, casting="unsafe")
            else:
                np.copyto(step[:count], part)
                whole |= np.left_shift(step[:count], narrow.type(shift), out=step[:count])
        # Wider than what is stored, the upper bits become 0.
        if whole is not chunk:
            np.copyto(chunk, whole, casting="unsafe")


def _plane(take: Callable[[int], np.ndarray], bits: int, count: int) -> np.ndarray:
    """Returns the next plane of `count` items, uint8 [count]; `bits` of them are left."""
    width = min(8, bits)
    raw = take((count * width + 7) // 8)
    return raw if width == 8 else _unpack(raw, width, count)


def _unsigned(array: np.ndarray) -> np.ndarray:
    """Returns [items] as unsigned integers of this machine's byte order; a view where possible."""
    if array.dtype.kind == "b":
        # A view can make a bool that is neither 0 nor 1; it means true.
        return array.reshape(-1).view(np.uint8)
    if not (
        array.dtype.isnative and array.flags.c_contiguous
    ):  # a needless conversion by numpy takes longer than the test
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    return array.reshape(-1).view(_UINT[array.itemsize])


def _pack(plane: np.ndarray, width: int) -> np.ndarray:
    """Packs `width` bits (1, 2, 4) of each byte, the first item in the lowest bits."""
    if width == 1:
        return np.packbits(plane, bitorder="little")
    per_byte = 8 // width
    padded = plane
    if plane.size % per_byte:
        padded = np.zeros(-(-plane.size // per_byte) * per_byte, np.uint8)
        padded[: plane.size] = plane
    # A word holds the items of one byte; little-endian, so that the first item is the lowest byte.
    word = padded.view(np.dtype(f"<u{per_byte}"))
    packed = word.copy()
    for nth in range(1, per_byte):
        packed |= word >> (nth * (8 - width))
    return packed.astype(np.uint8)


def _unpack(packed: np.ndarray, width: int, count: int) -> np.ndarray:
    if width == 1:
        return np.unpackbits(packed, count=count, bitorder="little")
    per_byte = 8 // width
    word = packed.astype(f"<u{per_byte}")
    spread = word.copy()
    for nth in range(1, per_byte):
        spread |= word << (nth * (8 - width))
    # The shifts leave bits of the neighbours above each item.
    spread &= int.from_bytes(bytes([(1 << width) - 1]) * per_byte, "little")
    return spread.view(np.uint8)[:count]
