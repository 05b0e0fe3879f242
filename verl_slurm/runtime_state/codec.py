"""RuntimeState to bytes and back; never pickle. The format is specified in `format.py`."""

import numpy as np

from verl_slurm.errors import CheckpointCorrupt
from verl_slurm.runtime_state.container import Blob, Upgrade, pack, specify, unpack
from verl_slurm.runtime_state.format import (
    GROUPS,
    HISTORY_ROWS,
    RUNTIME_STATE_VERSION,
    Arrays,
    RuntimeState,
    StateHeader,
)

__all__ = ["decode", "encode"]


def encode(state: RuntimeState) -> bytes:
    """The bytes of a runtime-state file.

    Raises:
        ValueError: an array name or dtype the format does not know, or more than its limits allow.

    Called by: dcp.saver, on every rank.
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
        # float(): numpy scalars and integers become the one canonical encoding
        kl_coef=float(state.kl_coef),
        kl_window=[float(x) for x in state.kl_window],
        history=[{str(k): float(v) for k, v in row.items()} for row in state.history[-HISTORY_ROWS:] if row],
        arrays=[
            *specify("rollouts", state.rollouts),
            *specify("rewards", state.rewards),
            *specify("rng", state.rng),
        ],
        frames=[],
    )
    blobs: list[Blob] = [*state.rollouts.values(), *state.rewards.values(), *state.rng.values()]
    return pack(header, blobs)


def decode(data: bytes, *, where: object = "runtime state", upgrade: Upgrade | None = None) -> RuntimeState:
    """The state that `data` holds. Arrays are fresh and writable.

    Args:
        where: named in an error.
        upgrade: for a state of an older schema: `checkpoint.schema.upgrade_for`.

    Raises:
        CheckpointCorrupt: it is not whole, not canonical, too large, or of another version.

    Called by: dcp.loader, with a file of a verified checkpoint.
    """
    header, groups = unpack(data, StateHeader, where=where, upgrade=upgrade)
    arrays: dict[str, Arrays] = {"rollouts": {}, "rewards": {}}
    for group, blobs in groups.items():
        if group not in GROUPS:
            raise _refused(where, f"array group {group!r}", f"one of {', '.join(GROUPS)}")
        if group == "rng":
            continue
        for name, blob in blobs.items():
            if not isinstance(blob, np.ndarray):
                raise _refused(where, f"{group}.{name} of dtype bytes", "an array")
            arrays[group][name] = blob
    if header.version != RUNTIME_STATE_VERSION:
        raise _refused(where, f"version {header.version}", f"version {RUNTIME_STATE_VERSION}")
    if header.rank >= header.world_size:
        raise _refused(where, f"rank {header.rank} of {header.world_size}", "a rank below the world size")
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


def _refused(where: object, found: str, expected: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        "runtime state is not of this format",
        where=where,
        found=found,
        expected=expected,
        remedy="resume from an older checkpoint (verl-slurm checkpoints)",
    )
