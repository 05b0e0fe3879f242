"""Specifies runtime state and rollout journal on disk.

Runtime state holds what a rank needs to resume inside a step: its position, its rollouts, the reward
buffers, the KL window, the generators. The journal (ledger) holds every finished rollout at once.

## 1. Container (both files use it), version 2

A sequence of zstd frames (RFC 8878), so that `zstd -d` shows what is in it:

```
skippable frame   0x184D2A5B, 12 bytes: "VSLRTST2"  u32 bytes of the next frame        20 bytes, always
zstd frame        header: the msgpack map of a closed, typed struct; at most MAX_HEADER_BYTES
zstd frame        pieces of arrays           each frame at most MAX_FRAME_BYTES of content;
...                                          the header's `frames` has the bytes of each
skippable frame   0x184D2A5C, zeros: padding, only where the limit of section 4 needs it
```

Every zstd frame has its content size in its header and zstd's checksum (XXH64) after it, and no dictionary.

The header's `arrays` say group, name, dtype, shape and `bits` of each array, in order; dtype `bytes` is an
opaque string of `shape[0]` bytes. Only the low `bits` bits of its items are stored; the others are 0. Items
are taken in C order, as unsigned integers of their width, in chunks of CHUNK_ITEMS; of each chunk first bits
0 to 7 of all its items (a *plane*, one byte an item), then bits 8 to 15 ... A last plane of 1, 2 or 4 bits
packs 8, 4 or 2 items in a byte, the first in the lowest bits. A plane of a chunk is a *piece*; pieces follow
each other through the frames, and each lies in one frame as a whole.

The reason: token ids are mostly zero bits and the upper bytes of floats repeat, so planes compress where items do
not; incompressible planes are stored, and cost nothing to decode. A reader checks the sizes in the header, then
allocates the arrays, and needs one more frame. Everything that can be large is flat, so hostile input
cannot make many small objects out of few bytes; and the header is decoded straight into a struct.

The header is *canonical*: encoding what was decoded must give the same bytes. Duplicate keys, extension
types, integers in the place of floats, unknown fields, overlong encodings and trailing bytes are refused by
that one rule. It is written and read by msgspec, and both times msgpack (the C extension of msgpack-python) must read
the same from it.

## 2. runtime_state.rank_0003.msgpack.zst

The container with `StateHeader` as its header. Groups: `rollouts`, `rewards`, `rng`.
`codec.decode` turns it into `RuntimeState`.

## 3. epoch_000003.rank_0000.ledger

```
"VSLEDGR2"  epoch u32  rank u32                                        16 bytes, once
"VSLR"  length u32  step u64  micro_batch u32  payload_crc u32  run (8 bytes)
        header_crc u32                                                 36 bytes, then the payload
...
```

With a key configured the magic is "VSLE" and the payload encrypted (`sealing.py`).

All little-endian. `length` counts the payload, a container with `RecordHeader`; `payload_crc` is its CRC-32
and `header_crc` the CRC-32 of the 32 bytes before it. `run` is the id of the run (`RUN/run_id`): a record of another
run is not used, whatever file it lies in, and the reader names its run.
 A record is written before its `append` returns and
durable (fdatasync) before the next one is written. `micro_batch` is the global index in its step, over all ranks.

A region that does not parse is a *torn tail* when no whole record follows it (the writer died there; cut
silently), and *damage* when one does (reported). All that follows is damage, too, once payloads of more bytes
than the segment has turned out wrong: such frames overlap, and no writer of segments makes them.

Where two epochs hold the same (step, micro_batch), the newest epoch's counts: it is the one whose updates used
its own record. A record without arrays takes back what was recorded under its name before: rollouts that were refused.

## 4. Limits

`MAX_*` below. They bound what a reader allocates before anything is believed. And a bomb must bring its
bytes: arrays of more than FREE_BYTES + MAX_EXPANSION x the bytes of the container are refused. What is true
and as empty as that is padded by its writer.
"""

import re
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

if TYPE_CHECKING:  # the daemon reads this file for the schema and has no memory to spare for numpy
    import numpy as np


Arrays = dict[str, "np.ndarray"]
"""Named arrays of one rollout batch or buffer."""

Phase = Literal["generate", "score", "advantage", "update", "evaluate", "step_end"]

RUNTIME_STATE_VERSION = 2

