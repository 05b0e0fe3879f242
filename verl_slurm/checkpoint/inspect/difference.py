"""Lists how two checkpoints differ in everything but values: one row per difference, with both sides.

It covers position, state layout, configuration, topology, data, frozen models, and names, types and shapes of the
tensors, or of a guest's files. Each file is checked against its digest first. `compare.py` covers the content of
tensors, runtime states and a guest's files. Times, attempts and parents are left out: they differ in any two saves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from verl_slurm.base.keys import Keyring
from verl_slurm.checkpoint.format.specification import SCHEMA_VERSION, FileEntry, Manifest
from verl_slurm.checkpoint.format.state_schema import SchemaVersion, parse_schema
from verl_slurm.checkpoint.format.tensor_index import TensorIndex
from verl_slurm.checkpoint.inspect.contents import (
    flat,
    known_manifest,
    read_config,
    read_file,
    read_indexes,
    read_json,
)

SUBJECTS = ("position", "schema", "config", "topology", "data", "frozen", "tensors")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One difference; None: that side lacks it.

    Attributes:
        subject: one of SUBJECTS.
        key: the differing key, dotted.
    """

    subject: str
    key: str
    a: object
    b: object


def difference(
    a: Path, b: Path, keys_a: Keyring | None = None, keys_b: Keyring | None = None
) -> list[Difference]:
    """Lists every difference of two checkpoint directories, by subject and key; empty if there is none.

    Args:
        keys_a, keys_b: of their runs, if they have some.

    Raises:
        NotFound: one of them is no whole checkpoint.
        CheckpointCorrupt: a file that was read is not what was committed.
        ConfigError: a config.yaml is invalid.
        KeyRefused: one needs a key that is missing.
    """
    left, right = _facts(a, keys_a), _facts(b, keys_b)
    return [
        Difference(subject=subject, key=key, a=left[subject].get(key), b=right[subject].get(key))
        for subject in SUBJECTS
        # From both sides: a key that one of them lacks is a difference, too.
        for key in sorted(left[subject].keys() | right[subject].keys())
        if left[subject].get(key) != right[subject].get(key)
    ]


def _facts(directory: Path, keys: Keyring | None) -> dict[str, dict[str, object]]:
    """Returns subject → key → value."""
    manifest = known_manifest(directory, keys)
    # By class and field, not by id alone: the id tells that layouts differ, and not where.
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
    """Returns type and shape of each tensor; for an index too large to list, its digest."""
    found: dict[str, object] = {}
    for domain, index in indexes.items():
        # Too large to list (`bounded.SHOWN_INDEX`).
        if isinstance(index, FileEntry):
            # The digest still tells whether anything differs.
            found[f"{index.path} of {index.size} bytes"] = index.sha256
            continue
        for name, entry in index.tensors.items():
            found[f"{domain}/{name}"] = f"{entry.dtype} {list(entry.shape)}"
    return found


def _own_files(manifest: Manifest) -> dict[str, object]:
    """Names the files of a guest's checkpoint; their content belongs to that loop."""
    if manifest.guest is msgspec.UNSET:
        return {}
    # Sizes, not digests: content is `inspect.compare`'s, and some of these files differ in any two saves.
    return {entry.path: f"{entry.size} bytes" for entry in manifest.files if "/" in entry.path}


def _schema(schema: SchemaVersion) -> dict[str, object]:
    fields = {f"{name}.{field}": kind for name, f in schema.classes.items() for field, kind in f.items()}
    return {"id": schema.schema_id, **fields}


def _files(files: object) -> dict[str, object]:
    return {f"file {name}": digest for name, digest in files.items()} if isinstance(files, dict) else {}
