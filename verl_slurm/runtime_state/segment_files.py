"""A rank's ledger segment as a file: found by its name (`format.py`, section 3), locked by one writer, made durable.
Knows names and descriptors; what is in one is `segment`'s.
"""

import fcntl
import os
import re
import stat
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import run_id
from verl_slurm.runtime_state.segment import Frame, Gap, open_segment, scan

# ASCII: without it `\d` matches the digits of all scripts, and one segment could have two names.
# At most nine: the head of a segment has 32 bits for each number.
_SEGMENT = re.compile(r"attempt_(\d{6,9})\.rank_(\d{4,9})\.ledger", re.ASCII)


def owner(path: Path) -> tuple[int, int]:
    """Returns attempt and rank of a segment that `segments` found."""
    match = _SEGMENT.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2])


def segments(paths: RunPaths) -> list[tuple[int, int, Path]]:
    """Lists (attempt, rank, path) of every segment, oldest attempt first. Other names are no segments."""
    try:
        entries = list(os.scandir(paths.ledger))
    except FileNotFoundError:
        return []
    # By number, not by name: attempts have six digits or more.
    return sorted(
        (*owner(Path(entry.path)), Path(entry.path))
        for entry in entries
        if _SEGMENT.fullmatch(entry.name) and stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode)
    )


def walk(
    paths: RunPaths, *, run: str | None = None, check_from_step: int = 0
) -> Iterator[tuple[Path, int, Frame | Gap]]:
    """Yields path, open descriptor and `scan`'s items of every segment, oldest attempt first.

    Args:
        run: the id that the records must have; None: the run's own.
    """
    for attempt, rank, path in segments(paths):
        fd = open_segment(path)
        try:
            # Here and not before: without a segment a reader must not make an id.
            own = run_id(paths) if run is None else run
            for item in scan(fd, attempt, rank, own, check_from_step=check_from_step):
                yield path, fd, item
        finally:
            os.close(fd)


_PATIENCE_S = 10.0
"""Seconds that a segment's former owner, just killed, may take to die."""
_LOOK_AGAIN_S = 0.1


class SegmentHeld(VerlSlurmError):
    """Another process holds the segment. It belongs to our own attempt, so it is about to die: try again."""

    exit_code = ExitCode.INTERNAL


def lock_segment(fd: int, path: Path) -> None:
    """Locks an open segment until the last copy of `fd` is closed. Raises SegmentHeld after 10 s."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            # Polls: a blocking flock has no time limit, and on NFS is a loop of its own.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(_LOOK_AGAIN_S)
                continue
            raise SegmentHeld(
                "the ledger segment is held by a living process",
                where=path,
                expected=f"one writer a rank and attempt; waited {_PATIENCE_S:.0f} s for the other to end",
                remedy="wait for the older process to end, or begin a new attempt",
            ) from None
        except OSError:
            # A file system without locks (Lustre without -o flock). The attempt in the name still keeps
            # two attempts apart.
            pass
        return


class BackgroundSync:
    """Makes a file durable in the background; at most one fdatasync is under way. For one calling thread at a time."""

    def __init__(self) -> None:
        self._todo: SimpleQueue[int | None] = SimpleQueue()
        self._done: SimpleQueue[Exception | None] = SimpleQueue()
        self._started = self._under_way = False

    def begin(self, fd: int) -> None:
        """Starts to make the present content of `fd` durable; `fd` must stay open until `wait` was called."""
        assert not self._under_way, "the one before was not waited for"
        # At the first sync: a ledger that is read and never written has no thread.
        if not self._started:
            # A thread that only syncs, and no `concurrent.futures`: a hand-over takes 12 us of CPU here and 30 us
            # there, and every micro-batch has one. The thread must not reference this object, whose end is also its
            # own.
            threading.Thread(
                target=_sync, args=(self._todo, self._done), name="ledger-sync", daemon=True
            ).start()
            weakref.finalize(self, self._todo.put, None)
            self._started = True
        self._under_way = True
        self._todo.put(fd)

    def wait(self) -> None:
        """Waits for the sync that was begun, if any. Raises OSError, once, if it failed."""
        if not self._under_way:
            return
        error = self._done.get()
        # Before the error is raised: it is told once, and another sync may begin.
        self._under_way = False
        if error is not None:
            raise error


def _sync(todo: "SimpleQueue[int | None]", done: "SimpleQueue[Exception | None]") -> None:
    while (fd := todo.get()) is not None:
        error: Exception | None = None
        try:
            os.fdatasync(fd)
        except Exception as raised:  # noqa: BLE001 - whatever it is, it is raised where it is waited for
            error = raised
        done.put(error)
