"""The data set's fingerprint: a SHA-256 over every file of a tree, and what differs between two.

Each entry is one line `kind NUL path NUL size NUL sha256 LF`, sorted by the path's UTF-8 bytes; the digest
is the SHA-256 of all lines after the line `verl-slurm tree 1 LF`. Kinds: `file`; `link`, a link to a file,
hashed by the file's content (a cache may move its blobs); `directory`, an empty one. Links to directories
are followed. Mode, owner and times do not count; content, name and kind do.
"""

import hashlib
import os
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from verl_slurm.checkpoint.digest import hash_fd, num_threads
from verl_slurm.checkpoint.manifest import strict_json
from verl_slurm.errors import CheckpointCorrupt, DataError, DatasetDrift
from verl_slurm.files import write_file
from verl_slurm.paths import RunPaths

__all__ = ["Drift", "FileDigest", "Fingerprint", "check_dataset", "drift", "fingerprint", "read", "write"]

_Kind = Literal["file", "link", "directory"]
_HEAD = b"verl-slurm tree 1\n"
_FORMAT = 1
# A file or listing that changes this often while it is read is being written to.
_ATTEMPTS = 3


class FileDigest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of a tree; `size` in bytes."""

    size: Annotated[int, msgspec.Meta(ge=0)]
    sha256: str
    kind: _Kind = "file"


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tree: its digest, and its entries by relative path."""

    digest: str
    files: dict[str, FileDigest]
    format: int = _FORMAT

    @property
    def num_bytes(self) -> int:
        return sum(f.size for f in self.files.values())


