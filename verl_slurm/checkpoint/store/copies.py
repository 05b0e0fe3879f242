"""Specifies a place of copies, implements the one in a directory, and copies files between places.

A place knows keys and bytes. It knows nothing of checkpoints: what one is, when it is whole, and what may be removed.
Places are the run's own checkpoints, its tiers, what a node's disk holds, and what was set aside in quarantine.

`tests/tiers/test_places.py` checks these obligations for every place:

- one thread calls it (`read` and `put` may be called from several, for different keys); one mover per run at a time,
  but another run's mover, or a former attempt's, may work on the same storage;
- `put` and `commit` are durable when they return, atomic (no reader sees half an object), and may be repeated;
- `put` may be killed at any point; called again with the same bytes it does not send again what has arrived;
- nothing that a place says of its bytes is believed: `copy_file` reads back what was put;
- every failure is a `TierError` of one line, without secrets in it; time-outs and retries are bounded inside. What
  `source` raises passes through, and no object is made then.

A plug-in is an entry point of the group `verl_slurm.tiers`: a callable that takes the `TierConfig` of `kind:
plugin:NAME` and returns a `CopyPlace`.
"""

import hashlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from verl_slurm.base.errors import CheckpointCorrupt, TierError
from verl_slurm.base.files import create_file, fsync_path, private_dir, rename
from verl_slurm.base.tree import list_tree, open_below, open_directory
from verl_slurm.checkpoint.format.specification import CHUNK_BYTES, FileEntry
from verl_slurm.checkpoint.store.chunks import leaf_problem

BLOCK_BYTES = 4 << 20

Source = Callable[[int], Iterator[bytes]]
"""Opens the bytes to be put at an offset, and yields them to their end, a few MiB at a time. May be called again."""


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """One object as its place lists it.

    Attributes:
        stamp: changes when the object is replaced (ETag, or inode and time); compared for equality alone.
        sha256: the digest by which `put` stored it, if the user has chosen to believe this place; of `stat` alone.
    """

    key: str
    size: int
    stamp: str
    sha256: str = field(default="", compare=False)


class CopyPlace(Protocol):
    """Storage of copies; the module specifies its obligations."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Lists every object whose key begins with `prefix`, in any order; uploads under way are left out."""
        ...

    def stat(self, key: str) -> ObjectInfo | None:
        """Returns the object, or None when there is none."""
        ...

    def read(self, key: str, offset: int = 0, size: int | None = None) -> Iterator[bytes]:
        """Yields bytes of an object in order, from the medium, none beyond its end. No object: TierError."""
        ...

    def put(self, key: str, entry: FileEntry, source: Source) -> int:
        """Makes `key` hold `source`; replaces what is there. Returns the bytes that this call sent.

        `entry` has their size and digest; the place need not check them.
        """
        ...

    def commit(self, key: str, data: bytes) -> bool:
        """Makes `key` hold `data` unless it holds something; returns False when it does."""
        ...

    def delete(self, key: str) -> None:
        """Removes an object; a missing one is no error."""
        ...

    def forget(self, prefix: str, keep: Collection[str] = ()) -> int:
        """Abandons uploads under way below `prefix`, except below one of `keep`; returns how many."""
        ...


