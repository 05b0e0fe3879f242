"""How two checkpoints differ in everything but values: one row a difference, with both sides.

Looked at are position, state layout, configuration, topology, data, frozen models, and names, types and shapes
of the tensors, or of a guest's files; each file read is held to its digest first. What is in tensors, runtime states
and a guest's files is `compare`'s.
Times, epochs and parents are not compared: they are different in any two saves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from verl_slurm.base.keys import Keyring
from verl_slurm.checkpoint.format.schema import SchemaVersion, parse_schema
from verl_slurm.checkpoint.format.specification import SCHEMA_VERSION, FileEntry, Manifest
from verl_slurm.checkpoint.format.tensor_index import TensorIndex
from verl_slurm.checkpoint.inspect.contents import (
    flat,
    known_manifest,
    read_config,
    read_file,
    read_indexes,
    read_json,
)

__all__ = ["SUBJECTS", "Difference", "difference"]

SUBJECTS = ("position", "schema", "config", "topology", "data", "frozen", "tensors")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing that is not the same; None: that side does not have it.

    Attributes:
        subject: one of SUBJECTS.
        key: what of it, dotted.
    """

    subject: str
    key: str
    a: object
    b: object


def difference(
    a: Path, b: Path, keys_a: Keyring | None = None, keys_b: Keyring | None = None
) -> list[Difference]:
    """Every difference of two checkpoint directories, by subject and key; empty: there is none.

    Args:
        keys_a, keys_b: of their runs, where they have some.

    Raises:
        NotFound: one of them is no whole checkpoint.
        CheckpointCorrupt: a file that was looked at is not what was committed.
        ConfigError: a config.yaml is none.
        KeyRefused: one needs a key that is not there.
    """
    left, right = _facts(a, keys_a), _facts(b, keys_b)
    return [
        Difference(subject=subject, key=key, a=left[subject].get(key), b=right[subject].get(key))
        for subject in SUBJECTS
        for key in sorted(left[subject].keys() | right[subject].keys())
        if left[subject].get(key) != right[subject].get(key)
    ]


def _facts(directory: Path, keys: Keyring | None) -> dict[str, dict[str, object]]:
    """Subject → key → value."""
    manifest = known_manifest(directory, keys)
    schema = parse_schema(read_file(directory, manifest, SCHEMA_VERSION), where=directory / SCHEMA_VERSION)
    layout = read_json(directory, manifest, "orchestration.json", keys)
    metadata = read_json(directory, manifest, "metadata.json", keys)
    return {
        "position": _position(manifest, metadata),
        "schema": _schema(schema),
        "config": read_config(directory, manifest, keys),
        "topology": {"world_size": manifest.world_size}
        | flat(msgspec.to_builtins(manifest.topology))
        | {key: layout.get(key) for key in ("nodes", "backend")},
        "data": {"fingerprint": manifest.dataset_fingerprint, "root": layout.get("data_root")}
        | _files(layout.get("data_files")),
        "frozen": dict(manifest.frozen),
        "tensors": _tensors(read_indexes(directory, manifest, keys)) | _own_files(manifest),
    }


def _position(manifest: Manifest, metadata: dict[str, object]) -> dict[str, object]:
    named = {"step": manifest.step, "safe_point": manifest.safe_point, "phase": manifest.phase}
    return named | {key: metadata.get(key) for key in ("index", "rollout_offset")}


def _tensors(indexes: Mapping[str, TensorIndex | FileEntry]) -> dict[str, object]:
    """Type and shape of each; of an index too large to be listed, its digest."""
    found: dict[str, object] = {}
    for domain, index in indexes.items():
        if isinstance(index, FileEntry):
            found[f"{index.path} of {index.size} bytes"] = index.sha256
            continue
        for name, entry in index.tensors.items():
            found[f"{domain}/{name}"] = f"{entry.dtype} {list(entry.shape)}"
    return found


def _own_files(manifest: Manifest) -> dict[str, object]:
    """Of a guest's checkpoint, which files there are: what is in them is that loop's own."""
    if manifest.guest is msgspec.UNSET:
        return {}
    return {entry.path: f"{entry.size} bytes" for entry in manifest.files if "/" in entry.path}


def _schema(schema: SchemaVersion) -> dict[str, object]:
    fields = {f"{name}.{field}": kind for name, f in schema.classes.items() for field, kind in f.items()}
    return {"id": schema.schema_id, **fields}


def _files(files: object) -> dict[str, object]:
    return {f"file {name}": digest for name, digest in files.items()} if isinstance(files, dict) else {}
