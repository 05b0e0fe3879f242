"""Runtime state and rollout journal on disk: the specification.

Runtime state is what a rank needs to go on inside a step: where it is, the rollouts it has, the reward
buffers, the KL window, the generators. The journal (ledger) holds every finished rollout at once.

## 1. Container (both files use it)

One zstd frame (with its content size in the frame header, and zstd's checksum) around a stream of msgpack
`bin` objects and nothing else:

```
bin   header     msgpack map of a closed, typed struct; at most MAX_HEADER_BYTES
bin   array 0    the bytes of the first array that the header's `arrays` names
bin   array 1    ...
```

An array's bytes are little-endian, C order, and *byte-shuffled* when an item is wider than one byte: first
byte 0 of all items, then byte 1 of all items ... (token ids are mostly zero bytes; zstd then finds them).
`ArraySpec` gives group, name, dtype and shape; the number of bytes follows from them and must match.
dtype `bytes` is an opaque string of `shape[0]` bytes.

Why so: everything that can be large is a flat `bin` whose size the header declares, so hostile input cannot
make many small objects out of few bytes; and the header is decoded straight into a struct.

The header is *canonical*: encoding what was decoded must give the same bytes. Duplicate keys, extension
types, integers in the place of floats, unknown fields, overlong encodings and trailing bytes are refused by
that one rule.

## 2. runtime_state.rank_0003.msgpack.zst

The container with `StateHeader` as its header. Groups: `rollouts`, `rewards`, `rng`.
`codec.decode` turns it into `RuntimeState`.

## 3. epoch_000003.rank_0000.ledger

```
"VSLEDGR1"  epoch u32  rank u32                                        16 bytes, once
"VSLR"  length u32  step u64  micro_batch u32  payload_crc u32  header_crc u32     28 bytes, then the payload
...
```

With a key configured the magic is "VSLE" and the payload encrypted (`sealing.py`).

All little-endian. `length` counts the payload, a container with `RecordHeader`; `payload_crc` is its CRC-32
and `header_crc` the CRC-32 of the 24 bytes before it. A record is durable (fdatasync) before `append`
returns. `micro_batch` is the global index in its step, over all ranks.

A region that does not parse is a *torn tail* when no whole record follows it (the writer died there; cut
silently), and *damage* when one does (reported). Where two epochs hold the same (step, micro_batch), the
newest epoch's counts: it is the one whose updates used its own record.

## 4. Limits

`MAX_*` below. They bound what a reader allocates before anything is believed.
"""

import re
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

if TYPE_CHECKING:  # the daemon reads this file for the schema and has no memory to spare for numpy
    import numpy as np

__all__ = [
    "DTYPES",
    "GROUPS",
    "HISTORY_ROWS",
    "MAX_ARRAYS",
    "MAX_CONTENT_BYTES",
    "MAX_HEADER_BYTES",
    "MAX_RECORD_BYTES",
    "NAME",
    "RUNTIME_STATE_FILE",
    "RUNTIME_STATE_VERSION",
    "ArraySpec",
    "Arrays",
    "Phase",
    "RecordHeader",
    "RuntimeState",
    "StateHeader",
    "runtime_state_name",
]

Arrays = dict[str, "np.ndarray"]
"""Named arrays of one rollout batch or buffer."""

Phase = Literal["generate", "score", "advantage", "update", "step_end"]

RUNTIME_STATE_VERSION = 1

# The file of one rank, inside a checkpoint directory. Full match only.
RUNTIME_STATE_FILE = re.compile(r"runtime_state\.rank_(\d{4,})\.msgpack\.zst")

NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
"""Names of arrays, generators and metric rows' arrays; full match."""

GROUPS = ("rollouts", "rewards", "rng")

# Fixed-width little-endian types only: no objects, no strings, no records.
DTYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "bytes"),
)

# Decompressed size of one file, what a msgpack buffer can hold. 500 samples x 8000 tokens x 25 bytes: 100 MB.
MAX_CONTENT_BYTES = (2 << 30) - 1
# One micro-batch; the frame's length field is 32 bit.
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
    """One array of a container: where it belongs and how its bytes are read."""

    group: _ArrayName
    name: _ArrayName
    dtype: _ArrayName
    shape: Annotated[list[_Size], msgspec.Meta(max_length=MAX_DIMENSIONS)]


_Specs = Annotated[list[ArraySpec], msgspec.Meta(max_length=MAX_ARRAYS)]


class StateHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The header of a runtime-state file: `RuntimeState` without its arrays."""

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


class RecordHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The header of one journal record."""

    step: _NonNegative
    micro_batch: _NonNegative
    arrays: _Specs


class RuntimeState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, eq=False):
    """All that one rank needs to go on inside a step, besides weights and optimizers.

    Called by: trainer.state (fills and uses it), dcp (saves and loads it through `codec`).
    """

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
    """Prompts consumed in all, over all ranks; exact."""
    episode_id: int
    """Finished episodes in all, over all ranks."""
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
    """The file name of one rank's runtime state inside a checkpoint."""
    return f"runtime_state.rank_{rank:04d}.msgpack.zst"
