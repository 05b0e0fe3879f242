"""Follows one run to its end, woken by the file system and not by a clock, or many, by the sizes of their journals.

No journal tells that a lead was killed. The scheduler, or the process table, is asked about that: about one run after
a silence, about many by one question, once a minute.
"""

import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.polling import PollingObserver

from verl_slurm.base.bounded import TooMuch, open_regular
from verl_slurm.base.errors import SlurmMissing, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.kernel_facts import is_remote
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.load import is_run
from verl_slurm.journal import events as ev
from verl_slurm.journal.files import now, read_events_after
from verl_slurm.journal.status import read_status
from verl_slurm.runs.glance import (
    Glance,
    Seen,
    ask_for,
    end_of_slurm_job,
    find_runs,
    glance,
    is_over,
    requeue_after_end,
    state_of,
    unreadable,
)
from verl_slurm.runs.liveness import job_state, requeued_words, settle, was_requeued
from verl_slurm.runs.run_record import last_job

_POLL_S = 2.0
# Bytes that are read at once; a longer line comes in pieces.
_MOST = 4 << 20
# watchdog logs an error if an event comes while its thread is stopped, which is how every follow ends.
logging.getLogger("watchdog.observers.inotify").setLevel(logging.CRITICAL)
_SILENCE_S = {"slurm": 30.0, "local": 2.0}
_CANCEL_S = 2.0
_WRITES = frozenset({"created", "modified", "moved", "closed"})
# Seconds between looks: one at 1,000 runs takes 20 ms. On a network file system each size is a question to its
# server.
_LOOK_S, _REMOTE_LOOK_S = 2.0, 5.0
# Minimum seconds between questions to the scheduler.
_ASK_S = 60.0


class Followed(msgspec.Struct, kw_only=True):
    """One run that is followed: what its journal has told so far."""

    root: Path
    state: str
    alive: bool
    """More events are to be expected."""
    offset: int
    """Bytes of its journal that were reported."""
    exit_code: int | None = None
    """The exit code with which it ended while it was followed."""
    announced_job: str | None = None
    """The job that was submitted last, while it was followed."""
    unannounced_job: str | None = None
    """The job that has started before that was written."""
    left: str = ""
    """What was told of a start that its job has left."""
    requeued: bool = False
    """Its journal has the end of its job, which Slurm has in its queue again."""
    ended: Glance | None = None
    """As of its end, when it was last asked about."""

    def take(self, *, newest: bool = True) -> list[ev.Event]:
        """Returns what its journal has more; looks at its size first. `newest`: of much more, the newest events
        alone; otherwise a part, and the next call goes on.

        Raises:
            FileNotFoundError: there is no journal.
            OSError, TooMuch: it cannot be read.
        """
        paths = RunPaths(self.root)
        size = _size(paths.events)
        if size == self.offset:
            return []
        lost = list[ev.Event]()
        if size is not None and size < self.offset:
            # What is in it now was told before, or is another run's.
            self.offset = size
            text = f"{paths.events} was cut or replaced while it was followed: what it lost counts no longer"
            lost = [ev.Warned("journal", text, time=now())]
        events, self.offset = read_events_after(paths, self.offset, newest=newest)
        return lost + events

    def report(self, events: list[ev.Event], on_event: "OnEvent") -> None:
        """Hands on events that `take` has returned. An error of `on_event` is its own."""
        for event in events:
            # `submit` may write of its job when that has begun, or ended: that is no news.
            late = isinstance(event, ev.Submitted) and event.job_id == self.unannounced_job
            if isinstance(event, ev.Submitted):
                self.announced_job, self.unannounced_job = event.job_id, None
            elif isinstance(event, ev.Started) and event.job_id != self.announced_job:
                self.unannounced_job = event.job_id
            self.state = self.state if late else state_after(event, self.state)
            # First, so that whoever is told sees the run as it is after the event. A run may be submitted again after
            # any end.
            if isinstance(event, ev.Submitted | ev.Started | ev.Successor) and not late:
                self.alive, self.exit_code, self.requeued, self.ended = True, None, False, None
            elif isinstance(event, ev.Ended) and event.is_final:
                self.alive, self.exit_code = False, event.exit_code
                self.requeued, self.ended = False, None
            on_event(self, event)


OnEvent = Callable[[Followed, ev.Event], None]


