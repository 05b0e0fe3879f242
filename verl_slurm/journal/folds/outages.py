"""What each interruption of a run cost, from its journal: pure, and the same whether read back or told event by event.

An interruption lasts from its first sign (the cause that the lead found, the hang, the crash, or the last word of a
lead that died) to the first rollout that is new: then the run does what it has not done before. In between lie the
save, the wait in the scheduler's queue, the start of the ranks up to their first safe point, and what is done again
from there. A loop that is not ours reports no rollouts: it is back where its training goes on, and what it does again
from there is not known. An interruption that begins before the run is back from another ends that one: no second is
counted twice.

What a user ended, and submitted again, is no interruption. Times are the hosts' clocks; one that went backwards counts
as no time.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.journal.events import (
    Cause,
    Crash,
    Ended,
    Event,
    FirstRollout,
    Hang,
    Orphaned,
    Restart,
    Saved,
    Started,
    Training,
    Verified,
    Warned,
)

ENDING_CAUSES = frozenset(
    {
        "preemption",
        "time_limit",
        "requeued",
        "node_lost",
        "failed",
        "operator_requeue",
        "growth",
        "reclaimed",
        "bad_node",
        "service",
    }
)
"""Causes (`slurm.cause.CauseKind`) that end an attempt which is to go on. A cancel is not to go on."""
_MOST_EVIDENCE = 1000


class Outage(msgspec.Struct, kw_only=True):
    """One interruption. Durations in seconds; None: not known, or not there yet."""

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
    """From the last word of one attempt to the start of the next; 0 for a restart in place."""
    start_s: float | None = None
    """From the start of the attempt (in place: from the end of the ranks) to the first safe point."""
    again_s: float | None = None
    """From there to the first new rollout."""
    saved: str = ""
    """The emergency checkpoint."""
    verified: bool = False
    """It was read back and is whole."""
    rollouts_lost: str = ""
    """What the next start found lost of the finished rollouts."""
    resumed: str | None = None
    """What the next ranks started from; empty: from the beginning; None: none have."""
    evidence: str = ""
    """What Slurm or the daemon said at its first sign, cut to 1,000 characters. Empty: a lead died without a word."""
    attempt: int = 0
    """The attempt that it struck."""
    trained: bool = True
    """The ranks had reported work, since they were last started, when it struck."""

    @property
    def tokens_lost(self) -> int | None:
        """0 where the ranks went on from what they had saved when they stopped, or will. Else None: finished rollouts
        are in the ledger, and the tokens of micro-batches that were being sampled when the ranks died are not counted.
        """
        goes_on = self.verified if self.resumed is None else self.resumed == self.saved
        return 0 if self.saved and goes_on else None

    def so_far(self, now: datetime) -> float:
        """Seconds from its beginning to `now`."""
        # Never below zero: the journal may be another machine's, with its clock ahead of ours.
        return max((now - datetime.fromisoformat(self.began)).total_seconds(), 0.0)


class Outages:
    """All interruptions of one run, oldest first."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.each: list[Outage] = []
        self._open: Outage | None = None
        self._attempt, self._living = 0, False
        self._began = self._last = self._mark = 0.0
        self._relaunched = self._trained = False
        for event in events:
            self.feed(event)

    @property
    def seconds(self) -> float:
        """Of all that are over."""
        return round(sum(outage.seconds or 0.0 for outage in self.each), 3)

    def feed(self, event: Event) -> None:
        """Add one event. What a person's command wrote is passed over: the daemon says what came of it."""
        now, attempt = event.at, event.attempt
        # Without an attempt: a person's command wrote it.
        if now is None or attempt is None:
            return
        if isinstance(event, Started) and attempt >= self._attempt:
            self._started(now, attempt)
        # Its lead is fenced out, and may still write; what it says is no part of the run.
        elif attempt != self._attempt:
            return  # the last words of an attempt that was fenced out
        elif isinstance(event, Ended):
            self._ended(now, event)
        elif isinstance(event, Cause | Hang | Crash | Orphaned):
            self._failed(now, event)
        elif self._open is not None:
            self._went_on(now, event, self._open)
        if isinstance(event, Started | Restart):
            self._trained = False
        elif isinstance(event, Training | FirstRollout | Saved):
            self._trained = True
        # Never backwards, when a host's clock is set or another host's is behind.
        self._last = max(self._last, now)

    def _started(self, now: float, attempt: int) -> None:
        if self._living and self._open is None:
            self._begin("lead_lost", self._last)  # the one before ended without a word
        # From the last word of the former attempt: that is when the nodes were given back, as far as the journal knows.
        if self._open is not None:
            self._open.queue_s = _between(self._last, now)
        self._attempt, self._living, self._mark = attempt, True, now

    def _ended(self, now: float, event: Ended) -> None:
        self._living = False
        if event.is_final:
            self._end(now, back=event.exit_code == ExitCode.OK)

    def _failed(self, now: float, event: Cause | Hang | Crash | Orphaned) -> None:
        match event:
            case Cause(cause=cause, evidence=evidence):
                # A save that an operator asked for, a suspended job: the attempt goes on.
                if cause not in ENDING_CAUSES:
                    return
            case Crash(cause=cause, detail=evidence):
                pass
            case Hang(detail=evidence):
                cause = "hang"
            case Orphaned(detail=evidence):
                cause = "lead_lost"
        if self._open is not None and not self._relaunched:
            self._mark = max(self._mark, now)  # more of the same: a hang's crash, a crash's requeue
            return
        # A new interruption before the run is back: no second may count in both.
        self._end(now, back=False)
        self._begin(cause, now, evidence)
        self._mark = now

    def _went_on(self, now: float, event: Event, outage: Outage) -> None:
        match event:
            # After the ranks' restart, such a save belongs to the next interruption.
            case Saved(name=name, emergency=True) if not self._relaunched:
                outage.saved, outage.save_s = name, _between(self._began, now)
            case Verified(name=name) if name == outage.saved and not self._relaunched:
                outage.verified = True
            case Warned(topic="rollouts", text=text) if not self._relaunched:
                outage.rollouts_lost = text[:_MOST_EVIDENCE]
            case Restart(resume=resume):
                self._relaunched = True
                outage.resumed = resume or ""
                # Set already if the scheduler came between; a restart in place has no queue.
                outage.queue_s = outage.queue_s or 0.0
            case Training(phase=phase) if self._relaunched:
                outage.start_s, self._mark = _between(self._mark, now), now
                # A guest's loop reports no rollouts: no first new one would ever end its interruption.
                if phase == "step_end":
                    self._end(now, back=True)
            case FirstRollout() if self._relaunched:
                outage.again_s = _between(self._mark, now)
                self._end(now, back=True)

    def _begin(self, cause: str, now: float, evidence: str = "") -> None:
        began = datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds")
        self._open = Outage(
            cause=cause,
            began=began,
            evidence=evidence[:_MOST_EVIDENCE],
            attempt=self._attempt,
            trained=self._trained,
        )
        self._began, self._relaunched = now, False
        self.each.append(self._open)

    def _end(self, now: float, *, back: bool) -> None:
        if self._open is not None:
            self._open.seconds, self._open.back = _between(self._began, now), back
        self._open = None


def interruption_facts(outages: Outages, now: datetime, *, has_ledger: bool = True) -> dict[str, Any]:
    """Returns the sum, and each interruption with its parts (`Outage`), for `--json`. One that lasts has its time so
    far.

    Args:
        has_ledger: the loop keeps finished rollouts.
    """
    each = []
    for one in outages.each:
        lasts = one.seconds is None
        row = {**msgspec.to_builtins(one), "tokens_lost": one.tokens_lost, "lasts": lasts}
        each.append(row | ({"seconds": round(one.so_far(now), 3)} if lasts else {}))
    return {
        "count": len(each),
        "seconds": round(sum(row["seconds"] for row in each), 3),
        "queue_s": round(sum(one.queue_s or 0.0 for one in outages.each), 3),
        # None: not known, as the tokens of unfinished micro-batches are not counted.
        "tokens_lost": 0 if all(one.tokens_lost == 0 for one in outages.each) else None,
        "has_ledger": has_ledger,
        "each": each,
    }


def _between(earlier: float, later: float) -> float:
    return round(max(later - earlier, 0.0), 3)
