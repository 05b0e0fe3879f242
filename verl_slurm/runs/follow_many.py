"""Follows many runs at once, woken by the kernel when a journal grows.

The journals are watched, not the snapshots beside them. Every training run replaces its snapshot twice a second, and
a watcher of a thousand runs could not read all of them. On a network file system inotify does not report other
machines' writes, so the journals' sizes are looked at every few seconds. No journal tells that a lead was killed; the
scheduler is asked about that: one question for all runs, once a minute.
"""

import errno
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType

import msgspec
from inotify_simple import INotify, flags

from verl_slurm.base.bounded import TooMuch
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.mounts import is_remote
from verl_slurm.base.paths import RunPaths
from verl_slurm.journal.events import (
    Crash,
    Ended,
    Event,
    Gone,
    Restart,
    Save,
    Started,
    Submitted,
    Successor,
    Training,
)
from verl_slurm.journal.files import read_events_after
from verl_slurm.runs.glance import Glance, ask_for, find_runs, glance, is_over, state_of, unreadable

_LOOK_S = 5.0
"""Seconds between looks at sizes, if inotify is silent."""
_ASK_S = 60.0
"""Minimum seconds between questions to the scheduler."""


class Watches:
    """Watches files that grow, and directories that get entries: one descriptor for all, and no thread.

    watchdog, which follows a single run, has a thread for every path that it watches: 1,003 threads and 21 MB for
    1,000 runs. Sites limit the threads of a user on login nodes.
    """

    def __init__(self) -> None:
        self._inotify = INotify()
        self._paths: dict[int, Path] = {}

    def __enter__(self) -> "Watches":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inotify.close()

    def fileno(self) -> int:
        """Returns the descriptor that can be read when something has happened."""
        return int(self._inotify.fileno())

    def add_file(self, path: Path) -> bool:
        """Reports `path` from now on when it grows; returns False if there is no such file.

        Raises:
            OSError: no more may be watched (`fs.inotify.max_user_watches`), or permission is missing.
        """
        # Not what a link leads to, nor the error of one that leads nowhere: reading the journal says what it is.
        return self._add(path, flags.MODIFY | flags.DONT_FOLLOW)

    def add_directory(self, path: Path) -> bool:
        """Reports `path` from now on when an entry is added. As `add_file`."""
        return self._add(path, flags.MOVED_TO | flags.CREATE)

    def _add(self, path: Path, mask: int) -> bool:
        try:
            self._paths[self._inotify.add_watch(path, mask)] = path
        except FileNotFoundError:
            return False
        except OSError as error:
            # With the path, which inotify's own error does not name.
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from None
        return True

    def wait(self, timeout_s: float) -> set[Path] | None:
        """Returns the watched paths that something happened to; empty: nothing did within the time.

        Returns:
            None: the kernel dropped events; look at everything.
        """
        changed: set[Path] = set()
        for event in self._inotify.read(timeout=int(timeout_s * 1000)):
            # The kernel's queue is bounded (fs.inotify.max_queued_events): what was dropped is not known.
            if event.mask & flags.Q_OVERFLOW:
                return None
            path = self._paths.get(event.wd)
            # The file is gone, and the watch with it.
            if event.mask & flags.IGNORED:
                self._paths.pop(event.wd, None)
            elif path is not None:
                changed.add(path)
        return changed


class Followed(msgspec.Struct, kw_only=True):
    """One run that is followed."""

    root: Path
    state: str
    alive: bool
    """More events are to be expected."""
    offset: int
    """Bytes of its journal that were reported."""
    exit_code: int | None = None
    """The exit code with which it ended while it was followed."""


