"""Wait for many files at once: one descriptor, no thread, and no processor time while nothing happens.

Watchdog, which follows a single run, has a thread for every path that it watches (and before its version 7 a
descriptor of which a user may have 128): that is no way to watch a thousand runs. Linux only, as Slurm's nodes are.
"""

import ctypes
import errno
import os
import select
import struct
from pathlib import Path
from types import TracebackType

__all__ = ["Watches"]

_MODIFY, _MOVED_TO, _CREATE = 0x2, 0x80, 0x100
_OVERFLOW, _IGNORED = 0x4000, 0x8000
_HEAD = struct.Struct("iIII")
_READ_BYTES = 1 << 16
_LIBC = ctypes.CDLL(None, use_errno=True)


class Watches:
    """Files that grow, and directories that get entries. Called by: submit.fleet_follow."""

    def __init__(self) -> None:
        self._fd = _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise _error("inotify")
        self._paths: dict[int, Path] = {}
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def __enter__(self) -> "Watches":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def add_file(self, path: Path) -> bool:
        """Hear of `path` when it grows; False: there is no such file.

        Raises:
            OSError: no more may be watched (`fs.inotify.max_user_watches`), or permission is missing.
        """
        return self._add(path, _MODIFY)

    def add_directory(self, path: Path) -> bool:
        """Hear of `path` when an entry comes. As `add_file`."""
        return self._add(path, _MOVED_TO | _CREATE)

    def _add(self, path: Path, mask: int) -> bool:
        number = _LIBC.inotify_add_watch(self._fd, os.fsencode(path), mask)
        if number < 0:
            error = _error(path)
            if error.errno == errno.ENOENT:
                return False
            raise error
        self._paths[number] = path
        return True

    def wait(self, timeout_s: float) -> set[Path] | None:
        """The watched paths that something happened to; empty: nothing did for so long.

        Returns:
            None: so much happened that the kernel has not kept count; look at everything.
        """
        if not self._poll.poll(timeout_s * 1000):
            return set()
        changed: set[Path] = set()
        while True:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                return changed
            position = 0
            while position < len(data):
                number, mask, _, length = _HEAD.unpack_from(data, position)
                position += _HEAD.size + length
                if mask & _OVERFLOW:
                    return None
                path = self._paths.get(number)
                if mask & _IGNORED:
                    self._paths.pop(number, None)
                elif path is not None:
                    changed.add(path)


def _error(where: object) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), str(where))
