"""What is in a checkpoint: from its manifest, its small files and the description of its tensors.

No tensor is read. Each file that is looked at is held to its digest first (`contents`), so what is shown is what
was committed; whether the rest of it still is, `verify` says.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from verl_slurm.checkpoint.contents import (
    check_descriptions,
    known_manifest,
    read_checked,
    read_config,
    read_json,
)
from verl_slurm.checkpoint.format import REQUIRED_DIRECTORIES, SCHEMA_VERSION, Manifest
from verl_slurm.checkpoint.schema import current_schema, parse_schema
from verl_slurm.errors import CheckpointCorrupt, VerlSlurmError
from verl_slurm.runtime_state.format import RUNTIME_STATE_FILE

__all__ = ["describe", "sparkline"]

_TAIL = 32
"""Steps of history that are shown."""

_BARS = "▁▂▃▄▅▆▇█"


def describe(directory: Path) -> dict[str, Any]:
    """Everything `verl-slurm inspect` shows, as plain values for JSON.

    Raises:
        NotFound: there is no whole checkpoint.
        CheckpointCorrupt: a file that was looked at is not what was committed.
        PermissionRefused: it is closed to us, or could have been written by others.

    Called by: cli.inspection.
    """
    manifest = known_manifest(directory)
    metadata = read_json(directory, manifest, "metadata.json")
    orchestration = read_json(directory, manifest, "orchestration.json")
    schema = parse_schema(read_checked(directory, manifest, SCHEMA_VERSION), where=directory / SCHEMA_VERSION)
    config = read_config(directory, manifest)
    states = _runtime_states(directory, manifest)
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
        "epoch": manifest.epoch,
        "parent": manifest.parent,
        "run": config.get("name"),
        "model": config.get("model.path"),
        "world_size": manifest.world_size,
        "topology": msgspec.to_builtins(manifest.topology),
        "schema_id": manifest.schema_id,
        "schema_is_ours": manifest.schema_id == current_schema().schema_id,
        "code_version": schema.code_version,
        "dataset_fingerprint": manifest.dataset_fingerprint,
        "data_root": orchestration.get("data_root"),
        "num_data_files": _length(orchestration.get("data_files")),
        "frozen": dict(manifest.frozen),
        "rollout_offset": metadata.get("rollout_offset"),
        "num_files": len(manifest.files),
        "num_bytes": manifest.num_bytes,
        "parts": _parts(manifest),
        "tensors": _tensors(directory, manifest),
        "schedulers": read_json(directory, manifest, "scheduler.json"),
        "kl_coef": whole[0]["kl_coef"] if whole else metadata.get("kl_coef"),
        "kl_window": whole[0]["kl_window"] if whole else [],
        "ranks": states,
        "history": _curves(history if isinstance(history, list) else []),
    }


def sparkline(values: Iterable[float], width: int = _TAIL) -> str:
    """The last `width` values as bars between their least and their greatest; one value stands low."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in shown)


def _length(value: object) -> int | None:
    return len(value) if isinstance(value, dict | list) else None


def _parts(manifest: Manifest) -> list[dict[str, Any]]:
    """Files and bytes of each domain, of the runtime states, and of the rest."""
    parts: dict[str, list[int]] = {}
    for entry in manifest.files:
        top, _, below = entry.path.partition("/")
        name = top if below else ("runtime_state" if RUNTIME_STATE_FILE.fullmatch(top) else "small files")
        part = parts.setdefault(name, [0, 0])
        part[0], part[1] = part[0] + 1, part[1] + entry.size
    return [{"part": name, "files": files, "bytes": size} for name, (files, size) in sorted(parts.items())]


def _tensors(directory: Path, manifest: Manifest) -> list[dict[str, Any]]:
    """Number, elements and bytes of the tensors by domain and type; asked of a child, for it needs torch."""
    domains = [name for name in REQUIRED_DIRECTORIES if any(_below(manifest, name))]
    for domain in domains:
        check_descriptions(directory, manifest, domain)
    command = [sys.executable, "-P", "-m", "verl_slurm.export.tensors", str(directory), *domains]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    try:
        counts = msgspec.json.decode(done.stdout, type=dict[str, dict[str, tuple[int, int, int]]])
    except msgspec.MsgspecError:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise VerlSlurmError(
            "the tensors could not be listed",
            where=directory,
            found=lines[-1] if lines else f"exit code {done.returncode}",
            remedy="report it with the output of `verl-slurm verify`",
        ) from None
    return [
        {"domain": domain, "dtype": dtype, "tensors": number, "elements": elements, "bytes": size}
        for domain, by_type in counts.items()
        for dtype, (number, elements, size) in sorted(by_type.items())
    ]


def _below(manifest: Manifest, domain: str) -> Iterable[str]:
    return (entry.path for entry in manifest.files if entry.path.startswith(f"{domain}/"))


def _runtime_states(directory: Path, manifest: Manifest) -> list[dict[str, Any]]:
    """Position, queue and buffers of each rank; of another version's state, why it cannot be read."""
    from verl_slurm.runtime_state.codec import decode  # numpy, only where a state is opened

    found = []
    for entry in manifest.files:
        match = RUNTIME_STATE_FILE.fullmatch(entry.path)
        if match is None:
            continue
        data = read_checked(directory, manifest, entry.path)
        try:
            state = decode(data, where=directory / entry.path)
        except CheckpointCorrupt as error:
            # Its bytes are what was committed: another version wrote them.
            found.append({"rank": int(match[1]), "bytes": entry.size, "problem": error.one_line()})
            continue
        found.append(
            {
                "rank": state.rank,
                "bytes": entry.size,
                "phase": state.phase,
                "index": state.index,
                "episode_id": state.episode_id,
                "kl_coef": state.kl_coef,
                "kl_window": list(state.kl_window),
                "rollouts": _rows(state.rollouts),
                "rollout_arrays": {name: list(array.shape) for name, array in state.rollouts.items()},
                "reward_buffers": {name: list(array.shape) for name, array in state.rewards.items()},
                "generators": sorted(state.rng),
            }
        )
    return found


def _rows(arrays: dict[str, Any]) -> int:
    return max((array.shape[0] for array in arrays.values() if array.ndim), default=0)


def _curves(history: list[Any]) -> list[dict[str, Any]]:
    """The tail of each metric, the columns in the order of the newest row."""
    rows = [row for row in history if isinstance(row, dict)]
    curves = []
    for name in rows[-1] if rows else ():
        values = [float(row[name]) for row in rows if isinstance(row.get(name), int | float)][-_TAIL:]
        if values and name != "step":
            curves.append({"metric": str(name), "last": values[-1], "values": values})
    return curves
