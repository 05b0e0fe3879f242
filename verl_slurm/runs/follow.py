"""Follows a growing file, and a run to its end, woken by the file system instead of by a clock.

inotify does not see what another machine writes to a network file system; there watchdog's own polling observer looks
every two seconds. The silence time-out does not poll the file: it is when the caller asks the scheduler, or the
process table, whether the run still lives.
"""

import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver
from watchdog.observers.polling import PollingObserver

from verl_slurm.base.bounded import open_regular
from verl_slurm.base.errors import SlurmMissing
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.mounts import is_remote
from verl_slurm.base.paths import RunPaths
from verl_slurm.journal.events import CancelAsked, Ended, Event, Gone
from verl_slurm.journal.files import parse_event, read_history
from verl_slurm.journal.status import read_status
from verl_slurm.runs.liveness import job_state, settle
from verl_slurm.runs.run_record import last_job

_POLL_S = 2.0
_MOST = 4 << 20
"""Bytes that are read at once; a longer line comes in pieces."""
# watchdog logs an error if an event comes while its thread is stopped, which is how every follow ends.
logging.getLogger("watchdog.observers.inotify").setLevel(logging.CRITICAL)
Wake = Callable[[], None]
_SILENCE_S = {"slurm": 30.0, "local": 2.0}
_CANCEL_S = 2.0
_WRITES = frozenset({"created", "modified", "moved", "closed"})


class _Bell(FileSystemEventHandler):
    """Rings when one of the watched names changes; None: when anything does."""

    def __init__(self, paths: set[str] | None) -> None:
        self._paths = paths
        self.queue: SimpleQueue[None] = SimpleQueue()

    def on_any_event(self, event: FileSystemEvent) -> None:
        # "opened" and "closed_no_write" come from our own reading: they would ring without end.
        if event.event_type not in _WRITES:
            return
        if self._paths is None or {str(event.src_path), str(event.dest_path)} & self._paths:
            self.queue.put(None)


def follow_lines(
    path: Path,
    offset: int = 0,
    *,
    silence_s: Callable[[], float],
    beside: Path | None = None,
    on_beside: Wake | None = None,
) -> Iterator[bytes | None]:
    """Yields each finished line after `offset`; None after `silence_s` without any.

    Never ends by itself. The file need not exist yet; its directory must.

    Args:
        path: the file that grows.
        offset: bytes to skip.
        silence_s: called each time: the seconds of silence after which the caller gets a turn.
        beside: another file in the same directory; `on_beside` is called when it changes.
    """
    bell = _Bell({str(path), str(beside)})
    # The directory is watched, not the file: that may not exist yet, and a replaced one has another inode.
    observer = _observer(path.parent)
    observer.schedule(bell, str(path.parent))
    observer.start()
    try:
        while True:
            # Read first, then wait: what was written before the watch began rings no bell.
            lines = _read_lines(path, offset)
            for line in lines:
                offset += len(line) + 1
                yield line
            if on_beside is not None:
                on_beside()
            if lines:
                continue
            try:
                bell.queue.get(timeout=silence_s())
            except Empty:
                # One more look: a bell may have been missed, and the caller takes a None for silence.
                if not _read_lines(path, offset):
                    yield None
    finally:
        # Also when the caller leaves the generator: a watch is a thread and a descriptor.
        observer.stop()
        observer.join()


def follow_newest(
    directory: Path, newest: Callable[[], Path | None], num_lines: int | None = None
) -> Iterator[tuple[Path, bytes]]:
    """Yields (file, line) of the newest file in `directory`, to its end before that of the next one.

    Never ends by itself.

    Args:
        directory: must exist.
        newest: returns the newest file now; None: there is none yet.
        num_lines: skip all but so many of the existing lines; None: skip none.
    """
    bell = _Bell(None)
    observer = _observer(directory)
    observer.schedule(bell, str(directory))
    observer.start()
    path, offset = newest(), 0
    if path is not None and num_lines is not None:
        # Offsets alone are kept: the log may have gigabytes.
        starts = deque([0], maxlen=num_lines + 1)  # starts of the last lines, and of the next one
        while lines := _read_lines(path, starts[-1]):
            starts.extend(itertools.accumulate((len(line) + 1 for line in lines), initial=starts.pop()))
        offset = starts[0]
    try:
        while True:
            later = newest()  # before the last look at the former: that has no writer any more
            if path is not None:
                while lines := _read_lines(path, offset):
                    for line in lines:
                        offset += len(line) + 1
                        yield path, line
            if later != path:
                if path is not None and (rest := _read_rest(path, offset)):
                    yield path, rest  # its writer was killed in the middle of a line
                path, offset = later, 0
            else:
                bell.queue.get()
                # One look answers all bells that have rung by now.
                while not bell.queue.empty():
                    bell.queue.get()
    finally:
        observer.stop()
        observer.join()


def follow_run(
    paths: RunPaths,
    offset: int,
    on_event: Callable[[Event], None],
    on_status: Callable[[dict[str, Any]], None] | None = None,
) -> ExitCode:
    """Hands every event after `offset` to `on_event` until the run has ended, over all its requeues.

    Args:
        paths: the run.
        offset: bytes of events.jsonl that are history.
        on_event: gets each event. The last one may be ours: `gone`, for a job that ended without a word.
        on_status: gets the content of status.json whenever it has changed.

    Returns:
        The run's exit code: that of the last lead of its newest job, or the scheduler's if a lead died without a
            word.
        An end that another submission follows in the journal is reported, and is not the run's.
    """

    def hand_status() -> None:
        if on_status is not None and (status := read_status(paths)):
            on_status(status)

    patience_s = _SILENCE_S[last_job(paths).cluster]
    lines = follow_lines(
        paths.events,
        offset,
        silence_s=lambda: patience_s,
        beside=paths.status,
        on_beside=hand_status,
    )
    for line in lines:
        if line is not None:
            event = parse_event(line)
            if event is None:
                continue
            on_event(event)
            # A job that is cancelled while it waits ends without a word, so the scheduler is asked soon after.
            patience_s = _CANCEL_S if isinstance(event, CancelAsked) else _SILENCE_S[last_job(paths).cluster]
            # A run may be submitted again after any end.
            if isinstance(event, Ended) and event.is_final and read_history(paths).word == event:
                # submitit's controller ends a moment after its lead; else the next command would find the run alive.
                settle(paths, last_job(paths))
                return event.code
            continue
        job = last_job(paths)
        try:
            state = job_state(paths, job)
        except SlurmMissing:
            continue  # a controller that is away for a while ends no run
        if state.over:
            on_event(Gone(state.state, job_id=job.job_id))
            return state.exit_code
    raise AssertionError("unreachable: follow_lines never ends")


def _read_lines(path: Path, offset: int) -> list[bytes]:
    data = _read_rest(path, offset)
    lines = data.split(b"\n")[:-1]
    return lines or ([data[:-1]] if len(data) == _MOST else [])


def _read_rest(path: Path, offset: int) -> bytes:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            file.seek(offset)
            return file.read(_MOST)
    except FileNotFoundError:
        return b""


def _observer(directory: Path) -> BaseObserver:
    return PollingObserver(timeout=_POLL_S) if is_remote(directory) else Observer()
