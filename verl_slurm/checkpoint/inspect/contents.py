"""Reads the small files of a checkpoint for a look at it; reads no tensors."""

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from verl_slurm.base import bounded
from verl_slurm.base.errors import (
    CheckpointCorrupt,
    NotFound,
    PermissionRefused,
    VerlSlurmError,
    is_transient_storage_error,
)
from verl_slurm.base.keys import Keyring
from verl_slurm.checkpoint.format.specification import (
    GUEST_FILES,
    MANIFEST,
    FileEntry,
)
from verl_slurm.checkpoint.format.tensor_index import INDEX, TensorIndex, parse_index
from verl_slurm.checkpoint.store.chunks import Wanted
from verl_slurm.checkpoint.store.reader import CheckpointReader, limit_of
from verl_slurm.config import strict_yaml


class Look(CheckpointReader):
    """Reads a checkpoint for a person: an error of the storage is one line that tells what to do.

    Raises:
        NotFound: there is no checkpoint.
        PermissionRefused: it may not be read, or its storage does not give it.
        CheckpointCorrupt, SchemaMismatch, KeyRefused: see `CheckpointReader`.
    """

    def __init__(self, directory: Path, keys: Keyring | None = None) -> None:
        # Not `verify`: reading every byte would take minutes and prove more than was asked. Each file that is shown is
        # checked by itself.
        try:
            super().__init__(directory, keys)
        except OSError as error:
            raise _withheld(directory, error) or NotFound(
                "no whole checkpoint there",
                where=directory,
                found=f"{MANIFEST}: {error.strerror}",
                remedy="`verl-slurm list RUN` lists those of a run",
            ) from error

    def read(self, path: str, *, head: int | None = None) -> bytes:
        """As `CheckpointReader.read`; PermissionRefused if it cannot be read, and CheckpointCorrupt if it is gone."""
        try:
            return super().read(path, head=head)
        except OSError as error:
            raise _not_given(self.directory / path, error) from error

    def fill(self, wanted: Mapping[str, Sequence[Wanted]], near: Path | None = None) -> None:
        """As `CheckpointReader.fill`; errors as `read`."""
        try:
            super().fill(wanted, near)
        except OSError as error:
            raise _not_given(self.directory, error) from error

    def indexes(self) -> dict[str, TensorIndex | FileEntry]:
        """Maps each domain to its tensors, or to its index's entry if that is too large for a look."""
        entries = {domain: self.entries.get(f"{domain}/{INDEX}") for domain in self.manifest.domains}
        # By the manifest's size, before a byte is read. A load reads larger ones.
        limit = bounded.SHOWN_INDEX
        return {
            domain: entry
            if entry.size > limit.num_bytes
            else parse_index(self.read(entry.path), where=self.directory / entry.path, limit=limit)
            for domain, entry in entries.items()
            if entry is not None
        }

    def json(self, path: str) -> dict[str, Any]:
        """Returns a JSON file as a map; empty where a guest's checkpoint has none. Errors as `read`."""
        if self.manifest.guest is not msgspec.UNSET and path not in GUEST_FILES:
            return {}
        try:
            return bounded.decode_json(self.read(path), dict[str, Any], limit_of(path))
        except (ValueError, RecursionError) as error:
            raise _bad(self.directory / path, error, "JSON") from error

    def config(self) -> dict[str, object]:
        """Returns config.yaml by dotted key, as written. Errors as `read`; ConfigError: outside our YAML."""
        # Parsed, not checked against the schema: one of another version may have other keys and is shown all the same.
        return flat(strict_yaml.parse(self.read("config.yaml"), str(self.directory / "config.yaml")).data)


def flat(value: object, prefix: str = "") -> dict[str, object]:
    """Flattens nested maps to dotted keys; an empty map stays, as the value of its key."""
    # An empty map has no keys below it, and would vanish.
    if not isinstance(value, dict) or not value:
        return {prefix: value} if prefix else {}
    merged: dict[str, object] = {}
    for key, inner in value.items():
        merged |= flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return merged


def _withheld(where: object, error: OSError) -> PermissionRefused | None:
    if error.errno in (errno.EACCES, errno.EPERM):
        return PermissionRefused("the checkpoint may not be read", where=where, remedy="ask its owner")
    # Storage that fails now says nothing about the checkpoint: it is not called corrupt, nor missing.
    if is_transient_storage_error(error):
        remedy = "see whether its storage is well, then the same command again"
        return PermissionRefused(
            "the checkpoint cannot be read", where=where, found=error.strerror, remedy=remedy
        )
    return None


def _not_given(where: object, error: OSError) -> VerlSlurmError:
    return _withheld(where, error) or _bad(where, error.strerror or error, "the file that was committed")


def _bad(where: object, found: object, expected: object) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        "the checkpoint is not what was committed",
        where=where,
        found=found,
        expected=expected,
        remedy="see all of it with `verl-slurm verify`",
    )
