"""The control page: an agent asks all ranks of its node for a save, at the cost of one memory read.

The page is a file of one page, mapped by the agent (writer) and its ranks (readers). Its layout has native byte order
and aligned 8-byte fields, so that a store is seen whole or not at all on x86-64 and aarch64:

```
offset 0   magic        b"VSPAGE01"
       8   request_id   0: nothing asked. Grows by one a request; written LAST.
      16   stop         1: leave after the save. 0: go on.
      24   deadline_ns  CLOCK_MONOTONIC of this node; 0: none
```

A newer request replaces an older one: a rank that saw request 2 has nothing left to do for request 1. A deadline is
stored as a moment and read as the seconds left until then, because both sides share this node's clock.
"""

import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

from verl_slurm.base.errors import WireError
from verl_slurm.base.files import open_new
from verl_slurm.wire.messages import SaveRequest

PAGE_NAME = "page"
_MAGIC = b"VSPAGE01"
_SIZE = 4096
_WORD = struct.Struct("=Q")
_REQUEST_ID, _STOP, _DEADLINE = 8, 16, 24


class ControlPage:
    """Maps one page: an agent creates it and posts, its ranks open it and read."""

    def __init__(self, memory: mmap.mmap, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._memory, self._clock_ns = memory, clock_ns

    @classmethod
    def create(cls, path: Path) -> "ControlPage":
        """Makes a fresh page, 0600, in a directory that only our user can enter."""
        fd = open_new(path)
        try:
            os.ftruncate(fd, _SIZE)
            memory = mmap.mmap(fd, _SIZE)
        finally:
            os.close(fd)
        memory[:8] = _MAGIC
        return cls(memory)

    @classmethod
    def open(cls, path: Path) -> "ControlPage":
        """Maps an agent's page for reading."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            info = os.fstat(fd)
            # Asked of the descriptor, so that what is judged is what is mapped: another user's page could ask ranks for
            # saves.
            if info.st_size != _SIZE or info.st_uid != os.geteuid():
                found = f"{info.st_size} bytes of uid {info.st_uid}"
                expected = f"{_SIZE} bytes of uid {os.geteuid()}"
                raise WireError("not a control page of ours", where=path, found=found, expected=expected)
            # For reading alone: no bug of a rank writes into what all ranks of the node read.
            memory = mmap.mmap(fd, _SIZE, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        if memory[:8] != _MAGIC:
            raise WireError("not a control page", where=path, found=memory[:8], expected=_MAGIC)
        return cls(memory)

    def post(self, request: SaveRequest) -> None:
        """Posts a request, in the place of the former one."""
        left = request.seconds_left
        # 0 also means "no deadline": leads wrote it so before `seconds_left` could be None.
        deadline_ns = self._clock_ns() + int(left * 1e9) if left is not None and left > 0 else 0
        # The id last: a reader that sees it also sees the rest.
        _WORD.pack_into(self._memory, _STOP, int(request.stop))
        _WORD.pack_into(self._memory, _DEADLINE, deadline_ns)
        _WORD.pack_into(self._memory, _REQUEST_ID, request.request_id)

    def request_id(self) -> int:
        """Returns the request's id by one aligned read. Ranks poll it."""
        return int(_WORD.unpack_from(self._memory, _REQUEST_ID)[0])

    def request(self) -> SaveRequest | None:
        """Returns the newest request, or None if there was none. After its deadline `seconds_left` is negative."""
        request_id = self.request_id()
        if request_id == 0:
            return None
        stop = _WORD.unpack_from(self._memory, _STOP)[0] != 0
        deadline_ns = int(_WORD.unpack_from(self._memory, _DEADLINE)[0])
        left = (deadline_ns - self._clock_ns()) / 1e9 if deadline_ns else None
        return SaveRequest(request_id=request_id, stop=stop, seconds_left=left)

    def close(self) -> None:
        self._memory.close()
