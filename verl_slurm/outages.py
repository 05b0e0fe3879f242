"""What each interruption of a run cost, from its journal: pure, and the same whether read back or told event by event.

An interruption lasts from its first sign (the cause that the lead found, the hang, the crash, or the last word of a
lead that died) to the first rollout that is new: then the run does what it has not done before. In between lie the
save, the wait in the scheduler's queue, the start of the ranks up to their first safe point, and what is done again
from there. One that begins before the run is back from another ends that one: no second is counted twice.

What a user ended, and submitted again, is no interruption. Times are the hosts' clocks; one that went backwards counts
as no time.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from verl_slurm.exit_codes import ExitCode

__all__ = ["Outage", "Outages"]

_ENDING = frozenset({"preemption", "time_limit", "requeued", "node_lost", "failed", "operator_requeue"})
"""Causes (`slurm.cause.CauseKind`) that end an incarnation which is to go on. A cancel is not to go on."""
_OF_CRASH = {"hang": "hang", "node": "node_lost", "stranger": "stranger"}


class Outage(msgspec.Struct, kw_only=True):
    """One interruption. Durations in seconds; None: not known, or not there yet.

    Called by: cli.interruptions, verl_slurm_daemon.lead.
    """

    cause: str
    """A cause of `slurm.cause`, or crash, hang, stranger, lead_lost."""
    began: str
    """When its first sign was seen (UTC, ISO 8601)."""
    seconds: float | None = None
    """In all, to the first new rollout (or to the end of the run, or to the next interruption); None: it lasts."""
    back: bool = False
    """Whether it ended with the run back at work."""
    save_s: float | None = None
    """From the first sign to the committed emergency checkpoint."""
    queue_s: float | None = None
    """From the last word of one incarnation to the start of the next; 0 for a restart in place."""
    start_s: float | None = None
    """From the start of the incarnation (in place: from the end of the ranks) to the first safe point."""
    again_s: float | None = None
    """From there to the first new rollout."""
    saved: str = ""
    """The emergency checkpoint."""
    resumed: str | None = None
    """What the next ranks started from; empty: from the beginning; None: none have."""

    @property
    def tokens_lost(self) -> int | None:
        """0 where the ranks went on from what they had saved when they stopped. Else None: finished rollouts are in the
        ledger, and nobody counts the tokens of the micro-batches that were being sampled when the ranks died."""
        return 0 if self.saved and self.resumed == self.saved else None


class Outages:
    """All interruptions of one run, oldest first. Called by: cli.interruptions, verl_slurm_daemon.lead."""

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()) -> None:
        self.each: list[Outage] = []
        self._open: Outage | None = None
        self._epoch, self._living = 0, False
        self._began = self._last = self._mark = 0.0
        self._relaunched = False
        for event in events:
            self.feed(event)

    @property
    def seconds(self) -> float:
        """Of all that are over."""
        return round(sum(outage.seconds or 0.0 for outage in self.each), 3)

    def feed(self, event: Mapping[str, Any]) -> None:
        """Add one event. What makes no sense is passed over: the journal is a file, it decides nothing alone."""
        now, kind, epoch = _seconds(event.get("time")), event.get("event"), event.get("epoch")
        if now is None or not isinstance(epoch, int):
            return  # also what people ask for: it is the daemon that says what came of it
        if kind == "started" and epoch >= self._epoch:
            self._started(now, epoch)
        elif epoch != self._epoch:
            return  # the last words of an incarnation that was fenced out
        elif kind == "ended":
            self._ended(now, event.get("exit_code"))
        elif kind in ("cause", "hang", "crash", "orphaned"):
            self._failed(now, str(kind), event)
        elif self._open is not None:
            self._went_on(now, str(kind), event, self._open)
        self._last = max(self._last, now)

    def _started(self, now: float, epoch: int) -> None:
        if self._living and self._open is None:
            self._begin("lead_lost", self._last)  # the one before ended without a word
        if self._open is not None:
            self._open.queue_s = _between(self._last, now)
        self._epoch, self._living, self._mark = epoch, True, now

    def _ended(self, now: float, exit_code: object) -> None:
        self._living = False
        if exit_code != ExitCode.REQUEUED:
            self._end(now, back=exit_code == ExitCode.OK)

    def _failed(self, now: float, kind: str, event: Mapping[str, Any]) -> None:
        if kind == "cause":
            cause = str(event.get("cause"))
            if cause not in _ENDING:
                return
        elif kind == "orphaned":
            cause = "lead_lost"
        else:
            cause = "hang" if kind == "hang" else _OF_CRASH.get(str(event.get("kind")), "crash")
        if self._open is not None and not self._relaunched:
            self._mark = max(self._mark, now)  # more of the same: a hang's crash, a crash's requeue
            return
        self._end(now, back=False)
        self._begin(cause, now)
        self._mark = now

    def _went_on(self, now: float, kind: str, event: Mapping[str, Any], outage: Outage) -> None:
        name = str(event.get("name") or "")
        if kind == "saved" and event.get("emergency") is True and not self._relaunched:
            outage.saved, outage.save_s = name, _between(self._began, now)
        elif kind == "generation":
            self._relaunched = True
            outage.resumed = str(event.get("resume") or "")
            outage.queue_s = outage.queue_s or 0.0
        elif kind == "training" and self._relaunched:
            outage.start_s, self._mark = _between(self._mark, now), now
        elif kind == "first_rollout" and self._relaunched:
            outage.again_s = _between(self._mark, now)
            self._end(now, back=True)

    def _begin(self, cause: str, now: float) -> None:
        began = datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds")
        self._open, self._began, self._relaunched = Outage(cause=cause, began=began), now, False
        self.each.append(self._open)

    def _end(self, now: float, *, back: bool) -> None:
        if self._open is not None:
            self._open.seconds, self._open.back = _between(self._began, now), back
        self._open = None


def _between(earlier: float, later: float) -> float:
    return round(max(later - earlier, 0.0), 3)


def _seconds(time: object) -> float | None:
    try:
        return datetime.fromisoformat(str(time)).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
