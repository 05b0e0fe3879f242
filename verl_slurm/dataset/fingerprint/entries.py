"""Defines the fingerprint of a tree of data or code: its entries, its digest, and the differences between two. Pure,
but for `recorded_tree`.

Each entry is one line `kind NUL path NUL size NUL sha256 LF`, sorted by the path's UTF-8 bytes; the digest
is the SHA-256 of all lines after the line `verl-slurm tree 1 LF`. Content, name and kind count; owner and times do not.

| kind | of data | of code |
| --- | --- | --- |
| `file` | any | one that its owner may not execute |
| `program` | - | one that its owner may execute |
| `link` | a link to a file, hashed by the file's content (a cache may move its blobs) | any link, hashed by its text |
| `directory` | an empty one; links to directories are followed | - |
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from verl_slurm.base.bounded import FINGERPRINT, Limit, decode_json, read_regular
from verl_slurm.base.errors import is_transient_storage_error

Kind = Literal["file", "program", "link", "directory"]
FORMAT = 1
_HEAD = b"verl-slurm tree 1\n"


class FileDigest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One entry of a tree; `size` in bytes."""

    size: Annotated[int, msgspec.Meta(ge=0)]
    sha256: str
    kind: Kind = "file"


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes a tree: its digest, and its entries by relative path."""

    digest: str
    files: dict[str, FileDigest]
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        return sum(f.size for f in self.files.values())

    def digests(self) -> dict[str, str]:
        """Returns the SHA-256 of each file, by relative path."""
        return {path: entry.sha256 for path, entry in self.files.items() if entry.kind != "directory"}


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Differences between two trees: relative paths, sorted. False when there are none."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    @classmethod
    def between(cls, old: Mapping[str, object], new: Mapping[str, object]) -> "Drift":
        """Compares what two trees have by relative path."""
        return cls(
            added=tuple(sorted(new.keys() - old.keys())),
            removed=tuple(sorted(old.keys() - new.keys())),
            changed=tuple(sorted(path for path in old.keys() & new.keys() if old[path] != new[path])),
        )

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def one_line(self, limit: int = 5) -> str:
        """Returns `1 changed (a.jsonl), 2 added (b.jsonl, c.jsonl)`."""
        parts = []
        for word, names in (("changed", self.changed), ("added", self.added), ("removed", self.removed)):
            if names:
                more = ", ..." if len(names) > limit else ""
                parts.append(f"{len(names)} {word} ({', '.join(names[:limit])}{more})")
        return ", ".join(parts) or "no difference"


def drift(old: Fingerprint, new: Fingerprint) -> Drift:
    """Returns the differences from `old` to `new`."""
    return Drift.between(old.files, new.files)


def sealed(files: Mapping[str, FileDigest]) -> Fingerprint:
    """Returns the fingerprint of entries, sorted. Raises UnicodeEncodeError if a path is not UTF-8."""
    # Sorted here, so that the record on disk lists them as the digest counts them.
    ordered = sorted(files.items(), key=_path)
    return Fingerprint(digest=_digest(ordered), files=dict(ordered))


def parse(data: bytes, limit: Limit) -> Fingerprint:
    """Parses a recorded fingerprint, which its digest proves. Raises ValueError or RecursionError."""
    # Bounded: runs are handed over, and this file with them.
    found = decode_json(data, Fingerprint, limit)
    if found.format != FORMAT:
        raise ValueError(f"format {found.format}, expected {FORMAT}")
    # A record whose digest is not that of its entries stands for no tree.
    if found.digest != sealed(found.files).digest:
        raise ValueError("its digest is not that of its entries")
    return found


def recorded_tree(folder: Path, digest: str) -> Fingerprint | None:
    """Returns the record; None if it is missing, does not have the digest, or names a path that leads out. Raises
    OSError if storage does not answer.
    """
    try:
        data = read_regular(folder / f"{digest}.json", FINGERPRINT)
        tree = parse(data, FINGERPRINT)
    except (OSError, ValueError, RecursionError) as error:
        # Storage that does not answer says nothing about the tree.
        if is_transient_storage_error(error) or isinstance(error, PermissionError):
            raise
        return None
    # Names come from a file: one that leads out of the copy is none of ours, whatever its digest.
    plain = all(os.path.normpath(n) == n and n[0] != "/" and n.split("/")[0] != ".." for n in tree.files)
    return tree if plain and tree.digest == digest else None


def render(found: Fingerprint) -> bytes:
    """Reverses `parse`."""
    return msgspec.json.format(msgspec.json.encode(found, order="sorted"), indent=1) + b"\n"


def _digest(ordered: list[tuple[str, FileDigest]]) -> str:
    # UTF-8 keeps the order of code points, so sorting the text sorts its bytes.
    # NUL between the fields: no path holds one, so no two trees have the same lines.
    lines = [f"{entry.kind}\0{path}\0{entry.size}\0{entry.sha256}\n" for path, entry in ordered]
    # The format's name is a part of what is hashed.
    digest = hashlib.sha256(_HEAD)
    digest.update("".join(lines).encode())
    return digest.hexdigest()


def _path(item: tuple[str, FileDigest]) -> str:
    return item[0]
