"""Bytes of memory to files: large aligned writes past the page cache, fsynced, hashed meanwhile.

One thread a directory writes, others hash; all of them let go of the interpreter lock while they work. The
source is read by all and written by none.
"""

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import msgspec

from verl_slurm.base.files import make_private, open_new
from verl_slurm.base.tree import open_directory
from verl_slurm.checkpoint.format.specification import CHUNK_BYTES, FileEntry
from verl_slurm.checkpoint.hashing import Hasher, process_hasher
from verl_slurm.checkpoint.store.chunks import leaf_count, make_entry
from verl_slurm.save.writer.file_sealing import SealedFiles, SealedReader
from verl_slurm.save.writer.protocol import ArenaFile, Written

# One request of this size keeps a disk or server busy; larger ones gain nothing (measured: 1 to 64 MiB alike).
_BLOCK_BYTES = 16 << 20


def write_and_hash(
    source: memoryview,
    files: Sequence[ArenaFile],
    directories: Sequence[str],
    *,
    hashers: int = 1,
    hasher: Hasher | None = None,
    sealed: SealedFiles | None = None,
    on_done: Callable[[Written], None] = lambda _: None,
) -> tuple[tuple[FileEntry, ...], tuple[Written, ...]]:
    """Writes every file below every directory, and hashes each once.

    Args:
        source: the arena; page-aligned.
        directories: made where they are missing.
        hashers: threads that hash; of sealed files, that seal and hash for each directory.
        sealed: these files; then what it seals is what is written and hashed, chunk by chunk.
        on_done: told of each directory as soon as it is done and everything is hashed, from this thread.

    Returns:
        The entries, and for each directory whether all files in it, and their folders, are durable.
    """
    # A thread for each directory and each hasher, so that no job waits for another's thread.
    with ThreadPoolExecutor(max_workers=len(directories) + hashers, thread_name_prefix="save") as pool:
        writing = [
            pool.submit(_write_all, sealed.reader(hashers) if sealed else _Plain(source), files, directory)
            for directory in directories
        ]
        entries: tuple[FileEntry, ...] = (
            () if sealed else _hash_all(source, files, pool, hashers, hasher or process_hasher())
        )
        answers: dict[str, Written] = {}
        # In the order in which they are done: a medium is answered for while the other still writes. Hashing comes
        # first, since an answer carries the entries.
        for done in as_completed(writing):
            entries = entries or (sealed.entries() if sealed else ())
            answer = msgspec.structs.replace(done.result(), files=entries)
            answers[answer.directory] = answer
            on_done(answer)
        return entries, tuple(answers[directory] for directory in directories)


def _hash_all(
    source: memoryview, files: Sequence[ArenaFile], pool: ThreadPoolExecutor, hashers: int, hasher: Hasher
) -> tuple[FileEntry, ...]:
    chunks = [(file, chunk) for file in files for chunk in range(leaf_count(file.size))]
    # Whole chunks first: a batch takes as long as its longest chunk.
    chunks.sort(key=lambda job: job[0].size < (job[1] + 1) * CHUNK_BYTES)

    leaves = {file.path: [b""] * leaf_count(file.size) for file in files}
    work = iter(hasher.batches(chunks))
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                batch = next(work, None)
            if batch is None:
                return
            starts = [(file.at + chunk * CHUNK_BYTES, file.at + file.size) for file, chunk in batch]
            pieces = [source[start : min(start + CHUNK_BYTES, end)] for start, end in starts]
            for (file, chunk), digest in zip(batch, hasher.digests(pieces), strict=True):
                leaves[file.path][chunk] = digest

    for done in [pool.submit(run) for _ in range(hashers)]:
        done.result()
    return tuple(make_entry(file.path, file.size, leaves[file.path]) for file in files)


class _Plain:
    """The arena's bytes as they are."""

    def __init__(self, source: memoryview) -> None:
        self._source = source

    def size(self, file: ArenaFile) -> int:
        return file.size

    def blocks(self, file: ArenaFile) -> Iterable[tuple[int, memoryview]]:
        return ((0, self._source[file.at : file.at + file.size]),)

    def close(self) -> None:
        """Nothing is kept."""


def _write_all(content: _Plain | SealedReader, files: Sequence[ArenaFile], directory: str) -> Written:
    """The answer for one directory, without the entries: they are hashed meanwhile."""
    try:
        with closing(content):
            direct = write_files(
                directory, ((file.path, content.size(file), content.blocks(file)) for file in files)
            )
    # The answer for this directory. Another medium's thread is not touched by it.
    except OSError as error:
        # Plain text: the exception does not travel, and a path may hold characters that JSON has not.
        words = ": ".join(str(part) for part in (error.strerror or error, error.filename) if part)
        return Written(directory=directory, error=words, errno=error.errno)
    return Written(directory=directory, direct=direct)


