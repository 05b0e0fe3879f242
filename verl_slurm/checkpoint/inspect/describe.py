"""Describes a checkpoint from its manifest, its small files and the indexes of its tensors.

No tensor is read. Each file that is read is checked against its digest first (`contents`), so the output shows what was
committed. `verify` tells whether the rest still is.
"""

import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.base.keys import Keyring
from verl_slurm.checkpoint.format.specification import SCHEMA_VERSION, FileEntry, Manifest
from verl_slurm.checkpoint.format.state_schema import current_schema, parse_schema
from verl_slurm.checkpoint.format.tensor_index import TensorIndex
from verl_slurm.checkpoint.inspect.contents import Look
from verl_slurm.runtime_state.format import RUNTIME_STATE_FILE

# Steps of history that are shown.
_TAIL = 32


def describe(directory: Path, keys: Keyring | None = None) -> dict[str, Any]:
    """Returns all that `verl-slurm inspect` shows, as plain values for JSON.

    Raises:
        NotFound: there is no whole checkpoint.
        CheckpointCorrupt: a file that was read is not what was committed.
        ConfigError: its config.yaml is invalid.
        PermissionRefused: we may not read it.
        KeyRefused: it needs a key that is missing.
    """
    look = Look(directory, keys)
    manifest, metadata, orchestration = (
        look.manifest,
        look.json("metadata.json"),
        look.json("orchestration.json"),
    )
    schema = parse_schema(look.read(SCHEMA_VERSION), where=directory / SCHEMA_VERSION)
    config, indexes, states = look.config(), look.indexes(), _runtime_states(look)
    whole = [state for state in states if "problem" not in state]
    history = metadata.get("history")
    return {
        "name": manifest.name,
        "path": str(directory),
        "step": manifest.step,
        "safe_point": manifest.safe_point,
        "phase": manifest.phase,
        "index": metadata.get("index"),
        "created_utc": manifest.created_utc,
        "save_seconds": manifest.save_seconds,
        "attempt": manifest.attempt,
        "parent": manifest.parent,
        # By dotted keys, without the schema: a configuration of another version is shown as far as it has them.
        "run": config.get("name"),
        "model": config.get("model.path"),
        "guest": None if isinstance(manifest.guest, msgspec.UnsetType) else manifest.guest,
        "world_size": manifest.world_size,
        "topology": msgspec.to_builtins(manifest.topology),
        "schema_id": manifest.schema_id,
        # Told, not required: a checkpoint of another version can be looked at.
        "schema_is_ours": manifest.schema_id == current_schema().schema_id,
        "code_version": schema.code_version,
        "dataset_fingerprint": manifest.dataset_fingerprint,
        "data_root": orchestration.get("data_root"),
        "num_data_files": _length(orchestration.get("data_files")),
        "frozen": dict(manifest.frozen),
        "algorithm": config.get("train.algorithm"),
        "rollout_offset": metadata.get("rollout_offset"),
        "samples_per_prompt": config.get("rollout.samples_per_prompt", 1),
        "num_files": len(manifest.files),
        "num_bytes": manifest.num_bytes,
        "parts": _parts(manifest),
        "domains": [_domain(name, index) for name, index in indexes.items()],
        "tensors": [row for name, index in indexes.items() for row in _tensors(name, index)],
        "schedulers": look.json("scheduler.json"),
        "reward": metadata.get("reward"),
        # The states first: metadata.json is for people, and a guest's has no such number.
        "kl_coef": whole[0]["kl_coef"] if whole else metadata.get("kl_coef"),
        "kl_window": whole[0]["kl_window"] if whole else [],
        "ranks": states,
        "history": _curves(history if isinstance(history, list) else []),
    }


def _finite(value: object) -> float | None:
    # JSON has whole numbers of any size, which no double holds.
    if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def _length(value: object) -> int | None:
    return len(value) if isinstance(value, dict | list) else None