def follow_run(
    paths: RunPaths,
    offset: int,
    on_event: Callable[[ev.Event], None],
    on_status: Callable[[dict[str, Any]], None] | None = None,
) -> ExitCode:
    """Hands every event after byte `offset` to `on_event` until the run has ended, over all its requeues.

    Args:
        on_event: gets each event. Some are ours: `gone`, the last one, for a job that ended without a word; and a
            warning of a job that was requeued after its end, and, once, of one that stands until somebody acts, or
            that waits since a start could not begin.
        on_status: gets the content of status.json whenever it has changed.

    Returns:
        The exit code of the last lead of its newest job, or the scheduler's if a lead died without a word.
    """
    # An end that another submission follows in the journal is reported, and is not the run's.
    run = Followed(root=paths.root, state="", alive=True, offset=offset)
    patience_s, code, stands = _SILENCE_S[last_job(paths).cluster], ExitCode.OK, ""

    def tell(_: Followed, event: ev.Event) -> None:
        nonlocal patience_s, code
        on_event(event)
        # A job that is cancelled while it waits ends without a word, so the scheduler is asked soon after.
        patience_s = _CANCEL_S if isinstance(event, ev.CancelAsked) else _SILENCE_S[last_job(paths).cluster]
        if isinstance(event, ev.Ended):
            code = event.code

    def read() -> bool:
        before, events = run.offset, list[ev.Event]()
        with suppress(FileNotFoundError):  # it comes with the first job
            events = run.take(newest=False)
        run.report(events, tell)
        return run.offset != before

    with watched(paths.root, {str(paths.events), str(paths.status)}) as changed:
        while True:
            # Read first, then wait: what was written before the watch began rings no bell.
            has_news = False
            while read():
                has_news = True
            if on_status is not None and (status := read_status(paths)):
                on_status(status)
            if not run.alive:
                # submitit's controller ends a moment after its lead; else the next command would find the run alive.
                settle(paths, last_job(paths))
                if not (words := _requeued(paths)):
                    return code
                on_event(ev.Warned("job", words, time=now()))
                run.alive = True
            # One more look after a silence: a bell may have been missed.
            if has_news or changed(patience_s) or read():
                continue
            job = last_job(paths)
            try:
                state = job_state(paths, job)
            except SlurmMissing:
                continue  # a controller that is away for a while ends no run
            if state.over:
                on_event(ev.Gone(state.state, job_id=job.job_id))
                return state.exit_code
            # Its journal never tells: the job has no lead, or one that was stopped.
            words = f"stands still: {state.detail}" if state.way_on else state.left
            if words and words != stands:
                on_event(ev.Warned("job", f"{job.job_id} {words}", time=now()))
            stands = words


def _requeued(paths: RunPaths) -> str:
    """Asks whether the job of a run that is over goes on; returns that in words. Empty: no, or Slurm does not say."""
    one = glance(paths.root)
    end = end_of_slurm_job(one)
    if end is None:
        return ""
    try:
        state = job_state(paths, last_job(paths))
    except VerlSlurmError:  # the journal's end counts
        return ""
    return requeued_words(paths.root, end.job_id or "", end.outcome) if was_requeued(end.at, state) else ""


