"""Reads the files of a data set and hashes them, and repeats a file that changes while it is read.

Small files go in batches to `small_files`. For files in memory the workers are processes, one per core: 20,000 files of
2 to 8 KiB on 2 cores take 0.137 s with one, 0.077 s with two (0.145 s of CPU, half of it SHA-256 and its output, a
quarter opening and closing). For files on storage they are eight threads, and the files go in the order of their inodes
(on most file systems that is their order on the medium): 0.88 s with two threads, 0.48 s with eight.

All others, large ones and those that changed since the walk, get one task each, the largest first, because the last one
decides the duration.
"""

import os
import resource
import stat
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path

from verl_slurm.base.digest import hash_fd, num_threads
from verl_slurm.dataset.fingerprint import small_files
from verl_slurm.dataset.fingerprint.walk import Line, data_error, line_of, parse_line

# A file that changes this often while it is read is being written to.
_ATTEMPTS = 3
# The answers to two batches fit into a pipe, so a process never waits for us to take them.
_BATCH = 256
# One thread reads this many files first, to see whether storage causes waits.
_PROBE = 64
_THREADS_ON_STORAGE = 8
# A process starts in 10 ms: the time to hash this many files.
_FILES_A_PROCESS = 2000

Digests = dict[str, str]
"""Line → SHA-256 (hex)."""
_Lines = list[str]
_Found = list[tuple[str, str | None]]
_Worker = Callable[[deque[_Lines]], _Found]
"""Takes batches of lines until there are none left."""


def hash_files(root: Path, lines: Iterable[str], *, threads: int | None = None) -> Digests:
    """Reads and hashes the files and links of `lines`.

    Args:
        root: the directory that their paths are relative to.
        lines: of `walk`; no directories.
        threads: or processes that hash; default: one per core, and for small files by the behaviour of the storage.

    Returns:
        A file that changed since the walk has its new line there or, if it is small and of the same size, the old one:
            a second walk after this tells.

    Raises:
        DataError: a file cannot be read, or keeps changing while it is read.
    """
    base = os.path.join(root, "")
    found = {}
    left = []
    for line, digest in _hash_small(base, list(lines), threads):
        if digest is None:
            left.append(parse_line(line))
        else:
            found[line] = digest
    if left:
        left.sort(key=lambda entry: -entry.size)
        with ThreadPoolExecutor(threads or num_threads(), thread_name_prefix="large") as pool:
            found.update(pool.map(lambda entry: _careful(base + entry.path, entry), left))
    return found


def _hash_small(base: str, lines: list[str], threads: int | None) -> Iterable[tuple[str, str | None]]:
    """Returns None for large files, and for those that differ from the walk."""
    # From all over the tree: a part of it may be in memory.
    step = len(lines) // _PROBE + 1
    waits = _voluntary_waits()
    probed = _hash_batch(base, lines[::step])
    waited = _voluntary_waits() - waits > sum(digest is not None for _, digest in probed) // 4
    del lines[::step]
    if not lines:
        return probed
    if waited:
        lines.sort(key=_inode)
        count = threads or _THREADS_ON_STORAGE
    else:
        count = min(threads or num_threads(), 1 + len(lines) // _FILES_A_PROCESS)
    size = max(1, min(_BATCH, len(lines) // (4 * count)))
    batches = deque(lines[at : at + size] for at in range(0, len(lines), size))
    with ExitStack() as stack:
        workers: list[_Worker] = []
        for _ in range(count - 1):
            process = None if waited else stack.enter_context(_process(base))
            workers.append(partial(_work, base) if process is None else partial(_have_done, base, process))
        # Last, because it leaves little of the interpreter to the others: they would begin late.
        workers.append(partial(_work, base))
        pool = stack.enter_context(ThreadPoolExecutor(count, thread_name_prefix="small"))
        return chain(probed, *pool.map(lambda worker: worker(batches), workers))


def _voluntary_waits() -> int:
    """Returns how often this thread gave up its core to wait: for storage, if it only reads.

    Elapsed time is no measure: on a busy machine it tells how busy the machine is.
    """
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _inode(line: str) -> tuple[int, int]:
    _, device, inode, _ = line.split(" ", 3)
    return int(device), int(inode)


def _hash_batch(base: str, lines: _Lines) -> _Found:
    return list(zip(lines, small_files.digests(base, lines), strict=True))


def _taken(batches: deque[_Lines]) -> Iterator[_Lines]:
    """Yields batches that no other thread takes."""
    while True:
        try:
            yield batches.popleft()
        except IndexError:
            return


def _work(base: str, batches: deque[_Lines]) -> _Found:
    found: _Found = []
    for batch in _taken(batches):
        found += _hash_batch(base, batch)
    return found


def _have_done(base: str, process: subprocess.Popen[bytes], batches: deque[_Lines]) -> _Found:
    """Does the work of `_work` in a process; if the process fails, the rest is done here."""
    found: _Found = []
    asked: deque[_Lines] = deque()
    assert process.stdin is not None
    assert process.stdout is not None
    more = _taken(batches)
    try:
        while True:
            # Two at a time: when it has done one, the next is there already.
            for batch in islice(more, 2 - len(asked)):
                asked.append(batch)
                process.stdin.write(small_files.request(batch))
            if not asked:
                return found
            process.stdin.flush()
            answer = process.stdout.read(small_files.answer_bytes(len(asked[0])))
            found += zip(asked[0], small_files.parse_answer(answer, len(asked[0])), strict=True)
            asked.popleft()
    except (OSError, ValueError):
        return found + _work(base, asked) + _work(base, batches)


@contextmanager
def _process(base: str) -> Iterator[subprocess.Popen[bytes] | None]:
    """Yields a process that hashes, or None if none can be started; it ends afterwards."""
    # Isolated and without site: it starts in 10 ms, and nothing in the data's directory is imported.
    argv = [sys.executable, "-I", "-S", "-X", "utf8", os.path.abspath(small_files.__file__)]
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(argv, cwd=base, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
    except OSError:
        yield None
        return
    try:
        yield process
    finally:
        # Killed, not asked: it holds nothing, and may be reading from storage that does not answer.
        process.kill()
        for file in (process.stdin, process.stdout):
            if file:
                with suppress(OSError):
                    file.close()
        process.wait()


def _careful(path: str, entry: Line) -> tuple[str, str]:
    letter = "l" if entry.kind == "link" else "f"
    for _ in range(_ATTEMPTS):
        try:
            # O_NONBLOCK: what was a file in the walk may be a FIFO by now.
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
            raise data_error("a data file cannot be read", path, error.strerror, "a readable file") from error
        line = line_of(letter, after, entry.path)
        # The same stamp before and after, and as many bytes as it says: what was hashed is one state of the file.
        if size == after.st_size and line == line_of(letter, before, entry.path):
            return line, digest
    raise data_error(
        "the data set changes while it is read", path, "another content each time", "files at rest"
    )
