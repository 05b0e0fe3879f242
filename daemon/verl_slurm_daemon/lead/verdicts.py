"""Remembers which checkpoints were found good in this attempt, so that a restart in place need not read them again.

Our own ranks check each byte that they load as well. So a disk that has lost a bit since is found by them; and the next
restart reads everything, because a verdict is used once. A guest's loop checks nothing: its checkpoints are read.
"""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from verl_slurm.base.keys import Keyring
from verl_slurm.checkpoint.format.info import Verdict
from verl_slurm.checkpoint.store.verify import verify

Verifier = Callable[[Path, Keyring | None], Verdict]
"""Judges a checkpoint; the keys are those with one of which it must be signed."""
_Seen = tuple[tuple[str, int, int, int, int, int, int], ...]


def read_all(path: Path, keys: Keyring | None) -> Verdict:
    """Reads a checkpoint, every byte."""
    return verify(path, keys=keys)


class Verdicts:
    """The verdicts of one lead. Its threads may use it at the same time."""

    def __init__(self) -> None:
        self._good: dict[Path, tuple[_Seen, Verdict]] = {}
        self._lock = threading.Lock()

    def read(self, path: Path, keys: Keyring | None) -> Verdict:
        """Does the same as `read_all`, and remembers a checkpoint that is good."""
        seen = _seen(path)
        verdict = read_all(path, keys)
        with self._lock:
            self._good.pop(path, None)
            if verdict.ok:
                self._good[path] = seen, verdict
        return verdict

    def recall(self, path: Path, keys: Keyring | None) -> Verdict:
        """Returns what `read` has found, once, if nothing has been touched since; else reads."""
        with self._lock:
            seen, verdict = self._good.pop(path, ((), None))
        if verdict is not None and seen == _seen(path):
            return verdict
        return self.read(path, keys)


def _seen(path: Path) -> _Seen:
    """Returns what changes when anything below a directory does, even if its old times are set again (ctime)."""
    return tuple(sorted(_entries(path, ".")))


def _entries(path: Path, name: str) -> Iterator[tuple[str, int, int, int, int, int, int]]:
    try:
        here = os.stat(path / name, follow_symlinks=False)
        yield name, here.st_dev, here.st_ino, here.st_mode, here.st_size, here.st_mtime_ns, here.st_ctime_ns
        with os.scandir(path / name) as entries:
            inner = [(entry.name, entry.is_dir(follow_symlinks=False), entry) for entry in entries]
    except OSError:
        # Never equal to anything: it is read.
        yield name, os.getpid(), id(path), 0, 0, 0, 0
        return
    for below, is_directory, entry in inner:
        if is_directory:
            yield from _entries(path, f"{name}/{below}")
        else:
            try:
                stat = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            yield (
                f"{name}/{below}",
                stat.st_dev,
                stat.st_ino,
                stat.st_mode,
                stat.st_size,
                stat.st_mtime_ns,
                stat.st_ctime_ns,
            )
