"""Specifies runtime state and rollout journal on disk.

Runtime state holds what a rank needs to resume inside a step: its position, its rollouts, the reward
buffers, the KL window, the generators. The journal (ledger) holds every finished rollout at once.

## 1. Record, version 1

Whatever this package keeps is a record: a rank's runtime state, a rollout, a response of verl's, tokens. A record is a
sequence of zstd frames (RFC 8878), so that `zstd -d` shows what is in it:

```
skippable frame   0x184D2A5B, 12 bytes: "VSRECRD1"  u32 bytes of the next frame        20 bytes, always
zstd frame        head: msgpack [fields, arrays, frames]; at most MAX_HEAD_BYTES
zstd frame        content of the arrays      each frame at most MAX_FRAME_BYTES of content;
...                                          `frames` has the bytes of each
```

Every zstd frame has its content size in its header and zstd's checksum (XXH64) after it, and no dictionary.

`fields` is what the kind of record says (a struct, or nil). `arrays` has [name, dtype, shape] of each array, in order.
Items are taken in C order, in chunks of MAX_FRAME_BYTES; of each chunk first the lowest bytes of all its items, then
the second ... (*byte shuffle*). The chunks follow each other through the frames.

The reason: token ids are mostly zero bytes and the upper bytes of floats repeat, so they compress where items do not. A
reader checks the sizes in the head, then allocates the arrays, and needs some MB besides. Everything that can be
large is flat, so hostile input cannot make many small objects out of few bytes; and the head is decoded straight into a
struct. Only in a response's head are plain objects of any kind, and MAX_HEAD_BYTES bounds their number.

The head is *canonical*: encoding what was decoded must give the same bytes. Duplicate keys, integers in the place of
floats, unknown fields, overlong encodings and trailing bytes are refused by that one rule. It is written and read by
msgspec, and both times msgpack (the C extension of msgpack-python) must read the same from it.

## 2. runtime_state.rank_0003.msgpack.zst

A record with `StateHead` as its fields. Arrays are named `rollouts.NAME`, `rewards.NAME` and `loop.NAME`.
`codec.decode` turns it into `RuntimeState`. Of a loop that is not ours it has position, generators and `loop.tree`
(`loops.loop_state`); the rest is zero.

## 3. attempt_000003.rank_0000.ledger

```
"VSLEDGR2"  attempt u32  rank u32                                        16 bytes, once
"VSLR"  length u32  step u64  micro_batch u32  payload_crc u32  run (8 bytes)
        header_crc u32                                                 36 bytes, then the payload
...
```

With a key configured the magic is "VSLE" and the payload encrypted (`sealing.py`).

All little-endian. `length` counts the payload, a record; `payload_crc` is its CRC-32 and `header_crc` the CRC-32 of
the 32 bytes before it. `run` is the id of the run (`RUN/run_id`): a record of another run is not used, whatever file it
lies in, and the reader names its run. A record is written before its `append` returns and durable (fdatasync) before
the next one is written. `micro_batch` is the global index in its step, over all ranks. The fields of a rollout's head
are nil; those of verl's responses and tokens, and their keys, are in `rollout_records` and `token_log`.

A region that does not parse is a *torn tail* when no whole record follows it (the writer died there; cut
silently), and *damage* when one does (reported). All that follows is damage, too, once payloads of more bytes
than the segment has turned out wrong: such frames overlap, and no writer of segments makes them.

Where two attempts hold the same (step, micro_batch), the newest attempt's counts: it is the one whose updates used
its own record. A rollout without arrays takes back what was recorded under its name before: it was refused.

## 4. Limits

`MAX_*` below. They bound what a reader allocates before anything is believed. And a bomb must bring its
bytes: arrays of more than FREE_BYTES + MAX_EXPANSION x the bytes of the record are refused. What is true
and as empty as that is cut into frames of SPARSE_FRAME_BYTES, each of which takes 16 bytes at least.
"""

import re
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

