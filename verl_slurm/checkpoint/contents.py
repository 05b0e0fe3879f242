"""The small files of a checkpoint, each held to its manifest before it is believed; the tensors are not read.

For a look (`inspect`, `diff`) a re-read of every byte would take minutes and prove what nobody asked. So what is
looked at is checked, and nothing else: `verify` and `compare` read all.
"""

import errno
import os
import stat
from pathlib import Path
from typing import Any

import msgspec

from verl_slurm.checkpoint.chunks import entry_of
from verl_slurm.checkpoint.encryption import CheckpointCipher
from verl_slurm.checkpoint.format import GUEST_FILES, MANIFEST, REQUIRED_DIRECTORIES, Manifest
from verl_slurm.checkpoint.manifest import strict_json
from verl_slurm.checkpoint.tensor_index import INDEX, TensorIndex, parse_index
from verl_slurm.checkpoint.tree import open_below, open_directory
from verl_slurm.checkpoint.verify import read_manifest
from verl_slurm.config import strict_yaml
from verl_slurm.errors import CheckpointCorrupt, NotFound, PermissionRefused
from verl_slurm.keys import Keyring

__all__ = ["flat", "known_manifest", "read_config", "read_file", "read_indexes", "read_json"]


def known_manifest(directory: Path, keys: Keyring | None = None) -> Manifest:
    """The manifest of a checkpoint, itself verified, or one line that says why not.

    Args:
        keys: where given, it must be signed with one of them.

    Raises:
        NotFound: there is no checkpoint.
        CheckpointCorrupt, SchemaMismatch: see `verify.read_manifest`.
        PermissionRefused: it may not be read.
        KeyRefused: it is not signed with one of our keys.

    Called by: describe, difference, cli.export, export.
    """
    try:
        return read_manifest(directory, keys=keys)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            raise _closed(directory) from error
        raise NotFound(
            "no whole checkpoint there",
            where=directory,
            found=f"{MANIFEST}: {error.strerror}",
            remedy="`verl-slurm checkpoints RUN` lists those of a run",
        ) from error


def read_file(directory: Path, manifest: Manifest, path: str, keys: Keyring | None = None) -> bytes:
    """One file's content, which is what was committed, as it was before encryption.

    Args:
        path: as the manifest names it.
        keys: to decrypt with.

    Raises:
        CheckpointCorrupt: the manifest does not name it, it is not there, or of another size or digest.
        PermissionRefused: it may not be read.
        KeyRefused: it is encrypted, and there is no key or another one.

    Called by: describe, difference, and the functions below.
    """
    where = directory / path
    entry = next((entry for entry in manifest.files if entry.path == path), None)
    if entry is None:
        raise _bad(where, "not in the manifest", "a part of every checkpoint")
    try:
        with open_directory(directory) as root, open_below(root, path) as fd:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_size != entry.size:
                raise _bad(where, f"mode {info.st_mode:o}, {info.st_size} bytes", f"{entry.size} bytes")
            with os.fdopen(os.dup(fd), "rb") as file:
                data = file.read(entry.size)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            raise _closed(where) from error
        raise _bad(where, error.strerror or error, "the file that was committed") from error
    if msgspec.structs.replace(entry_of(path, data), plain_size=entry.plain_size) != entry:
        raise _bad(where, "another SHA-256", "the file that was committed")
    if isinstance(entry.plain_size, msgspec.UnsetType):
        return data
    cipher = CheckpointCipher.of(manifest, keys, where=directory)
    return data if cipher is None else cipher.open(entry, data)


def read_indexes(directory: Path, manifest: Manifest, keys: Keyring | None = None) -> dict[str, TensorIndex]:
    """Domain → the tensors it holds, of those domains that the checkpoint has; as `read_file`.

    Called by: describe, difference, cli.export.
    """
    if manifest.guest is not msgspec.UNSET:
        return {}  # whatever its directories are called
    named = {entry.path for entry in manifest.files}
    paths = {domain: f"{domain}/{INDEX}" for domain in REQUIRED_DIRECTORIES}
    return {
        domain: parse_index(read_file(directory, manifest, path, keys), where=directory / path)
        for domain, path in paths.items()
        if path in named
    }


def read_json(directory: Path, manifest: Manifest, path: str, keys: Keyring | None = None) -> dict[str, Any]:
    """One of the JSON files, as a map; as `read_file`, and CheckpointCorrupt where it is none. Empty where a guest's
    checkpoint has no such file."""
    if manifest.guest is not msgspec.UNSET and path not in GUEST_FILES:
        return {}
    data = read_file(directory, manifest, path, keys)
    try:
        value = strict_json(data)
    except (ValueError, RecursionError) as error:
        raise _bad(directory / path, error, "JSON") from error
    if not isinstance(value, dict):
        raise _bad(directory / path, type(value).__name__, "a JSON object")
    return value


def read_config(directory: Path, manifest: Manifest, keys: Keyring | None = None) -> dict[str, object]:
    """config.yaml by dotted key, as it was written: keys of other versions are welcome here.

    Raises:
        CheckpointCorrupt: see `read_file`.
        ConfigError: it is none of our YAML.
    """
    raw = read_file(directory, manifest, "config.yaml", keys)
    return flat(strict_yaml.parse(raw, str(directory / "config.yaml")).data)


def flat(value: object, prefix: str = "") -> dict[str, object]:
    """Nested maps as one, by dotted key; an empty map stays, as the value of its key."""
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
