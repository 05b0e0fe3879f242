"""Turns RuntimeState into bytes and back; never pickle. `format.py` specifies the format."""

from typing import Any

import msgspec

from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.runtime_state.format import HISTORY_ROWS, RuntimeState, StateHead
from verl_slurm.runtime_state.record import Read, digests, pack, unpack, unpack_head

GROUPS = ("rollouts", "rewards", "loop")


def encode(state: RuntimeState) -> bytes:
    """Returns the bytes of a runtime-state file. Runs on every rank.

    Raises:
        ValueError: an array name or dtype that the format does not know, or more than its limits allow.
    """
    fields = _of_head(state) | {
        # float(): numpy scalars and integers take the one canonical encoding
        "kl_coef": float(state.kl_coef),
        "kl_window": [float(x) for x in state.kl_window],
        # The newest rows, as many as a reader accepts; empty ones have no place in the format.
        "history": [
            {str(k): float(v) for k, v in row.items()} for row in state.history[-HISTORY_ROWS:] if row
        ],
    }
    arrays = {f"{group}.{name}": array for group in GROUPS for name, array in getattr(state, group).items()}
    return pack(StateHead(**fields), arrays)


def decode(data: bytes, *, where: object = "runtime state") -> RuntimeState:
    """Returns the state in `data`. Arrays are fresh and writable.

    Raises:
        CheckpointCorrupt: it is not whole, not canonical, too large, or of another version.
    """
    head, arrays = unpack(data, StateHead, where=where)
    return RuntimeState(**_of_head(head) | _by_group(arrays, where))


def peek(data: bytes, *, where: object) -> tuple[StateHead, dict[str, dict[str, list[int]]]]:
    """Reads the head of a runtime-state file: what it says, and the shapes of its arrays by group and name.

    Args:
        data: the first HEAD_BYTES of the file.

    Raises:
        CheckpointCorrupt: it is not canonical, or of another version.
    """
    head, specs = unpack_head(data, StateHead, where=where)
    return head, _by_group({spec.name: spec.shape for spec in specs}, where)


def facts(read: Read, num_bytes: int, *, where: object) -> dict[str, object]:
    """Lists everything in a runtime-state file for a comparison: name → value; for an array its dtype, shape and
    SHA-256. Needs some MB, however large its arrays are. Raises CheckpointCorrupt as `decode`.
    """
    head, arrays = digests(read, num_bytes, StateHead, where=where)
    # As bytes: then NaN equals itself, and 0.0 differs from -0.0.
    found: dict[str, object] = {
        name: msgspec.msgpack.encode(value) for name, value in _of_head(head).items() if name != "rng"
    }
    for group, of_group in (_by_group(arrays, where) | {"rng": head.rng}).items():
        found |= {f"{group}/{name}": fact for name, fact in of_group.items()}
    return found


def _of_head(state: StateHead) -> dict[str, Any]:
    return {name: getattr(state, name) for name in StateHead.__struct_fields__}


def _by_group(arrays: dict[str, Any], where: object) -> dict[str, dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for full_name, array in arrays.items():
        group, _, name = full_name.partition(".")
        if group not in groups or not name:
            raise CheckpointCorrupt(
                "a runtime state has an array of no known group",
                where=where,
                found=full_name,
                expected=f"one of {', '.join(GROUPS)}",
                remedy="resume from an older checkpoint (verl-slurm list RUN)",
            )
        groups[group][name] = array
    return groups