class DirectoryPlace:
    """Keeps copies as files below `root`, which must exist. No link below it is followed.

    Each file is written under a name that no manifest may hold (`~NAME.DIGEST.part`), fsynced, renamed, and its
    directory fsynced (`verl_slurm.base.files`). An interrupted attempt continues after its last byte.
    """

    def __init__(self, root: Path, name: str) -> None:
        self._root, self._name = root, name

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._errors(prefix):
            entries = self._entries(prefix)
        for key, info in entries:
            if stat.S_ISREG(info.st_mode) and not _is_unfinished(key):
                yield _info(key, info)

    def stat(self, key: str) -> ObjectInfo | None:
        with self._errors(key):
            self._require_root()
            try:
                info = os.stat(self._root / key, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return _info(key, info) if stat.S_ISREG(info.st_mode) else None

    def read(self, key: str, offset: int = 0, size: int | None = None) -> Iterator[bytes]:
        with self._errors(key), open_directory(self._root) as root, open_below(root, key) as fd:
            # Clean pages go, or a reading back would see the cache. Afterwards, too: the memory is the training's.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            end = offset + size if size is not None else max(offset, os.fstat(fd).st_size)
            try:
                while block := os.pread(fd, min(BLOCK_BYTES, end - offset), offset):
                    yield block
                    offset += len(block)
            finally:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def put(self, key: str, entry: FileEntry, source: Source) -> int:
        final = self._root / key
        # The digest in the name: only bytes for the same content are continued. 200 of the name's characters, as 255
        # are allowed.
        part = final.parent / f"~{final.name[:200]}.{entry.sha256[:16]}.part"
        with self._errors(key):
            self._make_parents(key)
            fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                sent = _continue(fd, source, entry.size)
                os.fsync(fd)  # noqa: TID251 - of a file that is not new: an interrupted transfer goes on
            except (OSError, CheckpointCorrupt):
                # Wrong bytes are not continued. A second fsync would report a false success for these pages
                # (`verl_slurm.base.files`). The next attempt starts anew.
                part.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)
            # A reader meets the whole file or none.
            rename(part, final)
        return sent

    def commit(self, key: str, data: bytes) -> bool:
        final = self._root / key
        with self._errors(key):
            self._make_parents(key)
            # A nonce, unlike for a part: two movers must not write into one file.
            return create_file(final, data, temp=final.parent / f"~{final.name}.{secrets.token_hex(8)}.part")

    def delete(self, key: str) -> None:
        path = self._root / key
        with self._errors(key):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return
            # Durable before the next removal: a crash must not bring a commit record back whose objects are gone.
            fsync_path(path.parent)
            # Remove directories that are empty now; the place itself and the first name below it stay.
            for folder in list(path.parents)[: max(0, key.count("/") - 1)]:
                try:
                    folder.rmdir()
                except OSError:
                    break

    def forget(self, prefix: str, keep: Collection[str] = ()) -> int:
        with self._errors(prefix):
            entries = self._entries(prefix)
            doomed = [key for key, _ in entries if _is_unfinished(key) and not key.startswith(tuple(keep))]
            for key in doomed:
                (self._root / key).unlink(missing_ok=True)
        return len(doomed)

    def _entries(self, prefix: str) -> Sequence[tuple[str, os.stat_result]]:
        self._require_root()
        base = prefix.rstrip("/")
        try:
            with open_directory(self._root / base) as root:
                return [(f"{base}/{entry.path}".lstrip("/"), entry.info) for entry in list_tree(root)]
        except FileNotFoundError:
            return []

    def _require_root(self) -> None:
        # Never made: if a disk is not mounted, its mount point would fill the root file system instead.
        if not self._root.is_dir():
            raise TierError(
                "the tier's directory is not there",
                where=f"{self._name}: {self._root}",
                remedy="mount it, or make it, on the node where the job's first process runs",
            )

    def _make_parents(self, key: str) -> None:
        self._require_root()
        folder = self._root
        for name in key.split("/")[:-1]:
            folder = folder / name
            try:
                info = os.lstat(folder)
            except FileNotFoundError:
                private_dir(folder, inside=self._root)
                continue
            # Another user's directory, or a link, could be exchanged under what is written there.
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
                raise TierError(
                    "a place in the tier is another user's, or no directory",
                    where=f"{self._name}: {folder}",
                    found=f"mode {info.st_mode:o}, uid {info.st_uid}",
                    expected=f"a directory of uid {os.geteuid()}",
                    remedy="give the tier a prefix of your own (tiers[].prefix)",
                )

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TierError(
                "the storage failed",
                where=f"{self._name}: {key}",
                found=error.strerror or error,
                remedy=f"look at the storage behind {self._root}; the next attempt goes on where this one ended",
            ) from error


def _info(key: str, info: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key=key, size=info.st_size, stamp=f"{info.st_ino}.{info.st_mtime_ns}")


def _is_unfinished(key: str) -> bool:
    # `~` is in no path that a manifest may hold.
    return "~" in key.rpartition("/")[2]


def _continue(fd: int, source: Source, size: int) -> int:
    """Appends what is missing; returns the bytes appended."""
    here = os.fstat(fd).st_size
    # Its bytes are believed for now: all of them are read back in the end.
    began = offset = here if here <= size else 0
    if here > offset:
        os.ftruncate(fd, offset)
    for block in source(offset):
        view = memoryview(block)
        while view:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written
    return offset - began


