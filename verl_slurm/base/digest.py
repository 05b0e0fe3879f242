"""Computes SHA-256 of a stream, and chooses the number of threads for it."""

import hashlib
import os

# 4 MiB: above 1 MiB the speed no longer depends on it (1.7 GB/s a core with SHA extensions).
_BLOCK = 4 << 20


def hash_fd(fd: int) -> tuple[int, str]:
    """Returns size in bytes and SHA-256 (hex) of all that `fd` holds, read from its start. May raise OSError."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    digest = hashlib.sha256()
    size = 0
    buffer = memoryview(bytearray(min(_BLOCK, max(os.fstat(fd).st_size, 4096))))
    while count := os.preadv(fd, [buffer], size):
        digest.update(buffer[:count])
        size += count
    return size, digest.hexdigest()


def num_threads() -> int:
    """Returns the number of hashing threads: the cores we may use, at most 8 (beyond that storage is the limit)."""
    # hashlib releases the interpreter lock for blocks above 2 KiB, so threads use all cores.
    return max(1, min(8, len(os.sched_getaffinity(0))))
