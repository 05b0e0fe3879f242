"""Specifies where each tensor of a domain lies: `actor/index.json` and the files beside it.

```
actor/index.json       {"format": 1, "tensors": {NAME: {"dtype": "float32", "shape": [64, 32], "pieces": [PIECE, ...]}}}
      PIECE            {"file": "rank_0000.bin", "at": 4096, "offset": [0, 0], "shape": [32, 32]}
      a run            {"file": "rank_0003.bin", "at": 0, "offset": [0, 0], "shape": [2, 32], "count": 32, "every": 8}
actor/rank_0000.bin    the pieces that rank 0 wrote, one after the other
```

A PIECE with a `count` is a run: it stands for so many of one shape, each at `at` in its file. The next one lies in the
file of the rank that is `every` higher (1 if absent), and begins where the one before it ends along `axis` (0 if
absent). So an index is as long for 10,000 ranks as for a hundred. Runs of fewer than SHORTEST_RUN pieces are written
piece by piece.

A piece is a box of a tensor: `offset` and `shape` have its number of dimensions (none for a scalar). Its elements lie
at `at` in the file, row by row (C order), little-endian, without gaps. Every element of a tensor is in exactly one
piece. Pieces begin at multiples of PIECE_ALIGNMENT; files are padded with zeros to a multiple of FILE_ALIGNMENT, so
that reads and writes can bypass the page cache.

Any number of ranks, sharded in any way, can fill their own boxes from these (`save.ranks.loader`). No part is a pickle,
and no part is believed before the manifest's digests were checked.
"""

import math
import re
from collections.abc import Iterator
from typing import Annotated, Literal, Self

import msgspec

from verl_slurm.base import bounded
from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.checkpoint.format.specification import MAX_FILES

INDEX = "index.json"
PIECE_ALIGNMENT = 64
FILE_ALIGNMENT = 4096
MAX_INDEX_BYTES = bounded.INDEX.num_bytes
SHORTEST_RUN = 16
# ASCII: without it `\d` matches the digits of all scripts.
_FILE = re.compile(r"rank_\d{4,9}\.bin", re.ASCII)

# Written out, not asked of torch: the daemon and the command line read indexes without it.
DTYPE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
"""Element types of a checkpoint, by torch's names, and the bytes of an element."""

# With at most 8 bytes an element, every size and place in bytes fits a signed 64-bit number.
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**56)]
_Shape = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=16)]


