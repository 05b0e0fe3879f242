"""Reads files in chunks of 4 MiB, fast and checked, and computes their digests. All tensor data is read here.

A file of one chunk has the SHA-256 of its content as its digest. A larger file has the SHA-256 of its chunks' SHA-256
digests (32 bytes each), concatenated. So all cores can hash one file, chunks are checked in any order, a part of a file
is checked without the rest, and damage is located.
"""

import bisect
import ctypes
import errno
import fcntl
import hashlib
import itertools
import mmap
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import msgspec

from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.base.files import num_threads
from verl_slurm.base.tree import open_below
from verl_slurm.checkpoint.format.encryption import TAG_BYTES, ChunkOpener
from verl_slurm.checkpoint.format.specification import CHUNK_BYTES, FileEntry
from verl_slurm.checkpoint.hashing import FEWEST, LANES, Hasher, hashlib_of, process_hasher

_HUGE_PAGE = 2 << 20

OnProblem = Callable[[str, "str | OSError"], None]


def leaf_count(size: int) -> int:
    """Returns the number of chunks of a file of `size` bytes; an empty file has one, of no bytes."""
    return max(1, -(-size // CHUNK_BYTES))


def combine(leaves: Sequence[bytes]) -> str:
    """Returns a file's digest (hex) from the SHA-256 of each of its chunks, in order."""
    return (leaves[0] if len(leaves) == 1 else hashlib.sha256(b"".join(leaves)).digest()).hex()


def leaf_problem(entry: FileEntry) -> str | None:
    """Returns why the leaves of `entry` contradict its size or digest, or None."""
    count = leaf_count(entry.size)
    # One chunk has no leaves: its digest is the file's own.
    if len(entry.leaves) != (count if count > 1 else 0):
        return f"{len(entry.leaves)} chunk digests for {entry.size} bytes"
    if entry.leaves and combine([bytes.fromhex(leaf) for leaf in entry.leaves]) != entry.sha256:
        return "the chunk digests do not make the file's"
    return None


def hash_file(fd: int, path: str) -> FileEntry:
    """Returns the entry of a file as it reads now; uses one thread."""
    buffer = memoryview(bytearray(min(CHUNK_BYTES, max(1, os.fstat(fd).st_size))))
    leaves: list[bytes] = []
    size = 0
    while True:
        filled = 0
        while filled < len(buffer) and (count := os.preadv(fd, [buffer[filled:]], size + filled)):
            filled += count
        if filled or not leaves:
            leaves.append(hashlib.sha256(buffer[:filled]).digest())
        size += filled
        if filled < CHUNK_BYTES:
            break
    return make_entry(path, size, leaves)


def entry_of(path: str, data: bytes) -> FileEntry:
    """Returns the entry of a file with the content `data`."""
    view = memoryview(data)
    starts = range(0, max(1, len(data)), CHUNK_BYTES)
    leaves = [hashlib.sha256(view[start : start + CHUNK_BYTES]).digest() for start in starts]
    return make_entry(path, len(data), leaves)


def make_entry(path: str, size: int, leaves: Sequence[bytes], plain_size: int | None = None) -> FileEntry:
    """Builds the manifest's entry of a file from its chunks' digests; `plain_size` if it is encrypted."""
    several = tuple(leaf.hex() for leaf in leaves) if len(leaves) > 1 else ()
    plain = msgspec.UNSET if plain_size is None else plain_size
    return FileEntry(path=path, size=size, sha256=combine(leaves), leaves=several, plain_size=plain)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A range of a file, in bytes, and the target address in memory."""

    offset: int
    length: int
    address: int


@dataclass(frozen=True)
class Reading:
    """One file to read.

    Attributes:
        wanted: ranges, sorted by offset, without overlap: only chunks that they touch are read. None: all, not copied.
        opener: for an encrypted file that is to be decrypted: `wanted` is of the plain bytes then.
    """

    entry: FileEntry
    wanted: Sequence[Wanted] | None = None
    opener: ChunkOpener | None = None


@dataclass
class _Open:
    """A file that several threads are reading."""

    reading: Reading
    fd: int
    chunks: Sequence[int]
    direct: bool
    left: int
    closing: ExitStack
    tags: bytes
    failed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def expected(self, chunk: int) -> str:
        entry = self.reading.entry
        return entry.leaves[chunk] if entry.leaves else entry.sha256


@dataclass
class _Chunk:
    file: _Open
    number: int
    buffer: "_Buffer"

    @property
    def start(self) -> int:
        return self.number * CHUNK_BYTES

    @property
    def length(self) -> int:
        return min(CHUNK_BYTES, self.file.reading.entry.size - self.start)


def read_checked(
    root: int,
    readings: Sequence[Reading],
    *,
    threads: int | None = None,
    on_problem: OnProblem,
    from_medium: bool = True,
    bytes_per_s: float | None = None,
    hasher: Hasher | None = None,
) -> int:
    """Reads chunks of files below `root`, checks each, and copies the wanted ranges to their targets.

    A chunk is copied after its digest was found right. At the first fault of a file the rest of that file is skipped;
    the other files are still read. Returns the bytes read.

    Args:
        root: descriptor of the checkpoint's directory.
        threads: each with a buffer of 4 MiB; waiting chunks add up to 128 MiB. Default: 2 per core.
        on_problem: called with the path and its fault, or the error; from any thread, one at a time.
        from_medium: bypass the page cache where possible.
        bytes_per_s: one thread, which pauses so as to read no faster; None: no limit.
    """
    # Two per core: the disk has work while the cores have (on 2 cores 1.14 × a plain read; one per core: 1.81 ×).
    threads = 1 if bytes_per_s else threads or 2 * num_threads()
    if hasher is None:
        few = sum(reading.entry.size for reading in readings) < FEWEST * CHUNK_BYTES
        hasher = Hasher() if few else process_hasher(reading=True)
    return _Work(root, readings, threads, on_problem, from_medium, bytes_per_s, hasher).on_threads()


class _Work:
    """State that the threads share: chunks to read, file by file, and chunks that wait to be hashed."""

    def __init__(
        self,
        root: int,
        readings: Sequence[Reading],
        threads: int,
        on_problem: OnProblem,
        from_medium: bool,
        bytes_per_s: float | None,
        hasher: Hasher,
    ) -> None:
        self._root, self._on_problem, self._from_medium = root, on_problem, from_medium
        self._bytes_per_s, self._started = bytes_per_s, time.monotonic()
        self._threads, self._hasher = threads, hasher
        self._lock, self._said = threading.Lock(), threading.Lock()
        # Largest file first: the thread that ends last decides the duration.
        self._queue = self._jobs(sorted(readings, key=lambda reading: -reading.entry.size))
        self._waiting: list[_Chunk] = []
        self._at_once = hasher.at_once
        # Two batches can be hashed while every thread reads. More than LANES - 1 buffers are needed, or all threads
        # could wait in vain.
        self._buffers: queue.LifoQueue[_Buffer | None] = queue.LifoQueue()
        for _ in range(threads + (2 * LANES if self._at_once > 1 else 0)):
            self._buffers.put(None)  # allocated on first use; a used one is taken first

    def on_threads(self) -> int:
        with ThreadPoolExecutor(max_workers=self._threads, thread_name_prefix="read") as pool:
            done = []
            # This thread reads, too, in case the machine has no other to spare: unread chunks are not known to be
            # whole.
            with suppress(RuntimeError):
                for _ in range(self._threads):
                    done.append(pool.submit(self._run))  # noqa: PERF401 - those before the one that fails count
            mine = 0 if len(done) == self._threads else self._run()
            num_bytes = mine + sum(future.result() for future in done)
        if self._waiting:
            raise RuntimeError(f"{len(self._waiting)} chunks were read and not checked")
        return num_bytes

    def _run(self) -> int:
        num_bytes = 0
        while (chunk := self._next()) is not None:
            try:
                num_bytes += self._fill(chunk)
                self._pause(num_bytes)
            except BaseException:
                # Without its buffer the other threads could wait for ever.
                self._release(chunk)
                raise
            self._check(self._batch(chunk))
        while batch := self._batch():
            self._check(batch)
        return num_bytes

    def _next(self) -> _Chunk | None:
        with self._lock:
            # A file is opened when its first chunk is taken, so few are open at a time.
            job = next(self._queue, None)
        # Waits outside the lock: `_batch` takes it before a buffer is freed.
        return None if job is None else _Chunk(*job, self._buffers.get() or _Buffer())

    def _batch(self, chunk: _Chunk | None = None) -> list[_Chunk]:
        """Returns the chunks to check after `chunk` was read. Without a chunk: the remaining ones, none at the end."""
        with self._lock:
            waiting = self._waiting
            if chunk is not None:
                # Nothing of these is hashed, so they wait for no batch.
                if chunk.file.failed or chunk.file.reading.opener is not None:
                    return [chunk]
                waiting.append(chunk)
                if len(waiting) < self._at_once:
                    return []
            batch = waiting[:LANES] if len(waiting) >= FEWEST else waiting[:1]
            del waiting[: len(batch)]
            return batch

    def _release(self, chunk: _Chunk) -> None:
        self._buffers.put(chunk.buffer)
        with chunk.file.lock:
            chunk.file.left -= 1
            last = not chunk.file.left
        # Chunks come back in any order, from any thread: whoever brings the last one closes the file.
        if last:
            chunk.file.closing.close()

    def _pause(self, num_bytes: int) -> None:
        if self._bytes_per_s:  # only elapsed time can show a speed limit
            time.sleep(max(0.0, self._started + num_bytes / self._bytes_per_s - time.monotonic()))

    def _jobs(self, readings: Sequence[Reading]) -> Iterator[tuple[_Open, int]]:
        for reading in readings:
            try:
                file = self._open(reading)
            except OSError as error:
                # One file that does not open keeps no other from being read.
                self._say(reading.entry.path, error)
                continue
            if file is not None:
                for chunk in file.chunks:
                    yield file, chunk

    def _open(self, reading: Reading) -> _Open | None:
        entry = reading.entry
        chunks = _touched(reading)
        if not chunks:
            return None
        closing = ExitStack()
        try:
            fd = closing.enter_context(open_below(self._root, entry.path))
            # Asked of the descriptor: the name may lead elsewhere by now.
            problem = _unlike(os.fstat(fd), entry)
            if problem is None:
                tags = _tags(fd, reading)
                # Direct: the check covers what the medium holds, and the memory stays with the training. Small files
                # are not worth it: each direct read costs a whole round trip to the medium.
                direct = self._from_medium and entry.size >= _HUGE_PAGE and _go_direct(fd)
                if self._from_medium and not direct:
                    # Clean pages go, or the check would see the cache.
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                return _Open(reading, fd, chunks, direct, len(chunks), closing, tags)
        except BaseException:
            closing.close()
            raise
        closing.close()
        self._say(entry.path, problem)
        return None

    def _fill(self, chunk: _Chunk) -> int:
        file, entry = chunk.file, chunk.file.reading.entry
        if file.failed:
            return 0
        try:
            count = _read(file, chunk.start, chunk.length, chunk.buffer.view)
        except OSError as error:
            self._fail(file, error)
            return 0
        if count != chunk.length:
            self._fail(file, f"size {chunk.start + count}, expected {entry.size}")
        return count

    def _check(self, batch: Sequence[_Chunk]) -> None:
        try:
            good = [chunk for chunk in batch if not chunk.file.failed]
            if good and good[0].file.reading.opener is not None:
                # By its tag, which proves more than the digest.
                self._open_chunk(good[0], good[0].file.reading.opener)
                return
            pieces = [chunk.buffer.view[: chunk.length] for chunk in good]
            digests = self._hasher.digests(pieces)
            for chunk, piece, digest in zip(good, pieces, digests, strict=True):
                self._compare(chunk, piece, digest)
        finally:
            # After an error, too: other threads may be waiting for these buffers.
            for chunk in batch:
                self._release(chunk)

    def _compare(self, chunk: _Chunk, piece: memoryview, digest: bytes) -> None:
        expected = chunk.file.expected(chunk.number)
        if digest.hex() != expected:
            # A wrong digest of the fast hasher must condemn no good chunk.
            digest = hashlib_of(piece, digest)
        if digest.hex() == expected:
            self._hand_out(chunk, chunk.buffer.address)
            return
        entry, start = chunk.file.reading.entry, chunk.start
        place = f" in bytes {start} to {start + chunk.length}" if entry.leaves else ""
        self._fail(chunk.file, f"sha256 {digest.hex()}, expected {expected}{place}")

    def _open_chunk(self, chunk: _Chunk, opener: ChunkOpener) -> None:
        file, length = chunk.file, opener.length(chunk.number)
        # Into a second buffer: the target must stay unchanged if a chunk does not open.
        plain = chunk.buffer.beside()
        tag = file.tags[chunk.number * TAG_BYTES : (chunk.number + 1) * TAG_BYTES]
        try:
            opener.open_into(chunk.number, chunk.buffer.view[:length], tag, plain.view[:length])
        except CheckpointCorrupt as error:
            self._fail(file, f"{error.where} is not what was encrypted there")
            return
        self._hand_out(chunk, plain.address, length)

    def _hand_out(self, chunk: _Chunk, address: int, length: int | None = None) -> None:
        """Copies the wanted parts of a chunk whose bytes are at `address`; `length`: plain bytes, if encrypted."""
        wanted, start = chunk.file.reading.wanted or (), chunk.start
        end = start + (chunk.length if length is None else length)
        # Ranges do not overlap, so their ends are sorted as well.
        first = bisect.bisect_right(wanted, start, key=lambda w: w.offset + w.length)
        for w in itertools.islice(wanted, first, None):
            if w.offset >= end:
                return
            low, high = max(start, w.offset), min(end, w.offset + w.length)
            # ctypes releases the interpreter lock, so other threads go on meanwhile.
            ctypes.memmove(w.address + low - w.offset, address + low - start, high - low)

    def _fail(self, file: _Open, what: "str | OSError") -> None:
        with file.lock:
            first, file.failed = not file.failed, True
        if first:
            self._say(file.reading.entry.path, what)

    def _say(self, path: str, what: "str | OSError") -> None:
        with self._said:
            self._on_problem(path, what)


def _unlike(info: os.stat_result, entry: FileEntry) -> str | None:
    """Returns why the opened file cannot be the one of `entry`."""
    if not stat.S_ISREG(info.st_mode):
        return "is not a regular file"
    if info.st_size != entry.size:
        return f"size {info.st_size}, expected {entry.size}"
    return leaf_problem(entry)


class _Buffer:
    """4 MiB, aligned, in huge pages if available."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, CHUNK_BYTES + _HUGE_PAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        at = -base % _HUGE_PAGE
        with suppress(OSError, AttributeError):  # without kernel support, small pages suffice
            # The kernel then needs few segments for a read.
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)[at : at + CHUNK_BYTES]
        self.address = base + at
        self._beside: _Buffer | None = None

    def beside(self) -> "_Buffer":
        """Returns the second buffer, which its first use allocates."""
        if self._beside is None:
            self._beside = _Buffer()
        return self._beside


def _tags(fd: int, reading: Reading) -> bytes:
    """Reads all tags of an encrypted file at once (`encryption.py`, section 3): 4 for a million bytes."""
    opener = reading.opener
    if opener is None:
        return b""
    tags, wanted = b"", TAG_BYTES * opener.num_chunks
    while len(tags) < wanted:
        more = os.pread(fd, wanted - len(tags), opener.plain_size + len(tags))
        if not more:
            raise OSError(errno.EIO, "the file was cut while it was read", reading.entry.path)
        tags += more
    return tags


def _touched(reading: Reading) -> Sequence[int]:
    if reading.wanted is None:
        return range(leaf_count(reading.entry.size))
    chunks: set[int] = set()
    for wanted in reading.wanted:
        if wanted.length:
            last = (wanted.offset + wanted.length - 1) // CHUNK_BYTES
            chunks.update(range(wanted.offset // CHUNK_BYTES, last + 1))
    return sorted(chunks)


def _go_direct(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


def _read(file: _Open, start: int, length: int, buffer: memoryview) -> int:
    """Reads up to a whole chunk at `start`; less only at the file's end."""
    count = 0
    while count < length:
        # The length is rounded up to the alignment: a direct read of an odd length is refused.
        piece = buffer[count : count + (length - count + 4095) // 4096 * 4096]
        try:
            got = os.preadv(file.fd, [piece], start + count)
        except OSError as error:
            # Some file systems accept the flag and then refuse the read, or our alignment.
            if error.errno != errno.EINVAL or not file.direct:
                raise
            fcntl.fcntl(file.fd, fcntl.F_SETFL, fcntl.fcntl(file.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            file.direct = False
            continue
        if not got:
            break
        count += got
        if file.direct and count < length and count % 4096:
            break  # a direct read is short at the end of the file
    return min(count, length)