def checked(blocks: Iterable[bytes], entry: FileEntry) -> Iterator[bytes]:
    """Yields all bytes of a file in order, each block once it is checked as far as a whole chunk of it goes.

    Raises:
        CheckpointCorrupt: they are not those of `entry`, at the first wrong chunk; `found` is a short clause.
    """
    problem = leaf_problem(entry)
    size, digest = 0, hashlib.sha256()
    for block in blocks:
        view = memoryview(block)
        while view and not problem:
            # Blocks are cut at the borders of chunks, whatever their size.
            piece = view[: CHUNK_BYTES - size % CHUNK_BYTES]
            digest.update(piece)
            size, view = size + len(piece), view[len(piece) :]
            # So a stream without end is read one block too far at most.
            if size > entry.size:
                problem = f"more than the expected {entry.size} bytes"
            elif size % CHUNK_BYTES == 0 or size == entry.size:
                problem = _chunk_problem(entry, size, digest.hexdigest())
                digest = hashlib.sha256()
        if problem:
            break
        yield block
    if not problem and size != entry.size:
        problem = f"size {size}, expected {entry.size}"
    if not problem and not size:
        problem = _chunk_problem(entry, 0, digest.hexdigest())
    if problem:
        raise CheckpointCorrupt("the bytes are not those of the checkpoint", where=entry.path, found=problem)


def _chunk_problem(entry: FileEntry, end: int, digest: str) -> str:
    number = max(0, end - 1) // CHUNK_BYTES
    expected = entry.leaves[number] if entry.leaves else entry.sha256
    if digest == expected:
        return ""
    place = f" in the chunk at byte {number * CHUNK_BYTES}" if entry.leaves else ""
    return f"sha256 {digest}, expected {expected}{place}"


def content_problem(place: CopyPlace, key: str, entry: FileEntry) -> str:
    """Returns why `key` does not hold what `entry` says, every byte read back; empty: it does."""
    info = place.stat(key)
    if info is None:
        return "missing"
    if info.size != entry.size:
        return f"size {info.size}, expected {entry.size}"
    if info.sha256:
        # The user believes this place: nothing is read back.
        return "" if info.sha256 == entry.sha256 else f"sha256 {info.sha256}, expected {entry.sha256}"
    try:
        for _ in checked(place.read(key), entry):
            pass
    except CheckpointCorrupt as error:
        return str(error.found)
    return ""


def copy_file(
    sources: Sequence[tuple[CopyPlace, str]],
    target: tuple[CopyPlace, str],
    entry: FileEntry,
    *,
    until: float | None = None,
) -> int:
    """Makes the target, a place and a key, hold one file of a checkpoint, read back; returns the bytes sent.

    Args:
        sources: places and keys, tried in this order.
        until: `time.monotonic` after which a source is too slow; None: no limit.

    Raises:
        CheckpointCorrupt: no source has it whole.
        TierError: a place did not answer, or the target returned other bytes twice.
    """
    place, key = target
    # Left by a pass that died, or brought by a node.
    if not content_problem(place, key, entry):
        return 0
    damaged: CheckpointCorrupt | None = None
    # What is damaged in one may be whole in the next.
    for source, path in sources:
        try:
            return _copy(source, path, place, key, entry, until)
        except CheckpointCorrupt as error:
            damaged = damaged or error
    raise damaged or CheckpointCorrupt("no copy has this file", where=key)


def _copy(
    source: CopyPlace, path: str, place: CopyPlace, key: str, entry: FileEntry, until: float | None
) -> int:
    info = source.stat(path)
    # Before a byte is sent: this much of the damage costs no transfer.
    if info is None or info.size != entry.size:
        found = "missing" if info is None else f"size {info.size}, expected {entry.size}"
        raise CheckpointCorrupt("the source is damaged", where=path, found=found)

    def opened(offset: int) -> Iterator[bytes]:
        blocks = _in_time(source.read(path, offset), path, until)
        # What goes on behind the bytes of a former attempt is judged when all are read back.
        return checked(blocks, entry) if offset == 0 else blocks

    sent, problem = 0, ""
    # Twice: what was damaged on the way once, or by a former attempt, is sent again from its start, and checked as it
    # is read. A place that damages it twice is at fault.
    for _ in range(2):
        try:
            sent += place.put(key, entry, opened)
        except CheckpointCorrupt as error:
            raise CheckpointCorrupt("the source is damaged", where=path, found=error.found) from None
        problem = content_problem(place, key, entry)
        if not problem:
            return sent
        place.delete(key)
    raise TierError(
        "the tier gives back other bytes than it was given",
        where=key,
        found=problem,
        remedy="the checkpoint does not exist there; look at that storage",
    )


def _in_time(blocks: Iterator[bytes], where: str, until: float | None) -> Iterator[bytes]:
    for block in blocks:
        # Between two blocks: a place bounds each of its own reads.
        if until is not None and time.monotonic() > until:
            raise TierError("the tier is too slow", where=where)
        yield block
