"""A plain read of files: what verifying and loading are compared with. Torch-free."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_BUFFER = 4 << 20


def files_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def read_share(files: Iterable[Path], share: int, shares: int) -> int:
    """Read this share of every file through one warm buffer: nothing is kept, nothing else is done.

    Returns:
        Bytes read.
    """
    buffer = memoryview(bytearray(_BUFFER))
    num_bytes = 0
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            offset, end = size * share // shares, size * (share + 1) // shares
            while offset < end:
                got = os.preadv(fd, [buffer[: min(_BUFFER, end - offset)]], offset)
                if not got:
                    break
                offset += got
                num_bytes += got
        finally:
            os.close(fd)
    return num_bytes


def read_all(files: list[Path], threads: int) -> int:
    """The same with threads, each its share of every file."""
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(lambda share: read_share(files, share, threads), range(threads)))