class FleetWatch:
    """Follows the runs in, or below, some directories.

    Args:
        places: run directories, or directories that hold some.
        on_event: gets each event with its run as it is written; also our own, `gone`, as in `follow_run`.
        on_glance: gets what was read of a run whenever one is: when it is found, and when it is asked about.
    """

    def __init__(
        self,
        places: Sequence[Path],
        on_event: Callable[[Followed, Event], None],
        on_glance: Callable[[Followed, Glance], None] = lambda *_: None,
    ) -> None:
        self._places, self._on_event, self._on_glance = places, on_event, on_glance
        self.runs: dict[Path, Followed] = {}
        self.idle: dict[Path, str] = {}
        """State of those that cannot be followed (yet): prepared, or closed to us."""
        self.problem = ""
        """Why the scheduler did not answer."""
        # inotify does not report other machines' writes: the sizes are looked at.
        self._looks = any(is_remote(place) for place in places)
        self._asked = 0.0

    def follow(self, on_turn: Callable[[], None]) -> ExitCode | int:
        """Follows until no run lives any more.

        Args:
            on_turn: called first when all runs are known, then whenever something was reported.

        Returns:
            OK, or the highest code with which a run ended meanwhile.

        Raises:
            OSError: so many files may not be watched, or the place cannot be read.
        """
        with Watches() as watches:
            # ---- find the runs, and ask once which of them still live
            self.find(watches)
            self.ask()
            on_turn()
            while any(run.alive for run in self.runs.values()):
                told = self._turn(watches)
                if told:
                    on_turn()
        return max((run.exit_code or 0 for run in self.runs.values()), default=0)

    @property
    def must_look(self) -> bool:
        """The kernel does not report all that is written: look every few seconds."""
        return self._looks

    def find(self, watches: Watches) -> None:
        """Finds the runs that there are, and has `watches` report them from now on."""
        for place in self._places:
            self._find(place, watches)

    def _turn(self, watches: Watches) -> int:
        """Waits and reports new events; returns their number."""
        until_asked = max(self._asked + _ASK_S - time.monotonic(), 0.0)
        # Woken by the kernel; at the latest when the scheduler is due, or where sizes have to be looked at.
        changed = watches.wait(min(_LOOK_S, until_asked) if self._looks else until_asked)
        quiet = changed == set()
        told = self.read(changed, watches)
        # Also asked if other runs are never silent for a minute, and where sizes are polled (a network file system).
        if (quiet and not self._looks) or time.monotonic() - self._asked >= _ASK_S:
            told += self.ask()
        return told

    def read(self, changed: set[Path] | None, watches: Watches) -> int:
        """Reports the new events of what `watches` says has changed; returns their number."""
        # Also where the kernel dropped events: look at everything.
        if self._looks or changed is None:
            changed = {*self._places, *(RunPaths(root).events for root in self.runs)}
        told = 0
        for path in sorted(changed):
            run = self.runs.get(path.parent)
            if run is not None and path.name == "events.jsonl":
                told += self._read(run)
            else:
                told += self._find(path, watches)
        return told

    def _find(self, place: Path, watches: Watches) -> int:
        """Adds the unknown runs at and below `place`; returns their number."""
        found = 0
        roots: Iterable[tuple[Path, bool]] = [(place, True)]
        if not (place / "run.yaml").exists():
            # Before the look: an entry that comes in between is seen twice, not never.
            self._hear(watches.add_directory, place)
            roots = find_runs(place, on_directory=lambda path: self._hear(watches.add_directory, path))
        for root, open_to_us in roots:
            if not open_to_us:
                self.idle[root] = "no permission"
            elif root not in self.runs:
                found += 1
                self._take_up(root, watches)
        return found

    def _take_up(self, root: Path, watches: Watches) -> None:
        paths = RunPaths(root)
        # The directory is watched before the second try, so that a journal that comes in between is not missed.
        if not self._hear(watches.add_file, paths.events):
            self._hear(watches.add_directory, root)
            if not self._hear(watches.add_file, paths.events):
                self.idle[root] = "prepared"  # its journal comes with its first job
                return
        self.idle.pop(root, None)
        # Before the glance: an event in between is told twice at worst, never missed.
        offset = _size(paths.events)
        seen = glance(root)
        self.runs[root] = run = Followed(
            root=root, state=state_of(seen, None), alive=not is_over(seen), offset=offset
        )
        self._on_glance(run, seen)

    def _hear(self, add: Callable[[Path], bool], path: Path) -> bool:
        """Returns whether `path` exists. If the kernel accepts no more watches, falls back to looking at sizes."""
        try:
            return add(path)
        except PermissionError:
            return False
        except OSError as error:
            if error.errno != errno.ENOSPC:  # fs.inotify.max_user_watches
                raise
            self._looks = True
            return path.exists()

    def _read(self, run: Followed) -> int:
        try:
            events, run.offset = read_events_after(RunPaths(run.root), run.offset)
        except FileNotFoundError:
            run.state, run.alive = "removed", False
            return 1
        except (OSError, TooMuch) as error:
            # Of one run, which must not end what is told of the others. Storage may answer again.
            run.state = unreadable(error)
            if isinstance(error, TooMuch):
                run.alive, run.exit_code = False, error.exit_code
            self._on_glance(run, Glance(root=run.root, error=run.state))
            return 1
        for event in events:
            run.state = state_after(event, run.state)
            # First, so that whoever is told sees the run as it is after the event.
            self._judge(run, event)
            self._on_event(run, event)
        return len(events)

    def _judge(self, run: Followed, event: Event) -> None:
        # A run may be submitted again after any end.
        if isinstance(event, Submitted | Started | Successor):
            run.alive, run.exit_code = True, None
        elif isinstance(event, Ended) and event.is_final:
            run.alive, run.exit_code = False, event.exit_code

    def ask(self) -> int:
        """Asks whether the silent runs still live; returns how many do not."""
        self._asked = time.monotonic()
        glances: list[Glance] = [glance(run.root) for run in self.runs.values() if run.alive]
        seen, self.problem = ask_for(glances)
        gone = 0
        for one in glances:
            run, answer = self.runs[one.root], seen.get(one.root)
            run.state = state_of(one, answer)
            # A run that lives has a job, so its directory was removed or closed meanwhile.
            if one.job is None:
                run.state, run.alive = one.error or "removed", False
            if run.state == "gone" and one.job is not None:
                gone += 1
                # A lead that leaves by itself writes down its end; this one was killed.
                run.alive, run.exit_code = False, int(ExitCode.CRASHED)
                self._on_event(run, Gone("gone", job_id=one.job.job_id))
            self._on_glance(run, one)
        return gone


def state_after(event: Event, state: str) -> str:
    """Returns a run's state after this event, in the words of `glance.state_of`. Pure."""
    match event:
        case Submitted() | Successor():
            return "queued"
        case Started() | Restart():
            return "starting"
        case Training():
            return "running"
        case Save(stop=True):
            return "saving"
        case Crash():
            return "paused"
        case Ended():
            return event.outcome if event.is_final else "queued"
        case _:
            return state


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return 0