def _parts(manifest: Manifest) -> list[dict[str, Any]]:
    """Counts files and bytes of each domain, of the runtime states, and of the rest."""
    parts: dict[str, list[int]] = {}
    for entry in manifest.files:
        top, _, below = entry.path.partition("/")
        name = top if below else ("runtime_state" if RUNTIME_STATE_FILE.fullmatch(top) else "small files")
        part = parts.setdefault(name, [0, 0])
        part[0], part[1] = part[0] + 1, part[1] + entry.size
    return [{"part": name, "files": files, "bytes": size} for name, (files, size) in sorted(parts.items())]


def _domain(name: str, index: TensorIndex | FileEntry) -> dict[str, Any]:
    """Returns number, elements and bytes of a domain's tensors; of an index too large to list, its size."""
    if isinstance(index, FileEntry):
        return {
            "domain": name,
            "tensors": None,
            "elements": None,
            "bytes": None,
            "types": [],
            "index_bytes": index.size,
        }
    types: dict[str, list[int]] = {}
    for entry in index.tensors.values():
        row = types.setdefault(entry.dtype, [0, 0, 0])
        for at, value in enumerate((1, math.prod(entry.shape), entry.num_bytes)):
            row[at] += value
    number, elements, size = (
        (sum(column) for column in zip(*types.values(), strict=True)) if types else (0, 0, 0)
    )
    by_type = [
        {"dtype": dtype, "tensors": row[0], "elements": row[1], "bytes": row[2]}
        for dtype, row in sorted(types.items())
    ]
    return {"domain": name, "tensors": number, "elements": elements, "bytes": size, "types": by_type}


def _tensors(domain: str, index: TensorIndex | FileEntry) -> Iterable[dict[str, Any]]:
    """Yields one row per tensor, by name; `pieces`: number of boxes that the ranks cut it into."""
    for name, entry in sorted(index.tensors.items()) if isinstance(index, TensorIndex) else ():
        yield {
            "domain": domain,
            "name": name,
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "bytes": entry.num_bytes,
            "pieces": entry.num_pieces,
        }


def _runtime_states(look: Look) -> list[dict[str, Any]]:
    """Returns position, queue and buffers of each rank; for a state of another version, why it cannot be read."""
    # They import numpy: only where a state is opened.
    from verl_slurm.runtime_state.codec import peek
    from verl_slurm.runtime_state.record import HEAD_BYTES

    found: list[dict[str, Any]] = []
    first: list[float] = []
    for entry in look.manifest.files:
        match = RUNTIME_STATE_FILE.fullmatch(entry.path)
        if match is None:
            continue
        # The head alone: 2 MB of arrays may become 2 GB.
        data = look.read(entry.path, head=HEAD_BYTES)
        try:
            state, shapes = peek(data, where=look.directory / entry.path)
        except CheckpointCorrupt as error:
            # Its bytes are what was committed: another version wrote them.
            found.append({"rank": int(match[1]), "bytes": entry.size, "problem": error.one_line()})
            continue
        # All ranks of a run have the same window; if they disagree, the newest values count.
        first = first or state.kl_window
        window = first if state.kl_window == first else state.kl_window[-_TAIL:]
        found.append(
            {
                "rank": state.rank,
                "bytes": entry.size,
                "phase": state.phase,
                "index": state.index,
                "episode_id": state.episode_id,
                "kl_coef": state.kl_coef,
                "kl_window": window,
                "rollouts": max((shape[0] for shape in shapes["rollouts"].values() if shape), default=0),
                "rollout_arrays": shapes["rollouts"],
                # Names with a dot are scores kept for a change of the reward (trainer.state.reward_state).
                "reward_buffers": {
                    name: shape
                    for name, shape in shapes["rewards"].items()
                    if "." not in name and name != "switch"
                },
                "generators": sorted(state.rng),
            }
        )
    return found


def _curves(history: list[Any]) -> list[dict[str, Any]]:
    """Returns the tail of each metric, with the columns in the order of the newest row."""
    # metadata.json is read without a type: another version may hold anything there.
    rows = [row for row in history if isinstance(row, dict)]
    curves = []
    for name in rows[-1] if rows else ():
        # A metric may be missing in some rows: evaluations are rare.
        values = [value for row in rows if (value := _finite(row.get(name))) is not None][-_TAIL:]
        if values and name != "step":
            curves.append({"metric": str(name), "last": values[-1], "values": values})
    return curves
