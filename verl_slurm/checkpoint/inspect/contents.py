"""Reads the small files of a checkpoint, each checked against its manifest first; reads no tensors."""

import errno
from pathlib import Path
from typing import Any

import msgspec

from verl_slurm.base import bounded
from verl_slurm.base.errors import CheckpointCorrupt, NotFound, PermissionRefused
from verl_slurm.base.keys import Keyring
from verl_slurm.checkpoint.format.encryption import CheckpointCipher
from verl_slurm.checkpoint.format.specification import (
    GUEST_FILES,
    MANIFEST,
    FileEntry,
    Manifest,
)
from verl_slurm.checkpoint.format.tensor_index import INDEX, TensorIndex, parse_index
from verl_slurm.checkpoint.store.reader import read_range, read_small
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.config import strict_yaml

_JSON = {
    "metadata.json": bounded.RECORD,
    "orchestration.json": bounded.DATA_FILES,
    "scheduler.json": bounded.SMALL,
}


def known_manifest(directory: Path, keys: Keyring | None = None) -> Manifest:
    """Returns the verified manifest of a checkpoint, or one line that tells why it is not verified.

    Args:
        keys: where given, it must be signed with one of them.

    Raises:
        NotFound: there is no checkpoint.
        CheckpointCorrupt, SchemaMismatch: see `verify.read_manifest`.
        PermissionRefused: it may not be read.
        KeyRefused: it is not signed with one of our keys.
    """
    try:
        # Not `verify`: for a look reading every byte would take minutes and prove more than was asked. Each file that
        # is shown is checked by itself.
        return read_manifest(directory, keys=keys)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            raise _closed(directory) from error
        raise NotFound(
            "no whole checkpoint there",
            where=directory,
            found=f"{MANIFEST}: {error.strerror}",
            remedy="`verl-slurm list RUN` lists those of a run",
        ) from error


def read_file(
    directory: Path, manifest: Manifest, path: str, keys: Keyring | None = None, *, head: int | None = None
) -> bytes:
    """Returns one file's content as committed, decrypted.

    Args:
        path: as the manifest names it.
        keys: to decrypt with.
        head: read this many bytes from its start.

    Raises:
        CheckpointCorrupt: the manifest does not name it, or it is missing, of another size or digest, or larger than a
            file of its kind may be.
        PermissionRefused: it may not be read.
        KeyRefused: it is encrypted, and there is no key or another one.
    """
    where = directory / path
    entry = entry_named(manifest, path)
    if entry is None:
        raise _bad(where, "not in the manifest", "a part of every checkpoint")
    # PLAIN_FILES of an encrypted checkpoint are readable without a key.
    sealed = not isinstance(entry.plain_size, msgspec.UnsetType)
    cipher = CheckpointCipher.of(manifest, keys, where=directory) if sealed else None
    try:
        if head is not None:
            return read_range(directory, entry, cipher, 0, head)
        return read_small(directory, entry, cipher)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            raise _closed(where) from error
        raise _bad(where, error.strerror or error, "the file that was committed") from error
    # `TooMuch` is one of these: larger than its kind may be.
    except ValueError as error:
        raise _bad(where, error, "the file that was committed") from error


def entry_named(manifest: Manifest, path: str) -> FileEntry | None:
    """Returns the manifest's entry of that path."""
    return next((entry for entry in manifest.files if entry.path == path), None)


def read_indexes(
    directory: Path, manifest: Manifest, keys: Keyring | None = None
) -> dict[str, TensorIndex | FileEntry]:
    """Maps each domain of the checkpoint to its tensors; errors as `read_file`.

    An index that is too large for a look (`bounded.SHOWN_INDEX`) is represented by its entry in the manifest.
    """
    found: dict[str, TensorIndex | FileEntry] = {}
    for domain in manifest.domains:
        path = f"{domain}/{INDEX}"
        entry = entry_named(manifest, path)
        if entry is None:
            continue
        # By the manifest's size, before a byte is read. A load reads larger ones.
        if entry.size > bounded.SHOWN_INDEX.num_bytes:
            found[domain] = entry
            continue
        data = read_file(directory, manifest, path, keys)
        found[domain] = parse_index(data, where=directory / path, limit=bounded.SHOWN_INDEX)
    return found


def read_json(directory: Path, manifest: Manifest, path: str, keys: Keyring | None = None) -> dict[str, Any]:
    """Returns one of the JSON files as a map. Errors as `read_file`, and CheckpointCorrupt if it is no JSON map. Empty
    if a guest's checkpoint has no such file."""
    if manifest.guest is not msgspec.UNSET and path not in GUEST_FILES:
        return {}
    data = read_file(directory, manifest, path, keys)
    try:
        return bounded.decode_json(data, dict[str, Any], _JSON[path])
    except (ValueError, RecursionError) as error:
        raise _bad(directory / path, error, "JSON") from error


def read_config(directory: Path, manifest: Manifest, keys: Keyring | None = None) -> dict[str, object]:
    """Returns config.yaml by dotted key, as written; keys of other versions are accepted.

    Raises:
        CheckpointCorrupt: see `read_file`.
        ConfigError: it is outside our subset of YAML.
    """
    raw = read_file(directory, manifest, "config.yaml", keys)
    # Parsed, not checked against the schema: one of another version may have other keys and is shown all the same.
    return flat(strict_yaml.parse(raw, str(directory / "config.yaml")).data)


def flat(value: object, prefix: str = "") -> dict[str, object]:
    """Flattens nested maps to dotted keys; an empty map stays, as the value of its key."""
    # An empty map has no keys below it, and would vanish.
    if not isinstance(value, dict) or not value:
        return {prefix: value} if prefix else {}
    merged: dict[str, object] = {}
    for key, inner in value.items():
        merged |= flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return merged


def _closed(where: object) -> PermissionRefused:
    return PermissionRefused("the checkpoint may not be read", where=where, remedy="ask its owner")


def _bad(where: object, found: object, expected: object) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        "the checkpoint is not what was committed",
        where=where,
        found=found,
        expected=expected,
        remedy="see all of it with `verl-slurm verify`",
    )