if TYPE_CHECKING:  # the daemon reads this file for the schema and has no memory to spare for numpy
    import numpy as np


Arrays = dict[str, "np.ndarray"]
"""Named arrays of one rollout batch or buffer."""

Phase = Literal["generate", "score", "advantage", "update", "evaluate", "step_end"]

# Name of the file of one rank, inside a checkpoint directory. Full match only.
RUNTIME_STATE_FILE = re.compile(r"runtime_state\.rank_(\d{4,9})\.msgpack\.zst", re.ASCII)

NAME = re.compile(r"[A-Za-z0-9_.\-]{0,79}[A-Za-z0-9_\-]")
"""Names of arrays; full match."""

# Fixed-width little-endian types only: no objects, no strings, no records.
DTYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64"),
)

# Arrays of one file. 500 samples x 8000 tokens x 25 bytes: 100 MB.
MAX_CONTENT_BYTES = (2 << 30) - 1
# Fits the second-level cache.
MAX_FRAME_BYTES = 1 << 20
FREE_BYTES = 32 << 20
MAX_EXPANSION = 1024
# A frame has 15 bytes at least, and its length in the head one.
SPARSE_FRAME_BYTES = 16 * MAX_EXPANSION
# Bytes of one micro-batch; the frame's length field is 32 bit.
MAX_RECORD_BYTES = 256 << 20
MAX_HEAD_BYTES = 4 << 20
MAX_ARRAYS = 4096
MAX_DIMENSIONS = 8
# Rows of metric history that travel with a rank; TensorBoard has the rest.
HISTORY_ROWS = 256

_NonNegative = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_CONTENT_BYTES)]
_Row = Annotated[dict[Annotated[str, msgspec.Meta(max_length=128)], float], msgspec.Meta(min_length=1)]


class ArraySpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Describes one array of a record."""

    name: str
    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=MAX_DIMENSIONS)]


Specs = Annotated[list[ArraySpec], msgspec.Meta(max_length=MAX_ARRAYS)]
Frames = Annotated[
    list[Annotated[int, msgspec.Meta(ge=1, le=2 * MAX_FRAME_BYTES)]], msgspec.Meta(max_length=1 << 18)
]
"""Bytes of each frame of content."""


class StateHead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, eq=False):
    """Head of a runtime state: all but its arrays."""

    rank: _NonNegative
    world_size: _NonNegative
    step: _NonNegative
    """Whole steps done."""
    phase: Phase
    index: _NonNegative
    """Position inside the phase: the next micro-batch (generate), the next mini-batch (update)."""
    safe_point: _NonNegative
    """Safe points passed since the end of the last whole step; 0 at a step's end."""
    rollout_offset: _NonNegative
    """Responses requested in total, over all ranks; exact. Each prompt gets rollout.samples_per_prompt of them."""
    episode_id: _NonNegative
    """Finished episodes in total, over all ranks."""
    kl_coef: float
    kl_window: Annotated[list[float], msgspec.Meta(max_length=65536)] = []
    rng: dict[str, bytes] = {}
    """State of each generator by name: python, numpy, torch, cuda."""
    history: Annotated[list[_Row], msgspec.Meta(max_length=HISTORY_ROWS)] = []
    """The newest rows of metrics; `encode` keeps the last HISTORY_ROWS."""

    def __post_init__(self) -> None:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}")


class RuntimeState(StateHead, frozen=True, kw_only=True, forbid_unknown_fields=True, eq=False):
    """Holds all that one rank needs to resume inside a step, besides weights and optimizers."""

    rollouts: Arrays = {}
    """The rollout queue of the running step on this rank."""
    rewards: Arrays = {}
    """The reward buffers of the running step, as far as they exist: scores, values, advantages, returns."""
    loop: Arrays = {}
    """`tree`: what a loop that is not ours keeps besides tensors."""


def runtime_state_name(rank: int) -> str:
    """Returns the file name of one rank's runtime state inside a checkpoint."""
    return f"runtime_state.rank_{rank:04d}.msgpack.zst"
