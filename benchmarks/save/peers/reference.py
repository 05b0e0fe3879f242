"""What the machine itself takes for the same bytes: a copy into warm shared memory, a raw write with fsync."""

import mmap
import os
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.save.peers.base import Peer
from benchmarks.save.workload import Workload

_PAGE = 4096
_CHUNK = 16 << 20
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; Python's mmap has no name for it


class Copy(Peer):
    """One copy of every tensor into memory that is shared and has been faulted in before."""

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        self._memory: mmap.mmap | None = None

    def open(self, directories: tuple[Path, ...]) -> None:
        tensors = self.work.locals().values()
        size = -(-sum(tensor.nbytes + 64 for tensor in tensors) // _PAGE) * _PAGE
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        try:
            self._memory.madvise(mmap.MADV_HUGEPAGE)
            self._memory.madvise(_MADV_POPULATE_WRITE)
        except OSError:  # an older kernel: touch it by hand
            for offset in range(0, size, _PAGE):
                self._memory[offset] = 0
        flat = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._views, offset = [], 0
        for tensor in tensors:
            view = flat[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self._views.append(view)
            offset += -(-tensor.nbytes // 64) * 64
        self.save(())

    def save(self, directories: tuple[Path, ...]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._views, list(self.work.locals().values()))


class Raw(Copy):
    """The bytes, already in memory, written in large pieces past the page cache where that is possible.

    With two directories: both at once, from the same bytes.
    """

    def save(self, directories: tuple[Path, ...]) -> None:
        self._directories = directories  # nothing to wait for: the bytes lie ready

    def wait(self) -> None:
        paths = [directory / f"raw_{dist.get_rank()}" for directory in self._directories]
        threads = [threading.Thread(target=self._write, args=(path,)) for path in paths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        dist.barrier()

    def _write(self, path: Path) -> None:
        assert self._memory is not None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:  # this file system knows no direct I/O, and may have made the file before it said so
            fd = os.open(path, flags & ~os.O_EXCL, 0o600)
        view = memoryview(self._memory)
        try:
            for offset in range(0, len(view), _CHUNK):
                os.pwrite(fd, view[offset : offset + _CHUNK], offset)
            os.fsync(fd)
        finally:
            os.close(fd)
