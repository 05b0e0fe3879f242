"""The small files of a checkpoint, each held to its manifest before it is believed; the shards are not read.

For a look (`inspect`, `diff`) a re-read of every byte would take minutes and prove what nobody asked. So what is
looked at is checked, and nothing else: `verify` and `compare` read all.
"""

import errno
import os
import stat
from pathlib import Path
from typing import Any

from verl_slurm.checkpoint.format import MANIFEST, FileEntry, Manifest
from verl_slurm.checkpoint.manifest import strict_json
from verl_slurm.checkpoint.tree import open_below, open_directory
from verl_slurm.checkpoint.verify import check_file, read_manifest
from verl_slurm.config import strict_yaml
from verl_slurm.errors import CheckpointCorrupt, NotFound, PermissionRefused

__all__ = ["check_descriptions", "flat", "known_manifest", "read_checked", "read_config", "read_json"]

# Everything else in a domain's directory describes the tensors in these.
_BULK = (".distcp", ".bin")


def known_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint, itself verified, or one line that says why not.

    Raises:
        NotFound: there is no checkpoint.
        CheckpointCorrupt, SchemaMismatch: see `verify.read_manifest`.
        PermissionRefused: it may not be read.

    Called by: describe, diff, export.
    """
    try:
        return read_manifest(directory)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            raise PermissionRefused(
                "the checkpoint may not be read", where=directory, remedy="ask its owner"
            ) from error
        raise NotFound(
            "no whole checkpoint there",
            where=directory,
            found=f"{MANIFEST}: {error.strerror}",
            remedy="`verl-slurm checkpoints RUN` lists those of a run",
        ) from error


def read_checked(directory: Path, manifest: Manifest, path: str) -> bytes:
    """One file's content, which is what was committed.

    Args:
        path: as the manifest names it.

    Raises:
        CheckpointCorrupt: the manifest does not name it, it is not there, or of another size or digest.
    """
    entry = next((entry for entry in manifest.files if entry.path == path), None)
    if entry is None:
        raise _bad(directory / path, "not in the manifest", "a part of every checkpoint")
    try:
        with open_directory(directory) as root:
            _hold(root, entry, directory)
            with open_below(root, path) as fd, os.fdopen(os.dup(fd), "rb") as file:
                return file.read(entry.size)
    except OSError as error:
        raise _bad(directory / path, error.strerror or error, "the file that was committed") from error


def read_json(directory: Path, manifest: Manifest, path: str) -> dict[str, Any]:
    """One of the JSON files, as a map; as `read_checked`, and CheckpointCorrupt where it is none."""
    data = read_checked(directory, manifest, path)
    try:
        value = strict_json(data)
    except (ValueError, RecursionError) as error:
        raise _bad(directory / path, error, "JSON") from error
    if not isinstance(value, dict):
        raise _bad(directory / path, type(value).__name__, "a JSON object")
    return value


def read_config(directory: Path, manifest: Manifest) -> dict[str, object]:
    """config.yaml by dotted key, as it was written: keys of other versions are welcome here.

    Raises:
        CheckpointCorrupt: see `read_checked`.
        ConfigError: it is none of our YAML.
    """
    raw = read_checked(directory, manifest, "config.yaml")
    return flat(strict_yaml.parse(raw, str(directory / "config.yaml")).data)


def flat(value: object, prefix: str = "") -> dict[str, object]:
    """Nested maps as one, by dotted key; an empty map stays, as the value of its key."""
    if not isinstance(value, dict) or not value:
        return {prefix: value} if prefix else {}
    merged: dict[str, object] = {}
    for key, inner in value.items():
        merged |= flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return merged


def check_descriptions(directory: Path, manifest: Manifest, domain: str) -> None:
    """Hold what describes a domain's tensors to the manifest, and the directories to our ownership.

    Needed before torch looks at it: today's `.metadata` is a pickle.

    Raises:
        CheckpointCorrupt: it is not what was committed.
        PermissionRefused: others own it or may write it.
    """
    names = [e for e in manifest.files if e.path.startswith(f"{domain}/") and not e.path.endswith(_BULK)]
    try:
        with open_directory(directory) as root, open_below(root, domain) as folder:
            for fd, where in ((root, directory), (folder, directory / domain)):
                _require_ours(os.fstat(fd), where)
            for entry in names:
                _hold(root, entry, directory)
                with open_below(root, entry.path) as fd:
                    _require_ours(os.fstat(fd), directory / entry.path)
    except OSError as error:
        raise _bad(directory / domain, error.strerror or error, "the files that were committed") from error


def _hold(root: int, entry: FileEntry, directory: Path) -> None:
    _, problem = check_file(root, entry)
    if problem is not None:
        raise _bad(directory / problem.path, problem.what, "the file that was committed")


def _require_ours(info: os.stat_result, where: Path) -> None:
    mode = stat.S_IMODE(info.st_mode)
    if info.st_uid != os.geteuid() or mode & 0o022:
        raise PermissionRefused(
            "the checkpoint could have been written by others",
            where=where,
            found=f"uid {info.st_uid}, mode {mode:04o}",
            expected=f"uid {os.geteuid()}, written by nobody else",
            remedy="copy it to a directory of your own",
        )


def _bad(where: object, found: object, expected: object) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        "the checkpoint is not what was committed",
        where=where,
        found=found,
        expected=expected,
        remedy="see all of it with `verl-slurm verify`",
    )
