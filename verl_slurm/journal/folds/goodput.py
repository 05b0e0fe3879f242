"""The numbers of a run for its metrics: restarts, saves, goodput. The same read back at a start or fed event by event.

The journal outlives the lead, so these numbers are the run's, not the process's: a counter goes on where the former
attempt left it. Times are seconds since 1970, as the events have them.
"""

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

from verl_slurm.journal.events import (
    Cause,
    Crash,
    Ended,
    Event,
    Fenced,
    Orphaned,
    Other,
    Requeue,
    Restart,
    Saved,
    Started,
    Submitted,
    Verified,
    kind_of,
)
from verl_slurm.journal.folds.pace import number

RESTART_CAUSES = (
    "preemption",
    "time_limit",
    "node_lost",
    "reclaimed",
    "bad_node",
    "service",
    "requeued",
    "crash",
    "hang",
    "stranger",
    "lead_lost",
    "cancel",
    "submitted",
    "other",
)
"""Why ranks were started again. Closed, so that no text of an event becomes a label."""

_MOST_NAMES = 64
"""Checkpoints whose time is remembered: far more than a run keeps."""
_MOST_STEPS = 10_000_000


class RunNumbers:
    """Counts and times of one run."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.first_started: float | None = None
        self.last_save: float | None = None
        """When the newest checkpoint was written that was then read back; None: there is none."""
        self.last_durable: float | None = None
        """When a save of any kind was last on a medium."""
        self.restarts = dict.fromkeys(RESTART_CAUSES, 0)
        self.counts: dict[str, int] = dict.fromkeys(_COUNTED, 0)
        self.requeues = {"accepted": 0, "refused": 0}
        self.saves = {"periodic": 0, "emergency": 0}
        self.save_seconds = self.save_bytes = 0.0
        """Sums over all saves."""
        self.last_save_seconds: float | None = None
        self.last_save_bytes: float | None = None
        self._saved_at: dict[str, float] = {}
        self._lived, self._began, self._last = 0.0, 0.0, 0.0
        self._job_id, self._living, self._num_restarts, self._why = "", False, 0, ""
        # 8 bytes a step; a list of floats takes 32.
        self._step_seconds = array("d")
        self.useful_seconds = 0.0
        """Of the steps that count; a step that was interrupted in its middle counts with its last part."""
        self.repeated_seconds = 0.0
        """Of the steps that were thrown back, and done again."""
        for event in events:
            self.feed(event)

    def feed(self, event: Event) -> None:
        """Add one event. One without a time, or of an unknown kind, is passed over."""
        now, kind = event.at, kind_of(event)
        if now is None or isinstance(event, Other):
            return
        if kind in self.counts:
            self.counts[kind] += 1
        match event:
            case Started():
                self._start(now, event.job_id or "")
            case Ended() | Fenced():
                self._end(now)
            # The command writes it after sbatch has answered: its job may have started before.
            case Submitted() if event.job_id != self._job_id:
                self._why = "submitted"
            case Cause(cause="failed"):  # of all that can fail, a lead lives to see a lost node
                self._why = "node_lost"
            case Cause(cause="operator_requeue" | "growth"):
                self._why = "requeued"
            case Cause(cause=cause) if cause in RESTART_CAUSES:
                self._why = cause
            case Crash(cause=cause):
                self._why = cause
            case Orphaned():
                self._why = "lead_lost"
            case Restart(resume=resume):
                self._restart(resume or "")
            case Requeue(accepted=accepted):
                self.requeues["accepted" if accepted else "refused"] += 1
            case Saved():
                self._saved(now, event)
            case Verified(name=name):
                # From here on it counts, by the time of its writing.
                self.last_save = self._saved_at.get(name, now)
        # What a person's command writes is no sign of life of the lead.
        if self._living and not isinstance(event, Submitted):
            self._last = max(self._last, now)

    def step_took(self, step: int, seconds: float) -> None:
        """The `step`-th step is done, counted from 1. What was done beyond it before is no part of the run any more."""
        # Bounded: a damaged number would ask for memory for all steps up to it.
        if 1 <= step <= _MOST_STEPS and 0.0 <= seconds < float("inf"):
            if len(self._step_seconds) >= step:
                # The run was thrown back, and does these steps again.
                self.repeated_seconds += sum(self._step_seconds[step - 1 :])
                del self._step_seconds[step - 1 :]
                self.useful_seconds = sum(self._step_seconds)
            self._step_seconds.extend([0.0] * (step - 1 - len(self._step_seconds)))
            self._step_seconds.append(seconds)
            self.useful_seconds += seconds

    def feed_row(self, row: Mapping[str, Any]) -> None:
        """Add a line of `steps.jsonl`; one without a duration is passed over."""
        step, seconds = number(row.get("step")), number(row.get("step_s"))
        if step is not None and seconds is not None:
            self.step_took(int(step), seconds)

    def allocated_seconds(self, now: float) -> float:
        """From each start to its end, waiting in the queue left out."""
        return self._lived + (max(now - self._began, 0.0) if self._living else 0.0)

    def goodput(self, now: float) -> float | None:
        """Useful of allocated seconds, 0 to 1; None before the first second."""
        allocated = self.allocated_seconds(now)
        return min(self.useful_seconds / allocated, 1.0) if allocated > 0.0 else None

    def _start(self, now: float, job_id: str) -> None:
        if self._living:  # the one before ended without a word
            self._end(self._last)
            self._why = self._why or "lead_lost"
        self.first_started = now if self.first_started is None else self.first_started
        self._job_id, self._living, self._began, self._last = job_id, True, now, now

    def _end(self, now: float) -> None:
        if self._living:
            self._lived += max(now - self._began, 0.0)
        self._living = False

    def _restart(self, resume: str) -> None:
        # The first start of the ranks restarts nothing.
        if self._num_restarts:
            self.restarts[self._why or "other"] += 1
        self._num_restarts += 1
        self._why = ""
        # The checkpoint that ranks start from is the newest that counts.
        if resume in self._saved_at:
            self.last_save = self._saved_at[resume]  # what is newer was not found good
        elif not resume:
            self.last_save = None

    def _saved(self, now: float, event: Saved) -> None:
        self.saves["emergency" if event.emergency else "periodic"] += 1
        # To the end of the order: the oldest is dropped first.
        self._saved_at.pop(event.name, None)
        self._saved_at[event.name] = now
        if len(self._saved_at) > _MOST_NAMES:
            del self._saved_at[next(iter(self._saved_at))]
        self.last_durable = now
        if not event.on_shared:
            self.last_save = now  # the ranks have read it back on the nodes' disks
        seconds, size = number(event.seconds), number(event.num_bytes)
        # Whatever a journal says: a sum with a NaN would stay one.
        if seconds is not None and size is not None and min(seconds, size) >= 0.0:
            self.last_save_seconds, self.last_save_bytes = seconds, size
            self.save_seconds += seconds
            self.save_bytes += size


_COUNTED = (
    "verified",
    "corrupt",
    "one_copy",
    "degraded",
    "save_failed",
    "crash",
    "hang",
    "warning",
    "link",
    "second_copy",
    "held",
)
"""Events of which only the number matters."""
