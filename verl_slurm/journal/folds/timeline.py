"""The life of a run as intervals without a gap, from its journal: pure. The same boundaries as `goodput` and `outages`.

| kind | from | to |
| --- | --- | --- |
| queued | a submission, or the last word of an attempt that goes on | the next attempt's start |
| starting | an attempt's start, or the ranks' restart | their first safe point |
| recovering | that safe point, after an interruption | the first new rollout |
| training | the first safe point, or the first new rollout | the first sign of an interruption, or the end |
| hung | the verdict that ranks hang (they were silent before) | their end |
| preempted | the first sign of any other interruption or end | the last word of the attempt, or the restart |
| saving | the request to save and stop | the committed checkpoint |

After an end that is final there is no interval until the run is submitted or started again. A clock that went backwards
counts as no time.
"""

from collections.abc import Iterable
from typing import Literal, get_args

import msgspec

from verl_slurm.journal.events import (
    Cause,
    Crash,
    Ended,
    Event,
    Fenced,
    FirstRollout,
    Hang,
    Orphaned,
    Restart,
    Save,
    Saved,
    SaveFailed,
    Started,
    Submitted,
    Successor,
    Training,
)
from verl_slurm.journal.folds.outages import ENDING_CAUSES

IntervalKind = Literal["training", "saving", "preempted", "queued", "starting", "recovering", "hung"]
KINDS: tuple[IntervalKind, ...] = get_args(IntervalKind)


class Interval(msgspec.Struct, frozen=True):
    """A part of the run's life. Times in seconds since 1970."""

    kind: IntervalKind
    began: float
    ended: float
    attempt: int
    """The attempt that it belongs to; a wait belongs to the one before it. 0: before the first."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Timeline:
    """All intervals of one run, oldest first."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._closed: list[Interval] = []
        self._kind: IntervalKind | None = None
        self._since = self._last = 0.0
        self._attempt, self._living, self._interrupted = 0, False, False
        for event in events:
            self.feed(event)

    def until(self, now: float) -> list[Interval]:
        """Returns the intervals, the last of which lasts until `now` unless the run has ended."""
        if self._kind is None or now <= self._since:
            return list(self._closed)
        return [*self._closed, Interval(self._kind, self._since, now, self._attempt)]

    def feed(self, event: Event) -> None:
        """Add one event."""
        now = event.at
        if now is None:
            return
        if isinstance(event, Submitted | Successor):
            # Another job of a run that is at work, or waits already, changes nothing.
            if self._kind is None:
                self._to("queued", now)
        elif isinstance(event, Started):
            # An older one is fenced out by the one that has the run.
            if (event.attempt or 0) >= self._attempt:
                self._started(now, event.attempt or 0)
        # Without an attempt: a person's command wrote it. With another one: its lead is fenced out.
        elif event.attempt is None or event.attempt != self._attempt or not self._living:
            return
        else:
            self._went_on(now, event)
            self._last = max(self._last, now)

    def _started(self, now: float, attempt: int) -> None:
        if self._living:  # the one before ended without a word
            self._to("queued", max(self._last, self._since))
            self._interrupted = True
        self._to("starting", now)
        self._attempt, self._living, self._last = attempt, True, now

    def _went_on(self, now: float, event: Event) -> None:
        match event:
            case Restart():
                self._to("starting", now)
            # A guest's loop reports no rollouts: what it does again is not known.
            case FirstRollout() | Training(phase="step_end"):
                self._interrupted = False
                self._to("training", now)
            case Training():
                self._to("recovering" if self._interrupted else "training", now)
            case Save(stop=True):
                self._to("saving", now)
            case Saved() | SaveFailed() if self._kind == "saving":
                self._to("preempted", now)
            case Cause(cause=cause) if cause in ENDING_CAUSES or cause == "cancel":
                self._failed("preempted", now)
            case Hang():
                self._failed("hung", now)
            case Crash() | Orphaned():
                self._failed("preempted", now)
            case Ended() | Fenced():
                self._living = False
                self._to(None if isinstance(event, Ended) and event.is_final else "queued", now)

    def _failed(self, kind: IntervalKind, now: float) -> None:
        self._interrupted = True
        # A crash of ranks that are saving: the save goes on, or fails by itself.
        if self._kind != "saving":
            self._to(kind, now)

    def _to(self, kind: IntervalKind | None, now: float) -> None:
        if kind == self._kind:
            return
        if self._kind is not None and now > self._since:
            self._closed.append(Interval(self._kind, self._since, now, self._attempt))
        self._kind, self._since = kind, max(now, self._since)
