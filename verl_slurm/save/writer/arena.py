"""The staging arena: shared memory of a rank that its saver process reads. Torch-free.

Faulted in once, before training begins: the first touch of a page costs more than ten times a copy into one
that is there, and is what most checkpointers make training wait for.
"""

import ctypes
import mmap
import os
from contextlib import suppress

from verl_slurm.base.errors import ConfigError

_MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14
_PAGE = 4096


class Arena:
    """A mapping of anonymous shared memory, of at least `size` bytes.

    `fd` is of an arena that another process made; None: one is made, for the saver to inherit.
    """

    def __init__(self, size: int, *, fd: int | None = None) -> None:
        self.size = max(_PAGE, -(-size // _PAGE) * _PAGE)
        # Anonymous, not a file in /dev/shm: no other user can open it, and the kernel frees it when rank and saver are
        # gone, however they ended.
        self.fd = os.memfd_create("verl-slurm-staging", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, self.size)
        self._map = mmap.mmap(self.fd, self.size)
        self.view = memoryview(self._map)

    def fault_in(self) -> None:
        """Touches every page, now, so that no copy has to. ConfigError: the machine has no memory for it."""
        with suppress(OSError, AttributeError):  # shared memory in huge pages is the machine's to allow
            self._map.madvise(mmap.MADV_HUGEPAGE)
        libc = ctypes.CDLL(None, use_errno=True)
        # By ctypes, which releases the interpreter lock: other threads load models meanwhile.
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        done = libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(self.size), _MADV_POPULATE_WRITE)
        if done == 0:
            return
        number = ctypes.get_errno()
        if number == 22:  # EINVAL: an older kernel
            # One write for each page has the same effect, with the interpreter lock held.
            for at in range(0, self.size, _PAGE):
                self.view[at] = 0
            return
        # Now, at the start. Without this the memory would be missing in the first save, which may be the emergency one.
        raise ConfigError(
            "no memory for the staging arena of checkpoints",
            found=os.strerror(number),
            expected=f"{self.size} bytes of shared memory for each rank",
            remedy="ask for more memory (slurm.mem_mb_per_node), or for more nodes",
        )

    def close(self) -> None:
        """Unmap, if nobody holds a view of it any more; the memory goes with the last process."""
        with suppress(BufferError):
            # A tensor may still view the memory, and mmap refuses to close then. The mapping goes with the process at
            # the latest.
            self.view.release()
            self._map.close()
        os.close(self.fd)
