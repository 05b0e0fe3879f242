"""Waits for many files at once: one descriptor, no thread, and no processor time while nothing happens.

watchdog, which follows a single run, has a thread for every path that it watches: 1,003 threads and 21 MB for 1,000
runs. Sites limit the threads of a user on login nodes.
"""

import os
from pathlib import Path
from types import TracebackType

from inotify_simple import INotify, flags

__all__ = ["Watches"]


class Watches:
    """Watches files that grow, and directories that get entries."""

    def __init__(self) -> None:
        self._inotify = INotify()
        self._paths: dict[int, Path] = {}

    def __enter__(self) -> "Watches":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inotify.close()

    def add_file(self, path: Path) -> bool:
        """Reports `path` from now on when it grows; returns False if there is no such file.

        Raises:
            OSError: no more may be watched (`fs.inotify.max_user_watches`), or permission is missing.
        """
        return self._add(path, flags.MODIFY)

    def add_directory(self, path: Path) -> bool:
        """Reports `path` from now on when an entry is added. As `add_file`."""
        return self._add(path, flags.MOVED_TO | flags.CREATE)

    def _add(self, path: Path, mask: int) -> bool:
        try:
            self._paths[self._inotify.add_watch(path, mask)] = path
        except FileNotFoundError:
            return False
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from None
        return True

    def wait(self, timeout_s: float) -> set[Path] | None:
        """Returns the watched paths that something happened to; empty: nothing did within the time.

        Returns:
            None: the kernel dropped events; look at everything.
        """
        changed: set[Path] = set()
        for event in self._inotify.read(timeout=int(timeout_s * 1000)):
            if event.mask & flags.Q_OVERFLOW:
                return None
            path = self._paths.get(event.wd)
            if event.mask & flags.IGNORED:
                self._paths.pop(event.wd, None)
            elif path is not None:
                changed.add(path)
        return changed
