"""Turns RuntimeState into bytes and back; never pickle. `format.py` specifies the format."""

import msgspec
import numpy as np

from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.runtime_state.container import (
    HEAD_BYTES as HEAD_BYTES,
    Blob,
    digests,
    pack,
    specify,
    unpack,
    unpack_header,
)
from verl_slurm.runtime_state.format import (
    GROUPS,
    HISTORY_ROWS,
    RUNTIME_STATE_VERSION,
    Arrays,
    RuntimeState,
    StateHeader,
)
from verl_slurm.runtime_state.frames import Read


def encode(state: RuntimeState) -> bytes:
    """Returns the bytes of a runtime-state file. Runs on every rank.

    Raises:
        ValueError: an array name or dtype that the format does not know, or more than its limits allow.
    """
    header = StateHeader(
        version=RUNTIME_STATE_VERSION,
        rank=state.rank,
        world_size=state.world_size,
        step=state.step,
        phase=state.phase,
        index=state.index,
        safe_point=state.safe_point,
        rollout_offset=state.rollout_offset,
        episode_id=state.episode_id,
        # float(): numpy scalars and integers take the one canonical encoding
        kl_coef=float(state.kl_coef),
        kl_window=[float(x) for x in state.kl_window],
        # The newest rows, as many as a reader accepts; empty ones have no place in the format.
        history=[{str(k): float(v) for k, v in row.items()} for row in state.history[-HISTORY_ROWS:] if row],
        arrays=[
            *specify("rollouts", state.rollouts),
            *specify("rewards", state.rewards),
            *specify("rng", state.rng),
        ],
        frames=[],
    )
    # In the order of `arrays`: `pack` matches them by place.
    blobs: list[Blob] = [*state.rollouts.values(), *state.rewards.values(), *state.rng.values()]
    return pack(header, blobs)


def decode(data: bytes, *, where: object = "runtime state") -> RuntimeState:
    """Returns the state in `data`. Arrays are fresh and writable.

    Args:
        where: named in an error.

    Raises:
        CheckpointCorrupt: it is not whole, not canonical, too large, or of another version.
    """
    header, groups = unpack(data, StateHeader, where=where)
    _check(header, where)
    arrays: dict[str, Arrays] = {
        # `_check` has refused bytes outside of `rng`, so nothing is left out.
        group: {name: blob for name, blob in groups.get(group, {}).items() if isinstance(blob, np.ndarray)}
        for group in ("rollouts", "rewards")
    }
    return RuntimeState(
        version=header.version,
        rank=header.rank,
        world_size=header.world_size,
        step=header.step,
        phase=header.phase,
        index=header.index,
        safe_point=header.safe_point,
        rollout_offset=header.rollout_offset,
        episode_id=header.episode_id,
        kl_coef=header.kl_coef,
        kl_window=header.kl_window,
        history=header.history,
        rollouts=arrays["rollouts"],
        rewards=arrays["rewards"],
        rng=groups.get("rng", {}),
    )


def peek(head: bytes, *, where: object) -> StateHeader:
    """Reads the header of a runtime-state file from its first HEAD_BYTES. Its arrays may take 2 GiB; none is read.

    Raises:
        CheckpointCorrupt: it is not canonical, or of another version.
    """
    header = unpack_header(head, StateHeader, where=where)
    _check(header, where)
    return header


def facts(read: Read, num_bytes: int, *, where: object) -> dict[str, object]:
    """Lists everything in a runtime-state file for a comparison: name → value; for an array its dtype, shape and
    SHA-256.

    Needs some MB, however large its arrays are.

    Raises:
        CheckpointCorrupt: as `decode`.
    """
    header, groups = digests(read, num_bytes, StateHeader, where=where)
    _check(header, where)
    # As bytes: then NaN equals itself, and 0.0 differs from -0.0.
    found: dict[str, object] = {
        name: msgspec.msgpack.encode(getattr(header, name))
        for name in StateHeader.__struct_fields__
        # Lengths of frames depend on the compressor, not on the state; arrays are compared by their digests.
        if name not in ("arrays", "frames")
    }
    return found | {f"{group}/{name}": fact for group in groups for name, fact in groups[group].items()}


def _check(header: StateHeader, where: object) -> None:
    if header.version != RUNTIME_STATE_VERSION:
        raise _refused(where, f"version {header.version}", f"version {RUNTIME_STATE_VERSION}")
    if header.rank >= header.world_size:
        raise _refused(where, f"rank {header.rank} of {header.world_size}", "a rank below the world size")
    for spec in header.arrays:
        if spec.group not in GROUPS:
            raise _refused(where, f"array group {spec.group!r}", f"one of {', '.join(GROUPS)}")
        # Generators have opaque states; rollouts and rewards are arrays that are computed with.
        if spec.group != "rng" and spec.dtype == "bytes":
            raise _refused(where, f"{spec.group}.{spec.name} of dtype bytes", "an array")


def _refused(where: object, found: str, expected: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        "runtime state is not of this format",
        where=where,
        found=found,
        expected=expected,
        remedy="resume from an older checkpoint (verl-slurm list RUN)",
    )
