"""Follows many runs at once: looks at the sizes of their journals, and reads those that have grown.

The journals are looked at, not the snapshots beside them. Every training run replaces its snapshot twice a second, and
a follower of a thousand runs could not read all of them. No journal tells that a lead was killed; the scheduler is
asked about that: one question for all runs, once a minute.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

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

# Seconds between looks: one at 1,000 runs takes 20 ms. On a network file system each size is a question to its
# server.
_LOOK_S, _REMOTE_LOOK_S = 2.0, 5.0
# Minimum seconds between questions to the scheduler.
_ASK_S = 60.0


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
        self.look_s = _REMOTE_LOOK_S if any(is_remote(place) for place in places) else _LOOK_S
        """Seconds between looks."""
        self._asked = 0.0

    def follow(
        self, on_turn: Callable[[], None], sleep: Callable[[float], object] = time.sleep
    ) -> ExitCode | int:
        """Follows until no run lives any more.

        Args:
            on_turn: called first when all runs are known, then whenever something was reported.
            sleep: replaced in tests.

        Returns:
            OK, or the highest code with which a run ended meanwhile.

        Raises:
            OSError: the place cannot be read.
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
        """Reports what is new; returns how much.

        Args:
            ask: the scheduler as well, if that is due.
        """
        told = self.find() + sum(self._read(run) for run in list(self.runs.values()))
        # Not after a silence: other runs may never be silent for a minute.
        is_due = ask and time.monotonic() - self._asked >= _ASK_S
        return told + (self.ask() if is_due else 0)

    def find(self) -> int:
        """Adds the unknown runs at and below the places; returns their number."""
        before = len(self.runs)
        for place in self._places:
            roots: Iterable[tuple[Path, bool]] = [(place, True)]
            if not (place / "run.yaml").exists():
                roots = find_runs(place)
            for root, open_to_us in roots:
                if not open_to_us:
                    self.idle[root] = "no permission"
                elif root not in self.runs:
                    self._take_up(root)
        return len(self.runs) - before

    def _take_up(self, root: Path) -> None:
        # Before the glance: an event in between is told twice at worst, never missed.
        offset = _size(RunPaths(root).events)
        if offset is None:
            self.idle[root] = "prepared"  # its journal comes with its first job
            return
        self.idle.pop(root, None)
        seen = glance(root)
        self.runs[root] = run = Followed(
            root=root, state=state_of(seen, None), alive=not is_over(seen), offset=offset
        )
        self._on_glance(run, seen)

    def _read(self, run: Followed) -> int:
        size, before = _size(RunPaths(run.root).events), run.state
        if size == run.offset:
            return 0
        try:
            events, run.offset = read_events_after(RunPaths(run.root), run.offset)
        except FileNotFoundError:
            run.state, run.alive = "removed", False
            return int(run.state != before)
        except (OSError, TooMuch) as error:
            # Of one run, which must not end what is told of the others. Storage may answer again.
            run.state = unreadable(error)
            if isinstance(error, TooMuch):
                run.alive, run.exit_code = False, error.exit_code
            self._on_glance(run, Glance(root=run.root, error=run.state))
            return int(run.state != before)
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
            elif run.state in ("gone", "cancelled") and not is_over(one):
                gone += 1
                # A lead that leaves by itself writes down its end: this one was killed, or never came to start.
                run.alive = False
                run.exit_code = int(ExitCode.CRASHED if run.state == "gone" else ExitCode.CANCELLED)
                self._on_event(run, Gone(run.state, job_id=one.job.job_id))
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


def _size(path: Path) -> int | None:
    # Not of what a link leads to, nor the error of one that leads nowhere: reading the journal says what it is.
    with suppress(FileNotFoundError, PermissionError):
        return os.lstat(path).st_size
    return None
