"""Reads the files of a tree and hashes them: small ones in a process per core (`small_files`), large ones in
threads."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from verl_slurm.base.bounded import TooMuch, open_regular
from verl_slurm.base.files import hash_fd, num_threads
from verl_slurm.dataset.fingerprint import small_files
from verl_slurm.dataset.fingerprint.small_files import NO_DIGEST, RECORD, read_files

# A process starts in 10 ms: the time to hash this many files. 20,000 files of 2 to 8 KiB on 2 cores take 0.137 s with
# one process, 0.077 s with two (0.145 s of CPU, half of it SHA-256 and its output, a quarter opening and closing).
_FILES_A_PROCESS = 2000


Stamp = tuple[int, int, int, int]
"""What the kernel says of a file's content: inode, size in bytes, mtime and ctime in ns since 1970."""


class ListedFile(msgspec.Struct, frozen=True, gc=False):
    """One file as a walk has seen it, in a third of the memory that the kernel's answer takes in Python."""

    stamp: Stamp
    device: int
    is_link: bool


class Hashed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One file as it was read."""

    stamp: Stamp
    """Before it was read, but for the size, which is the number of bytes that were read."""
    sha256: str
    """In hex."""
    mode: int

    @property
    def size(self) -> int:
        return self.stamp[1]


def stamp_of(info: os.stat_result) -> Stamp:
    """Returns the part of `info` that changes with the content."""
    return info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def hash_files(root: Path, names: Sequence[str], *, follow: bool = True) -> dict[str, Hashed]:
    """Reads and hashes files below `root`. Returns them by name, without those that are gone or no regular files.

    Args:
        follow: links are followed; False: they are left out.

    Raises:
        OSError: a file cannot be read; `filename` is its path.
    """
    base = os.path.join(root, "")
    count = min(num_threads(), 1 + len(names) // _FILES_A_PROCESS)
    # Dealt in turns: neighbours have like sizes, and lie in the same folders.
    shares = [list(names[at::count]) for at in range(count)]
    found: dict[str, Hashed] = {}
    left: list[tuple[int, str]] = []
    with ExitStack() as stack:
        answers = [stack.enter_context(_process(base, share, follow)) for share in shares[1:]]
        parts = [read_files(base, shares[0], follow=follow), *(answer() for answer in answers)]
    for share, part in zip(shares, parts, strict=True):
        for name, (mode, *stamp, digest) in zip(share, RECORD.iter_unpack(part), strict=True):
            if digest == NO_DIGEST:
                left.append((stamp[1], name))
            else:
                found[name] = Hashed((*stamp,), digest.hex(), mode)
    if left:
        # The largest first, because the last one decides the duration.
        left.sort(reverse=True)
        with ThreadPoolExecutor(num_threads(), thread_name_prefix="large") as pool:
            hashed = pool.map(lambda one: _hash_alone(base + one[1], follow), left)
            found |= {name: one for (_, name), one in zip(left, hashed, strict=True) if one is not None}
    return found


@contextmanager
def _process(base: str, names: list[str], follow: bool) -> Iterator[Callable[[], bytes]]:
    """Starts a process that reads these files; what it yields waits for the records, or reads them here."""
    # Isolated and without site: it starts in 10 ms, and nothing in the data's directory is imported.
    argv = [sys.executable, "-I", "-S", "-X", "utf8", os.path.abspath(small_files.__file__)]
    with ExitStack() as stack:
        # Files, not pipes: neither of the two waits until the other reads.
        asked, answered = (
            stack.enter_context(open(os.memfd_create("verl-slurm-files"), "w+b")) for _ in range(2)
        )
        asked.write(os.fsencode("\0".join(names)))
        asked.seek(0)

        def answer() -> bytes:
            if process is not None and process.wait() == 0:
                answered.seek(0)
                data = answered.read()
                if len(data) == len(names) * RECORD.size:
                    return data
            # The process has failed.
            return read_files(base, names, follow=follow)

        process = None
        try:
            words = ["follow"] if follow else []
            process = subprocess.Popen(
                [*argv, *words], cwd=base, stdin=asked, stdout=answered, stderr=subprocess.DEVNULL
            )
            stack.callback(process.wait)
            # Killed, not asked: it holds nothing, and may be reading from storage that does not answer.
            stack.callback(process.kill)
        except OSError:
            pass
        yield answer


def _hash_alone(path: str, follow: bool) -> Hashed | None:
    """Returns None for one that is gone, or no regular file."""
    try:
        fd = open_regular(path, follow=follow)
    except (FileNotFoundError, NotADirectoryError, TooMuch):
        return None
    try:
        info = os.fstat(fd)
        size, digest = hash_fd(fd)
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(fd)
    return Hashed((info.st_ino, size, info.st_mtime_ns, info.st_ctime_ns), digest, info.st_mode)