# Name of the file of one rank, inside a checkpoint directory. Full match only.
RUNTIME_STATE_FILE = re.compile(r"runtime_state\.rank_(\d{4,})\.msgpack\.zst", re.ASCII)

NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
"""Names of arrays, generators and metric rows' arrays; full match."""

GROUPS = ("rollouts", "rewards", "rng")

# Fixed-width little-endian types only: no objects, no strings, no records.
DTYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "bytes"),
)

# Arrays of one file. 500 samples x 8000 tokens x 25 bytes: 100 MB.
MAX_CONTENT_BYTES = (2 << 30) - 1
# Fits the second-level cache, planes and all. A multiple of 8, so that packed planes end on a byte.
CHUNK_ITEMS = 1 << 18
MAX_FRAME_BYTES = 1 << 20
_MAX_FRAMES = 1 << 16
FREE_BYTES = 32 << 20
MAX_EXPANSION = 1024
# Bytes of one micro-batch; the frame's length field is 32 bit.
MAX_RECORD_BYTES = 256 << 20
MAX_HEADER_BYTES = 4 << 20
MAX_ARRAYS = 256
MAX_DIMENSIONS = 8
# Rows of metric history that travel with a rank; TensorBoard has the rest.
HISTORY_ROWS = 256

_NonNegative = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_CONTENT_BYTES)]
_ArrayName = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Row = Annotated[dict[Annotated[str, msgspec.Meta(max_length=128)], float], msgspec.Meta(min_length=1)]


class ArraySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes one array of a container: its group and how its bytes are read."""

    group: _ArrayName
    name: _ArrayName
    dtype: _ArrayName
    shape: Annotated[list[_Size], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    bits: Annotated[int, msgspec.Meta(ge=0, le=64)]
    """Low bits of each item that are stored."""


_Specs = Annotated[list[ArraySpec], msgspec.Meta(max_length=MAX_ARRAYS)]
_Frames = Annotated[
    list[Annotated[int, msgspec.Meta(ge=1, le=2 * MAX_FRAME_BYTES)]], msgspec.Meta(max_length=_MAX_FRAMES)
]


class StateHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Header of a runtime-state file: `RuntimeState` without its arrays."""

    version: int
    rank: _NonNegative
    world_size: _NonNegative
    step: _NonNegative
    phase: Phase
    index: _NonNegative
    safe_point: _NonNegative
    rollout_offset: _NonNegative
    episode_id: _NonNegative
    kl_coef: float
    kl_window: Annotated[list[float], msgspec.Meta(max_length=65536)]
    history: Annotated[list[_Row], msgspec.Meta(max_length=HISTORY_ROWS)]
    arrays: _Specs
    frames: _Frames
    """Bytes of each frame of pieces."""


class RecordHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Header of one journal record."""

    step: _NonNegative
    micro_batch: _NonNegative
    arrays: _Specs
    frames: _Frames
    """Bytes of each frame of pieces."""


class RuntimeState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, eq=False):
    """Holds all that one rank needs to resume inside a step, besides weights and optimizers."""

    rank: int
    world_size: int
    step: int
    """Whole steps done."""
    phase: Phase
    index: int
    """Position inside the phase: the next micro-batch (generate), the next mini-batch (update)."""
    safe_point: int
    """Safe points passed since the end of the last whole step; 0 at a step's end."""
    rollout_offset: int
    """Responses requested in total, over all ranks; exact. Each prompt gets rollout.samples_per_prompt of them."""
    episode_id: int
    """Finished episodes in total, over all ranks."""
    kl_coef: float
    kl_window: list[float] = []
    rng: "dict[str, bytes | np.ndarray]" = {}
    """State of each generator by name: python, numpy, torch, cuda."""
    rollouts: Arrays = {}
    """The rollout queue of the running step on this rank."""
    rewards: Arrays = {}
    """The reward buffers of the running step, as far as they exist: scores, values, advantages, returns."""
    history: list[dict[str, float]] = []
    """The newest rows of metrics; `encode` keeps the last HISTORY_ROWS."""
    version: int = RUNTIME_STATE_VERSION


def runtime_state_name(rank: int) -> str:
    """Returns the file name of one rank's runtime state inside a checkpoint."""
    return f"runtime_state.rank_{rank:04d}.msgpack.zst"
