"""Do these bytes have the digest that a manifest entry says? The one place in `tiers` that knows the algorithm."""

import hashlib
from collections.abc import Iterable

from verl_slurm.checkpoint.digest import hash_fd
from verl_slurm.checkpoint.format import FileEntry

__all__ = ["ContentCheck", "check_blocks", "check_fd"]


class ContentCheck:
    """Takes the bytes of one file in order and says what is wrong with them. Called by: transfer, fetch, backends."""

    def __init__(self, entry: FileEntry) -> None:
        self._entry, self._size, self._digest = entry, 0, hashlib.sha256()

    def update(self, data: bytes) -> None:
        self._size += len(data)
        self._digest.update(data)

    def problem(self) -> str:
        """Empty when all bytes of the entry came, and no others."""
        return _problem(self._entry, self._size, self._digest.hexdigest())


def check_blocks(blocks: Iterable[bytes], entry: FileEntry) -> str:
    """`ContentCheck` of a whole stream."""
    check = ContentCheck(entry)
    for block in blocks:
        check.update(block)
    return check.problem()


def check_fd(fd: int, entry: FileEntry) -> str:
    """The same of an open file, from its medium where the kernel allows that."""
    return _problem(entry, *hash_fd(fd, from_medium=True))


def _problem(entry: FileEntry, size: int, digest: str) -> str:
    if size != entry.size:
        return f"size {size}, expected {entry.size}"
    if digest != entry.sha256:
        return f"sha256 {digest}, expected {entry.sha256}"
    return ""
