"""Turns a manifest into JSON and back, and computes its digest (`specification.py`, section 2)."""

import hashlib
import json
from typing import Any

import msgspec

from verl_slurm.base import bounded
from verl_slurm.base.errors import CheckpointCorrupt, SchemaMismatch
from verl_slurm.base.paths import CHECKPOINT_NAME
from verl_slurm.checkpoint.format.specification import (
    FORMAT_VERSION,
    PLAIN_FILES,
    FileEntry,
    Manifest,
    path_problem,
    sealed_size,
)


def canonical(value: object) -> bytes:
    """Returns the canonical JSON text of `value`, from which digests are computed."""
    # NaN is no JSON: another reader of the same text would refuse it, or take it for something else.
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode("ascii")


def manifest_digest(manifest: Manifest) -> str:
    """Returns the SHA-256 of `signed_bytes`."""
    return hashlib.sha256(signed_bytes(manifest)).hexdigest()


def signed_bytes(manifest: Manifest) -> bytes:
    """Returns the canonical JSON of everything but the digest and the HMAC, which both cover it."""
    fields = msgspec.to_builtins(msgspec.structs.replace(manifest, files=()))
    text = canonical({key: value for key, value in fields.items() if key not in {"digest", "hmac"}})
    # For everything that a path may hold, msgspec writes the same bytes as `canonical`, in a quarter of the memory:
    # `files` is nearly all of a manifest. No other `"files":[]` is possible outside of a text, where its quotes are
    # escaped.
    files = msgspec.json.encode(manifest.files, order="sorted")
    return text.replace(b'"files":[]', b'"files":' + files, 1)


def sealed(manifest: Manifest) -> Manifest:
    """Returns `manifest` with its files sorted and its digest filled in."""
    # Sorted: the digest must not depend on the order in which ranks reported their files.
    files = tuple(sorted(manifest.files, key=lambda entry: entry.path))
    manifest = msgspec.structs.replace(manifest, files=files)
    return msgspec.structs.replace(manifest, digest=manifest_digest(manifest))


def render(manifest: Manifest) -> bytes:
    """Returns the bytes of manifest.json."""
    # Indented, for people: the digest is of the canonical text, so the layout of the file is free.
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1) + b"\n"


def checkpoint_order(name: str) -> tuple[int, int] | None:
    """Returns (step, safe point) of a checkpoint's name; None if it is no such name."""
    match = CHECKPOINT_NAME.fullmatch(name)
    # Compared as numbers: the digits are at least six, so text would sort step 1,000,000 before 999,999.
    return (int(match[1]), int(match[2] or 0)) if match else None


def parse(data: bytes, *, where: object) -> Manifest:
    """Parses the manifest in `data` and checks digest and paths.

    Raises:
        SchemaMismatch: another format version; nothing else of it was believed.
        CheckpointCorrupt: anything else that violates `specification.py`.
    """
    try:
        # The version first: another one may have any other fields. Size and number of values are checked here for both
        # decodings.
        version = bounded.decode_json(data, _Version, bounded.MANIFEST, doubles=False).format_version
        # A bool is an int as well, and no version: it is refused below as corrupt.
        if type(version) is int and version != FORMAT_VERSION:
            raise SchemaMismatch(
                "the checkpoint is of another format version",
                where=where,
                found=version,
                expected=FORMAT_VERSION,
                remedy="resume with the version of verl-slurm that wrote it",
            )
        manifest = msgspec.json.decode(data, type=Manifest)
        # One in our own rendering has no key twice. The search for doubled keys takes four times as long as all the
        # rest, and every rank reads the manifest.
        if render(manifest) != data:
            bounded.refuse_doubled_keys(data)
        _check(manifest)
    except (ValueError, RecursionError, OverflowError, msgspec.MsgspecError) as error:
        raise CheckpointCorrupt(
            "the manifest does not verify",
            where=where,
            found=error,
            remedy="resume from an older checkpoint (verl-slurm list RUN)",
        ) from error
    return manifest


class _Version(msgspec.Struct):
    """The part of a manifest that is believed before its version is known."""

    format_version: Any = None


def _check(manifest: Manifest) -> None:
    # The paths come first: the digest covers texts without an escape (`signed_bytes`).
    problem = next((p for entry in manifest.files if (p := _path_problem(entry.path))), None)
    if problem is not None:
        raise ValueError(problem)
    actual = manifest_digest(manifest)
    if manifest.digest != actual:
        raise ValueError(f"manifest digest is {actual}, it says {manifest.digest}")
    # What is newest, and what is dropped, goes by the name.
    if checkpoint_order(manifest.name) != (manifest.step, manifest.safe_point):
        raise ValueError(f"name {manifest.name} for step {manifest.step}, safe point {manifest.safe_point}")
    seen: dict[str, str] = {}
    for entry in manifest.files:
        # On a file system that ignores case both would be one file.
        other = seen.setdefault(entry.path.casefold(), entry.path)
        if other is not entry.path:
            raise ValueError(f"two files of one name: {other!r}, {entry.path!r}")
        problem = _sealing_problem(entry, encrypted=manifest.encryption is not msgspec.UNSET)
        if problem is not None:
            raise ValueError(f"{problem}: {entry.path!r}")
    if manifest.hmac is not msgspec.UNSET and manifest.encryption is msgspec.UNSET:
        raise ValueError("an HMAC of no key")


def _path_problem(path: str) -> str | None:
    problem = path_problem(path)
    return None if problem is None else f"{problem}: {path!r}"


def _sealing_problem(entry: FileEntry, *, encrypted: bool) -> str | None:
    """Returns why an entry does not fit the manifest of an encrypted, or unencrypted, checkpoint."""
    plain = entry.plain_size
    if isinstance(plain, msgspec.UnsetType):
        # All or none: a save with a key seals everything but PLAIN_FILES.
        return "not encrypted" if encrypted and entry.path not in PLAIN_FILES else None
    if not encrypted or entry.path in PLAIN_FILES:
        return "encrypted where nothing is"
    return None if entry.size == sealed_size(plain) else f"{entry.size} bytes for {plain} encrypted ones"