class Piece(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Locates a box of a tensor and its bytes, or a run of such boxes."""

    file: str
    at: _Size
    """Bytes from the start of the file."""
    offset: _Shape
    shape: _Shape
    # Each has a file of its own.
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_FILES)] = 1
    """Boxes of the run."""
    every: Annotated[int, msgspec.Meta(ge=1, le=2**31)] = 1
    """From one box's rank to the next one's."""
    axis: Annotated[int, msgspec.Meta(ge=0, le=15)] = 0
    """The dimension along which the boxes of a run follow each other."""

    @property
    def numel(self) -> int:
        """Returns the elements of one box."""
        return math.prod(self.shape)

    @property
    def ranks(self) -> range:
        """Returns the ranks whose files have the boxes, in their order."""
        first = rank_of(self.file)
        return range(first, first + self.count * self.every, self.every)

    def one(self, number: int) -> "Piece":
        """Returns a box of the run as a piece by itself, counted from 0."""
        if self.count == 1:
            return self
        offset = list(self.offset)
        offset[self.axis] += number * self.shape[self.axis]
        return Piece(file=tensor_file(self.ranks[number]), at=self.at, offset=tuple(offset), shape=self.shape)

    def between(self, low: int, high: int) -> Iterator["Piece"]:
        """Yields the boxes that may have elements from `low` to below `high` along `axis`; no run: itself."""
        if self.count == 1:
            yield self
            return
        begin, size = self.offset[self.axis], self.shape[self.axis]
        for number in range(max(0, (low - begin) // size), min(self.count, -((begin - high) // size))):
            yield self.one(number)


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes one whole tensor."""

    dtype: str
    shape: _Shape
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def num_pieces(self) -> int:
        return sum(piece.count for piece in self.pieces)

    def without_runs(self) -> Self:
        """Returns this with each box as a piece by itself."""
        if self.num_pieces == len(self.pieces):
            return self
        pieces = (piece.one(number) for piece in self.pieces for number in range(piece.count))
        return msgspec.structs.replace(self, pieces=tuple(pieces))


class TensorIndex(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lists all tensors of a domain."""

    tensors: dict[str, TensorEntry]
    format: Literal[1] = 1


def tensor_file(rank: int) -> str:
    """Returns the name of the file that `rank` wrote."""
    return f"rank_{rank:04d}.bin"


def rank_of(file: str) -> int:
    """Returns the rank that wrote a file of this name."""
    return int(file[5:-4])


def render_index(index: TensorIndex) -> bytes:
    """Returns the bytes of index.json."""
    return msgspec.json.encode(index, order="sorted") + b"\n"


def parse_index(data: bytes, *, where: object, limit: bounded.Limit = bounded.INDEX) -> TensorIndex:
    """Parses the index and checks it by itself. CheckpointCorrupt: it violates this specification."""
    try:
        index = bounded.decode_json(data, TensorIndex, limit, doubles=False)
        # An index in our own rendering has no key twice; the search for doubled keys takes as long as all the rest.
        if render_index(index) != data:
            bounded.refuse_doubled_keys(data)
        for name, entry in index.tensors.items():
            _check(name, entry)
    except (ValueError, RecursionError, OverflowError, msgspec.MsgspecError) as error:
        raise CheckpointCorrupt(
            "the index of a checkpoint's tensors does not verify",
            where=where,
            found=error,
            remedy="resume from an older checkpoint (verl-slurm list RUN)",
        ) from error
    return index


def slabs(entry: TensorEntry, num_bytes: int) -> Iterator[TensorEntry]:
    """Cuts the tensor into entries of at most `num_bytes` each, in C order."""
    # A scalar has no dimension to cut.
    if entry.num_bytes <= num_bytes or not entry.shape:
        yield entry
        return
    entry = entry.without_runs()
    # By type and shape alone, so that two layouts of one tensor are cut alike.
    row = entry.num_bytes // entry.shape[0]
    for part in _cut(entry, max(1, num_bytes // row)):
        if part.num_bytes <= num_bytes:
            yield part
        else:
            # One row is too large by itself: it is cut along the next dimension.
            yield from slabs(_only_row(part), num_bytes)


def _cut(entry: TensorEntry, rows: int) -> Iterator[TensorEntry]:
    """Cuts along the first dimension, `rows` at a time."""
    # The rows are swept once: a piece is looked at from the cut that reaches it to the one that passes it.
    waiting = sorted(entry.pieces, key=lambda piece: piece.offset[0], reverse=True)
    reached: list[Piece] = []
    for start in range(0, entry.shape[0], rows):
        stop = min(start + rows, entry.shape[0])
        while waiting and waiting[-1].offset[0] < stop:
            reached.append(waiting.pop())
        reached = [piece for piece in reached if piece.offset[0] + piece.shape[0] > start]
        pieces = tuple(_rows_of(piece, start, stop, DTYPE_BYTES[entry.dtype]) for piece in reached)
        yield TensorEntry(dtype=entry.dtype, shape=(stop - start, *entry.shape[1:]), pieces=pieces)


def _rows_of(piece: Piece, start: int, stop: int, element_bytes: int) -> Piece:
    """Returns the part of a piece in the rows from `start` to `stop`: in C order these bytes are contiguous."""
    low, high = max(start, piece.offset[0]), min(stop, piece.offset[0] + piece.shape[0])
    skipped = (low - piece.offset[0]) * math.prod(piece.shape[1:]) * element_bytes
    return Piece(
        file=piece.file,
        at=piece.at + skipped,
        offset=(low - start, *piece.offset[1:]),
        shape=(high - low, *piece.shape[1:]),
    )


def _only_row(entry: TensorEntry) -> TensorEntry:
    pieces = tuple(
        Piece(file=piece.file, at=piece.at, offset=piece.offset[1:], shape=piece.shape[1:])
        for piece in entry.pieces
    )
    return TensorEntry(dtype=entry.dtype, shape=entry.shape[1:], pieces=pieces)


def _check(name: str, entry: TensorEntry) -> None:
    if entry.dtype not in DTYPE_BYTES:
        raise ValueError(f"{name}: type {entry.dtype!r}")
    # Each dimension may be within `_Size` and the product far beyond it.
    if math.prod(entry.shape) >= 2**56:
        raise ValueError(f"{name}: a shape of {entry.shape}")
    for piece in entry.pieces:
        # The name becomes a path below the domain, so it may hold no separator.
        if not _FILE.fullmatch(piece.file):
            raise ValueError(f"{name}: a file named {piece.file!r}")
        # Before `_run_shape` counts along it. Boxes without extent would all lie at one place.
        if piece.count > 1 and (piece.axis >= len(piece.shape) or not piece.numel):
            raise ValueError(f"{name}: a run of {piece.shape} along {piece.axis}")
        if piece.count > 1 and piece.file != tensor_file(rank_of(piece.file)):
            raise ValueError(f"{name}: a run from a file named {piece.file!r}")
        inside = len(piece.offset) == len(piece.shape) == len(entry.shape) and all(
            at + size <= whole
            for at, size, whole in zip(piece.offset, _run_shape(piece), entry.shape, strict=True)
        )
        if not inside or piece.at % PIECE_ALIGNMENT:
            raise ValueError(f"{name}: a piece {piece.offset} + {piece.shape} at {piece.at}")
    # Boxes that lie within the whole, do not overlap and have as many elements as it cover all of it.
    if sum(piece.count * piece.numel for piece in entry.pieces) != math.prod(entry.shape):
        raise ValueError(f"{name}: its pieces do not make {entry.shape}")
    # A box without elements lies in no other, wherever it begins. The boxes of a run make one, without gaps.
    _refuse_overlap(
        name,
        [
            msgspec.structs.replace(piece, shape=_run_shape(piece), count=1)
            for piece in entry.pieces
            if piece.numel
        ],
    )


def _run_shape(piece: Piece) -> _Shape:
    """Returns the shape of the box that all boxes of a run make."""
    if piece.count == 1:
        return piece.shape
    return tuple(size * piece.count if axis == piece.axis else size for axis, size in enumerate(piece.shape))


def _refuse_overlap(name: str, pieces: list[Piece]) -> None:
    if not pieces:
        return
    if not pieces[0].shape:
        if len(pieces) > 1:
            raise ValueError(f"{name}: two pieces of a scalar")
        return
    # Along the dimension with the most cuts the fewest pieces stand side by side. After sorting along it, a piece is
    # compared with those alone that have not ended before it begins.
    axis = max(range(len(pieces[0].shape)), key=lambda d: len({piece.offset[d] for piece in pieces}))
    # Ranks cut a tensor into few boxes that meet along this axis. A hostile index may have all of them meet, and each
    # pair would be compared.
    patience = 64 * len(pieces) + 4096
    open_ones: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.offset[axis]):
        patience -= len(open_ones)
        if patience < 0:
            raise ValueError(f"{name}: {len(pieces)} pieces that lie across each other")
        # Those that end before this one begins can meet no later one, either.
        open_ones = [p for p in open_ones if p.offset[axis] + p.shape[axis] > piece.offset[axis]]
        for other in open_ones:
            if all(
                a < b + size_b and b < a + size_a
                for a, size_a, b, size_b in zip(
                    piece.offset, piece.shape, other.offset, other.shape, strict=True
                )
            ):
                raise ValueError(f"{name}: two pieces overlap at {piece.offset}")
        open_ones.append(piece)
