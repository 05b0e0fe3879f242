"""Tells whether a stream of bytes has the digest in its manifest entry.

The digest is that of `checkpoint.store.chunks`: of the content, or of its 4 MiB chunks' digests.
"""

import hashlib
from collections.abc import Iterable

from verl_slurm.checkpoint.format.specification import CHUNK_BYTES, FileEntry
from verl_slurm.checkpoint.store.chunks import leaf_count, leaf_problem


class ContentCheck:
    """Takes the bytes of one file in order, in blocks of any size, and reports their faults."""

    def __init__(self, entry: FileEntry) -> None:
        self._entry, self._size, self._chunk = entry, 0, 0
        self._hash = hashlib.sha256()
        self._problem = leaf_problem(entry) or ""

    def update(self, data: bytes) -> str:
        """Returns the fault so far; empty if there is none."""
        view = memoryview(data)
        while view and not self._problem:
            room = CHUNK_BYTES - self._size % CHUNK_BYTES
            # Blocks are cut at the borders of chunks, whatever their size.
            self._hash.update(view[:room])
            self._size += len(view[:room])
            view = view[room:]
            # A server may send without end: the first byte too many ends it.
            if self._size > self._entry.size:
                self._problem = f"more than the expected {self._entry.size} bytes"
            elif self._size % CHUNK_BYTES == 0 or self._size == self._entry.size:
                self._end_of_chunk()
        return self._problem

    def problem(self) -> str:
        """Returns an empty text when all bytes of the entry came, and no others; otherwise the fault."""
        if not self._problem and self._size != self._entry.size:
            return f"size {self._size}, expected {self._entry.size}"
        if not self._problem and self._chunk < leaf_count(self._entry.size):
            self._end_of_chunk()  # a file without bytes
        return self._problem

    def _end_of_chunk(self) -> None:
        leaves = self._entry.leaves
        expected = leaves[self._chunk] if leaves else self._entry.sha256
        # The first wrong chunk ends the check: a damaged terabyte is fetched only up to the damage.
        found = self._hash.hexdigest()
        if found != expected:
            place = f" in the chunk at byte {self._chunk * CHUNK_BYTES}" if leaves else ""
            self._problem = f"sha256 {found}, expected {expected}{place}"
        self._chunk += 1
        self._hash = hashlib.sha256()


def check_blocks(blocks: Iterable[bytes], entry: FileEntry) -> str:
    """Runs `ContentCheck` on a whole stream; stops at the first chunk that is wrong."""
    check = ContentCheck(entry)
    for block in blocks:
        if problem := check.update(block):
            return problem
    return check.problem()