def write_small(directory: Path, files: Mapping[str, bytes]) -> None:
    """Writes files by path, durably, as `write_files`."""
    write_files(str(directory), ((path, len(data), [(0, memoryview(data))]) for path, data in files.items()))


def write_files(directory: str, files: Iterable[tuple[str, int, Iterable[tuple[int, memoryview]]]]) -> bool:
    """Makes new files durable below a directory; returns whether all of it went past the page cache.

    `files`: of each the path, its bytes in the end, and blocks of it with their places.
    OSError: the medium refuses, or a file is there already.
    """
    direct = True
    with _made(directory) as root, ExitStack() as opened:
        folders: dict[str, int] = {}
        written: list[int] = []
        for path, size, blocks in files:
            folder, _, name = path.rpartition("/")
            # A folder is opened once and kept: its descriptor is synced below, and a path could lead elsewhere by
            # then.
            if folder not in folders:
                folders[folder] = opened.enter_context(_folder(root, folder))
            fd = opened.enter_context(_new_file(folders[folder], name))
            direct = _write_one(fd, name, blocks, size) and direct
            written.append(fd)
        # Not after each file: the disk would stand still in between.
        for fd in written:
            os.fsync(fd)  # noqa: TID251 - all files first, then all folders
            # After the fsync, since dirty pages are not dropped. The cache is then free for the training, and a
            # read-back comes from the medium.
            if not direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        # Entries after their files' bytes, and the staging directory last.
        for fd in folders.values():
            os.fsync(fd)  # noqa: TID251 - by descriptor
        os.fsync(root)  # noqa: TID251 - by descriptor
    return direct


@contextmanager
def _made(directory: str) -> Iterator[int]:
    """A descriptor of a directory. Made here, where its storage can hold up nobody else, unless it is there."""
    # The rank's thread makes the same directory, whichever is first.
    make_private(Path(directory))
    with open_directory(directory) as fd:
        yield fd


@contextmanager
def _folder(root: int, name: str) -> Iterator[int]:
    """A descriptor of a folder below `root`, made where it is missing; empty: `root` itself."""
    with ExitStack() as opened:
        at = root
        for part in name.split("/") if name else []:
            with suppress(FileExistsError):  # another rank was first, or an earlier file of ours
                # Below a descriptor: with paths, a folder exchanged by a link would take the files elsewhere.
                os.mkdir(part, 0o700, dir_fd=at)
            at = opened.enter_context(open_directory(part, below=at))
        yield at


@contextmanager
def _new_file(folder: int, name: str) -> Iterator[int]:
    """A descriptor of a new file; its closing may fail, and that counts: NFS tells of a failed write there."""
    fd = open_new(name, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)


def _write_one(fd: int, name: str, blocks: Iterable[tuple[int, memoryview]], size: int) -> bool:
    """Write each block where it belongs, and cut to `size`; returns whether it went past the page cache."""
    # Past the page cache: pages of the model's size would push out the training's data, and the fsync would have all of
    # it to write at once.
    direct = _set_direct(fd, True)
    end = 0
    for start, data in blocks:
        direct = _write_block(fd, name, data, start, direct)
        end = start + len(data)
    # Direct writes are whole pages, so the last block may be longer than the file.
    if end != size:
        os.ftruncate(fd, size)
    return direct


def _write_block(fd: int, name: str, data: memoryview, start: int, direct: bool) -> bool:
    """Write all of `data` at `start`; returns whether writes still go past the page cache."""
    at = 0
    while at < len(data):
        try:
            count = os.pwrite(fd, data[at : at + _BLOCK_BYTES], start + at)
        except OSError as error:
            # Some file systems take the flag and refuse the write, or our alignment. Cached writes still work there, so
            # the save goes on.
            if error.errno != errno.EINVAL or not direct:
                raise
            direct = _set_direct(fd, False)
            continue
        if not count:
            # Otherwise this loop would not end.
            raise OSError(errno.EIO, "a write of nothing", name)
        at += count
        if direct and (start + at) % 4096:
            # A short write (a quota, a full disk): what follows would not be aligned.
            direct = _set_direct(fd, False)
    return direct


def _set_direct(fd: int, on: bool) -> bool:
    """Ask for direct writes, or for cached ones; returns what holds now."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        # No O_DIRECT here (tmpfs, some network file systems): cached writes, with an fsync after them, are as durable.
        return False
    return on