class FleetWatch:
    """Follows the runs in, or below, some directories.

    Args:
        on_event: gets each event with its run as it is written; also our own two, as in `follow_run`.
        on_glance: gets what was read of a run whenever one is: when it is found, and when it is asked about.
    """

    def __init__(
        self,
        places: Sequence[Path],
        on_event: OnEvent,
        on_glance: Callable[[Followed, Glance], None] = lambda *_: None,
    ) -> None:
        self._places, self._on_event, self._on_glance = places, on_event, on_glance
        self.runs: dict[Path, Followed] = {}
        self.idle: dict[Path, str] = {}
        """State of those that cannot be followed (yet): prepared, or closed to us."""
        self.problem = ""
        """Why the scheduler did not answer."""
        self.look_s = _REMOTE_LOOK_S if any(is_remote(place) for place in places) else _LOOK_S
        """Seconds between looks."""
        self._asked = 0.0

    def follow(
        self, on_turn: Callable[[], None], sleep: Callable[[float], object] = time.sleep
    ) -> ExitCode | int:
        """Follows until no run lives any more; returns OK, or the highest code with which a run ended meanwhile.

        `on_turn` is called first when all runs are known, then whenever something was reported.
        """
        # ---- find the runs, and ask once which of them still live
        self.find()
        self.ask()
        on_turn()
        while any(run.alive for run in self.runs.values()):
            sleep(self.look_s)
            if self.look():
                on_turn()
        return max((run.exit_code or 0 for run in self.runs.values()), default=0)

    def look(self, *, ask: bool = True) -> int:
        """Reports what is new; returns how much. With `ask` the scheduler is asked as well, if that is due."""
        told = self.find() + sum(self._read(run) for run in list(self.runs.values()))
        # Not after a silence: other runs may never be silent for a minute.
        is_due = ask and time.monotonic() - self._asked >= _ASK_S
        return told + (self.ask() if is_due else 0)

    def find(self) -> int:
        """Adds the unknown runs at and below the places; returns their number."""
        before = len(self.runs)
        for place in self._places:
            roots: Iterable[tuple[Path, bool]] = [(place, True)]
            if not is_run(place):
                roots = find_runs(place)
            for root, open_to_us in roots:
                if not open_to_us:
                    self.idle[root] = "no permission"
                elif root not in self.runs:
                    self._take_up(root)
        return len(self.runs) - before

    def _take_up(self, root: Path) -> None:
        # Before the glance: an event in between is told twice at worst, never missed.
        # Of many runs the journals are looked at, not the snapshots beside them: each of these is replaced
        # twice a second.
        offset = _size(RunPaths(root).events)
        if offset is None:
            self.idle[root] = "prepared"  # its journal comes with its first job
            return
        self.idle.pop(root, None)
        seen = glance(root)
        self.runs[root] = run = Followed(
            root=root, state=state_of(seen, None), alive=not is_over(seen), offset=offset
        )
        run.ended = None if run.alive else seen
        self._on_glance(run, seen)

    def _read(self, run: Followed) -> int:
        before = run.state
        try:
            events = run.take()
        except FileNotFoundError:
            run.state, run.alive = "removed", False
        except (OSError, TooMuch) as error:
            # Of one run, which must not end what is told of the others. Storage may answer again.
            run.state = unreadable(error)
            if isinstance(error, TooMuch):
                run.alive, run.exit_code = False, error.exit_code
            self._on_glance(run, Glance(root=run.root, error=run.state))
        else:
            run.report(events, self._on_event)
            return len(events)
        return int(run.state != before)

    def ask(self) -> int:
        """Asks whether the silent runs still live; returns how many do not, or stand until somebody acts.

        Those that are over are asked about in the same question: one may have been requeued since.
        """
        self._asked = time.monotonic()
        glances = [glance(run.root) for run in self.runs.values() if run.alive and not run.requeued]
        for run in self.runs.values():
            # Read once: until its journal tells more, all is as it was at its end.
            if run.requeued or not run.alive:
                run.ended = run.ended or glance(run.root)
        ended = [run.ended for run in self.runs.values() if run.ended is not None]
        seen, self.problem = ask_for([*glances, *ended])
        news = sum(self._take_requeue(one, seen.get(one.root)) for one in ended)
        for one in glances:
            run, answer = self.runs[one.root], seen.get(one.root)
            before, run.state = run.state, state_of(one, answer)
            # A run that lives has a job, so its directory was removed or closed meanwhile.
            if one.job is None:
                run.state, run.alive = one.error or "removed", False
            elif run.state in ("gone", "cancelled") and not is_over(one):
                news += 1
                # A lead that leaves by itself writes down its end: this one was killed, or never came to start.
                run.alive = False
                run.exit_code = int(ExitCode.CRASHED if run.state == "gone" else ExitCode.CANCELLED)
                self._on_event(run, ev.Gone(run.state, job_id=one.job.job_id))
            elif answer is not None and run.state in ("held", "suspended") and run.state != before:
                # Its journal never tells.
                why = f"{run.state}: {answer.detail or answer.state}"
                text = f"{one.job.job_id} is {why}; `verl-slurm status {shell_word(run.root)}` says how it goes on"
                self._on_event(run, ev.Warned("job", text, time=now()))
                news += 1
            elif answer is not None and answer.left and answer.left != run.left:
                run.left = answer.left
                self._on_event(run, ev.Warned("job", f"{one.job.job_id} {answer.left}", time=now()))
                news += 1
            self._on_glance(run, one)
        return news

    def _take_requeue(self, one: Glance, answer: Seen | None) -> bool:
        """Takes up a run whose job was requeued after its end, or that is over again; returns whether it is news."""
        run, words = self.runs[one.root], requeue_after_end(one, answer)
        if words:
            is_news, run.state = not run.requeued, state_of(one, answer)
            run.alive, run.requeued, run.exit_code = True, True, None
            if is_news:
                self._on_event(run, ev.Warned("job", words, time=now()))
        else:
            # A silent Slurm brings no news, and of a job that has started meanwhile the journal tells.
            later = one if self.problem or not run.requeued else glance(one.root)
            end = None if later is one else end_of_slurm_job(later)
            is_news = end is not None
            if end is not None:
                run.state, run.alive, run.requeued, run.ended = state_of(later, None), False, False, later
                run.exit_code = int(ExitCode.CANCELLED if later.is_cancelled else ExitCode.CRASHED)
                word = "cancelled" if later.is_cancelled else "gone"
                self._on_event(run, ev.Gone(word, job_id=end.job_id))
        if words or is_news:
            self._on_glance(run, run.ended or one)
        return is_news