@dataclass(frozen=True, kw_only=True)
class Drift:
    """What differs between two trees: relative paths, sorted. False when nothing does."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def one_line(self, limit: int = 5) -> str:
        """`1 changed (a.jsonl), 2 added (b.jsonl, c.jsonl)`."""
        parts = []
        for word, names in (("changed", self.changed), ("added", self.added), ("removed", self.removed)):
            if names:
                more = ", ..." if len(names) > limit else ""
                parts.append(f"{len(names)} {word} ({', '.join(names[:limit])}{more})")
        return ", ".join(parts) or "no difference"


def fingerprint(root: Path | str, *, threads: int | None = None) -> Fingerprint:
    """Hash the whole tree below `root`.

    Args:
        threads: that hash; default: one a core.

    Raises:
        DataError: it is missing, no directory, without a file, unreadable, holds a broken link, a loop of
            links, a device, socket or pipe, a name that is no UTF-8, or keeps changing while it is read.

    Called by: submit at the first start, the daemon before each later one, cli.
    """
    root = Path(root)
    for _ in range(_ATTEMPTS):
        before = _list(root)
        if not any(kind != "directory" for kind in before.values()):
            raise _error("the data set is empty", root, "no file below it", "at least one file")
        with ThreadPoolExecutor(max_workers=threads or num_threads(), thread_name_prefix="tree") as pool:
            digests = pool.map(lambda item: _digest(root / item[0], item[1]), before.items())
            files = dict(zip(before, digests, strict=True))
        if _list(root) == before:
            return Fingerprint(digest=_tree_digest(files), files=files)
    raise _error("the data set changes while it is read", root, "files come and go", "files at rest")


def drift(old: Fingerprint, new: Fingerprint) -> Drift:
    """What of `old` is not as it was in `new`; pure."""
    return Drift(
        added=tuple(sorted(new.files.keys() - old.files.keys())),
        removed=tuple(sorted(old.files.keys() - new.files.keys())),
        changed=tuple(sorted(p for p in old.files.keys() & new.files.keys() if old.files[p] != new.files[p])),
    )


def read(paths: RunPaths) -> Fingerprint | None:
    """The fingerprint the run started with, or None when none is recorded.

    Raises:
        CheckpointCorrupt: what is recorded is not whole.
    """
    try:
        data = paths.fingerprint.read_bytes()
    except FileNotFoundError:
        return None
    try:
        found = msgspec.convert(strict_json(data), Fingerprint)
        if found.format != _FORMAT:
            raise ValueError(f"format {found.format}, expected {_FORMAT}")
        if found.digest != _tree_digest(found.files):
            raise ValueError("its digest is not that of its entries")
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise CheckpointCorrupt(
            "the recorded data set fingerprint cannot be read",
            where=paths.fingerprint,
            found=error,
            remedy="remove it and start again, if you know that the data did not change",
        ) from error
    return found


def write(paths: RunPaths, found: Fingerprint) -> None:
    """Record what the run starts with, durably.

    Raises:
        OSError: it cannot be written.
    """
    text = msgspec.json.encode(found, order="sorted")
    write_file(paths.fingerprint, msgspec.json.format(text, indent=1) + b"\n")


def check_dataset(paths: RunPaths, root: Path | str, *, accept: bool = False) -> Fingerprint:
    """Hold the data at `root` to what the run started with; records it where nothing is recorded yet.

    Args:
        accept: take changed data and record it (`--force-resume`).

    Raises:
        DatasetDrift: it is not the same; the differing files are in `found`.
        DataError: it cannot be hashed.

    Called by: daemon, at every start.
    """
    recorded, found = read(paths), fingerprint(root)
    if recorded is None:
        write(paths, found)
        return found
    difference = drift(recorded, found)
    if difference and not accept:
        raise DatasetDrift(
            "the data set is not the one the run started with",
            where=root,
            found=difference.one_line(),
            expected=f"the files of {paths.fingerprint}",
            remedy="restore the data, or accept the change with verl-slurm submit --force-resume",
        )
    if difference:
        write(paths, found)
    return found


def _tree_digest(files: Mapping[str, FileDigest]) -> str:
    digest = hashlib.sha256(_HEAD)
    for path in sorted(files, key=lambda p: p.encode()):
        entry = files[path]
        digest.update(f"{entry.kind}\0{path}\0{entry.size}\0{entry.sha256}\n".encode())
    return digest.hexdigest()


def _list(root: Path) -> dict[str, _Kind]:
    """Relative path → kind, sorted."""
    found: dict[str, _Kind] = {}
    try:
        _descend(root, "", found, frozenset())
    except OSError as error:
        raise _error(
            "the data set cannot be read", error.filename or root, error.strerror, "a directory of files"
        ) from error
    return dict(sorted(found.items()))


def _descend(folder: Path, prefix: str, found: dict[str, _Kind], above: frozenset[tuple[int, int]]) -> None:
    info = os.stat(folder)
    here = (info.st_dev, info.st_ino)
    if here in above:
        raise _error("the data set has a loop of links", folder, "a link to a directory above it", "a tree")
    empty = True
    with os.scandir(folder) as entries:
        for entry in entries:
            empty = False
            path = prefix + entry.name
            try:
                path.encode()
            except UnicodeEncodeError:
                raise _error("a data file's name is no UTF-8", ascii(path), None, "a UTF-8 name") from None
            mode = entry.stat().st_mode  # of what a link points to; a broken one is an OSError
            if stat.S_ISDIR(mode):
                _descend(folder / entry.name, path + "/", found, above | {here})
            elif stat.S_ISREG(mode):
                found[path] = "link" if entry.is_symlink() else "file"
            else:
                raise _error("the data set holds a special file", path, f"mode {mode:o}", "files and folders")
    if empty and prefix:
        found[prefix[:-1]] = "directory"


def _digest(path: Path, kind: _Kind) -> FileDigest:
    if kind == "directory":
        return FileDigest(size=0, sha256="", kind=kind)
    for _ in range(_ATTEMPTS):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                before = os.fstat(fd)
                if not stat.S_ISREG(before.st_mode):
                    break
                size, digest = hash_fd(fd)
                after = os.fstat(fd)
            finally:
                os.close(fd)
        except FileNotFoundError:
            break
        except OSError as error:
            raise _error("a data file cannot be read", path, error.strerror, "a readable file") from error
        if size == after.st_size and _stamp(before) == _stamp(after):
            return FileDigest(size=size, sha256=digest, kind=kind)
    raise _error("the data set changes while it is read", path, "another content each time", "files at rest")


def _stamp(info: os.stat_result) -> tuple[int, int, int, int]:
    return info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def _error(what: str, where: object, found: object, expected: str) -> DataError:
    return DataError(
        what, where=where, found=found, expected=expected, remedy="set data.root to a directory of data files"
    )
