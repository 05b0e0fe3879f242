"""Implements a tier in a directory: node NVMe, a second file system, a tape library's front. Archives use it, too.

Objects are files below `path`/PREFIX. Each is written under a name that no manifest may hold (`~NAME.DIGEST.part`),
fsynced, renamed, and its directory fsynced. An interrupted attempt continues after its last byte, since `holds` reads
the bytes back from the medium in the end and they are discarded if they do not match.

`verl_slurm.base.files` tells what POSIX, NFS and Lustre promise.
"""

import errno
import os
import secrets
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from verl_slurm.base.errors import TierError
from verl_slurm.base.files import fsync_path, private_dir, rename, write_new
from verl_slurm.base.tree import files_below, list_tree, open_below, open_directory
from verl_slurm.checkpoint.format.specification import FileEntry
from verl_slurm.checkpoint.store.chunks import Reading, read_checked
from verl_slurm.config.schema import TierConfig
from verl_slurm.tiers.backend import ObjectInfo, Source

_BLOCK = 4 << 20
# exFAT, some FUSE file systems and some shares have no hard links.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}


class PosixBackend:
    """Stores objects in a directory; `backend.Backend` specifies each method."""

    def __init__(self, tier: TierConfig) -> None:
        assert tier.path is not None, "config.tier_checks"
        self._tier, self._root = tier.name, Path(tier.path).resolve()  # below it no link is followed

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        base = self._root / prefix.rstrip("/")
        with self._errors(prefix):
            self._require_root()
            try:
                files = files_below(base)
            except FileNotFoundError:
                return
        for path, info in files.items():
            # Unfinished parts are no objects: `~` is in no path that a manifest may hold.
            if not path.rpartition("/")[2].startswith("~"):
                yield _info(prefix.rstrip("/") + "/" + path, info)

    def stat(self, key: str) -> ObjectInfo | None:
        with self._errors(key):
            self._require_root()
            try:
                info = os.stat(self._root / key, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return _info(key, info) if stat.S_ISREG(info.st_mode) else None

    def read(self, key: str, offset: int, size: int) -> bytes:
        with self._errors(key), self._open(key) as fd:
            return _pread(fd, offset, size)

    def blocks(self, key: str) -> Iterator[bytes]:
        with self._errors(key), self._open(key) as fd:
            offset = 0
            while block := os.pread(fd, _BLOCK, offset):
                yield block
                offset += len(block)

    def put(self, key: str, source: Source, entry: FileEntry) -> int:
        final = self._root / key
        # The digest in the name: only bytes for the same content are continued. 200 of the name's characters, as 255
        # are allowed.
        part = final.parent / f"~{final.name[:200]}.{entry.sha256[:16]}.part"
        with self._errors(key):
            self._require_root()
            self._make_parents(key)
            fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                sent = _continue(fd, source)
                os.fsync(fd)  # noqa: TID251 - of a file that is not new: an interrupted transfer goes on
            except OSError:
                # A second fsync would report a false success for these pages (`verl_slurm.base.files`): the next
                # attempt starts anew.
                part.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)
            # A reader of the tier meets the whole file or none.
            rename(part, final)
        return sent

    def commit(self, key: str, data: bytes) -> bool:
        final = self._root / key
        # A nonce, unlike for a part: two movers must not write into one file.
        temp = final.parent / f"~{final.name}.{secrets.token_hex(8)}.part"
        with self._errors(key):
            self._make_parents(key)
            try:
                write_new(temp, [data])
                return self._link(temp, final)
            finally:
                temp.unlink(missing_ok=True)
                # After the unlink, which it makes durable together with the new name.
                fsync_path(final.parent)

    @staticmethod
    def _link(temp: Path, final: Path) -> bool:
        try:
            # A link fails if the name is taken; a rename would replace it.
            os.link(temp, final, follow_symlinks=False)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # Not one step: without links two movers at the same moment could both commit. `copy_checkpoint` reads the
            # record back.
            if os.path.lexists(final):
                return False
            rename(temp, final, durable=False)
        return True

    def holds(self, key: str, entry: FileEntry) -> str:
        *folders, name = key.split("/")
        problems: dict[str, str | OSError] = {}
        with self._errors(key):
            self._require_root()
            try:
                with open_directory(self._root.joinpath(*folders)) as folder:
                    # One thread: the training needs the others. The path is that of the object here, not in the run.
                    here = Reading(msgspec.structs.replace(entry, path=name))
                    read_checked(folder, [here], threads=1, on_problem=problems.__setitem__)
            except FileNotFoundError:
                return "missing"
            for problem in problems.values():
                if isinstance(problem, FileNotFoundError):
                    return "missing"
                if isinstance(problem, OSError):
                    raise problem
                return problem
        return ""

    def delete(self, key: str) -> None:
        path = self._root / key
        with self._errors(key):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return
            # Durable before the next removal: a crash must not bring a commit record back whose objects are gone.
            fsync_path(path.parent)
            # Remove directories that are empty now; the tier's own prefix may stay.
            for folder in list(path.parents)[: key.count("/") - 1]:
                try:
                    folder.rmdir()
                except OSError:
                    break

    def forget(self, prefix: str, keep: Collection[str] = ()) -> int:
        base = self._root / prefix.rstrip("/")
        with self._errors(prefix):
            try:
                with open_directory(base) as root:
                    parts = [e.path for e in list_tree(root) if e.path.rpartition("/")[2].startswith("~")]
            except FileNotFoundError:
                return 0
            doomed = [base / part for part in parts if not f"{prefix}{part}".startswith(tuple(keep))]
            for path in doomed:
                path.unlink(missing_ok=True)
        return len(doomed)

    @contextmanager
    def _open(self, key: str) -> Iterator[int]:
        """Opens a file; no name below the tier's directory may be a link."""
        with open_directory(self._root) as root, open_below(root, key) as fd:
            yield fd

    def _require_root(self) -> None:
        # Never made: if a disk is not mounted, its mount point would fill the root file system instead.
        if not self._root.is_dir():
            raise TierError(
                "the tier's directory is not there",
                where=f"tier {self._tier}: {self._root}",
                remedy="mount it, or make it, on the node where the job's first process runs",
            )

    def _make_parents(self, key: str) -> None:
        folder = self._root
        for name in key.split("/")[:-1]:
            folder = folder / name
            try:
                info = os.lstat(folder)
            except FileNotFoundError:
                private_dir(folder)
                fsync_path(folder.parent)
                continue
            # Another user's directory, or a link, could be exchanged under what is written there.
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
                raise TierError(
                    "a place in the tier is another user's, or no directory",
                    where=f"tier {self._tier}: {folder}",
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
                "the tier failed",
                where=f"tier {self._tier}: {key}",
                found=error.strerror or error,
                remedy=f"look at the storage behind {self._root}; the next pass goes on where this one ended",
            ) from error


def _info(key: str, info: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key=key, size=info.st_size, stamp=f"{info.st_ino}.{info.st_mtime_ns}")


def _continue(fd: int, source: Source) -> int:
    """Appends what is missing; returns the bytes appended."""
    here = os.fstat(fd).st_size
    # Its bytes are believed for now: `holds` reads all of them back in the end.
    offset = here if here <= source.size else 0
    os.ftruncate(fd, offset)
    began = offset
    while offset < source.size:
        block = memoryview(source.read(offset, min(_BLOCK, source.size - offset)))
        # The source was cut since its size was asked: without this the loop would not end.
        if not block:
            raise OSError(errno.EIO, "the source ended early")
        while block:
            written = os.pwrite(fd, block, offset)
            block, offset = block[written:], offset + written
    return offset - began


def _pread(fd: int, offset: int, size: int) -> bytes:
    parts = []
    while size and (block := os.pread(fd, size, offset)):
        parts.append(block)
        offset, size = offset + len(block), size - len(block)
    return b"".join(parts)