def state_after(event: ev.Event, state: str) -> str:
    """Returns a run's state after this event, in the words of `glance.state_of`. Pure."""
    match event:
        case ev.Submitted() | ev.Successor():
            return "queued"
        case ev.Started() | ev.Restart():
            return "starting"
        case ev.Training():
            return "running"
        case ev.Save(stop=True):
            return "saving"
        case ev.Crash():
            return "paused"
        case ev.Ended():
            return event.outcome if event.is_final else "queued"
        case _:
            return state


def _size(path: Path) -> int | None:
    # Not of what a link leads to, nor the error of one that leads nowhere: reading the journal says what it is.
    with suppress(FileNotFoundError, PermissionError):
        return os.lstat(path).st_size
    return None


class _Bell(FileSystemEventHandler):
    """Rings when one of the watched names changes; None: when anything does."""

    def __init__(self, names: set[str] | None) -> None:
        self._names = names
        self.queue: SimpleQueue[None] = SimpleQueue()

    def on_any_event(self, event: FileSystemEvent) -> None:
        # "opened" and "closed_no_write" come from our own reading: they would ring without end.
        if event.event_type not in _WRITES:
            return
        if self._names is None or {str(event.src_path), str(event.dest_path)} & self._names:
            self.queue.put(None)


@contextmanager
def watched(directory: Path, names: set[str] | None = None) -> Iterator[Callable[[float | None], bool]]:
    """Yields a function that waits for a change in a directory, at most so many seconds; it returns whether one came.

    `names`: paths of the files that matter; None: all.
    """
    bell = _Bell(names)
    # inotify does not see what another machine writes to a network file system.
    observer = PollingObserver(timeout=_POLL_S) if is_remote(directory) else Observer()
    # Not a file in it: that may not exist yet, and a replaced one has another inode.
    observer.schedule(bell, str(directory))
    observer.start()

    def changed(timeout_s: float | None) -> bool:
        try:
            bell.queue.get(timeout=timeout_s)
        except Empty:
            return False
        # One look answers all bells that have rung by now.
        while not bell.queue.empty():
            bell.queue.get()
        return True

    try:
        yield changed
    finally:
        # A watch is a thread and a descriptor.
        observer.stop()
        observer.join()


def follow_newest(
    directory: Path, newest: Callable[[], Path | None], num_lines: int | None = None
) -> Iterator[tuple[Path, bytes]]:
    """Yields (file, line) of the newest file in `directory`, to its end before that of the next one. Never ends.

    Args:
        newest: returns the newest file now; None: there is none yet.
        num_lines: skip all but so many of the existing lines; None: skip none.
    """
    path, offset = newest(), 0
    if path is not None and num_lines is not None:
        # Offsets alone are kept: the log may have gigabytes.
        starts = deque([0], maxlen=num_lines + 1)  # starts of the last lines, and of the next one
        while lines := _read_lines(path, starts[-1]):
            starts.extend(itertools.accumulate((len(line) + 1 for line in lines), initial=starts.pop()))
        offset = starts[0]
    with watched(directory) as changed:
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
                changed(None)


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
