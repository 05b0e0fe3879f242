"""How often a run is interrupted and loses work, measured from its journal. Pure: no clock, no file.

Only what loses work counts against the interval between saves. A preemption or a time limit that was answered
with a verified emergency checkpoint loses nothing, and no periodic save would have helped: it does not
count. What loses work: a crash of the ranks (`crash`), an end without a verified save (`degraded`), and a
start that ended without a word (`started` again, and the earlier attempt has neither `ended` nor `fenced`).

The time a run has lived is the sum over its starts, from `started` to the last word of that attempt: waiting in the
queue is no running time. A start that died without a word lived longer than its last word, so the rate is rather
over- than underestimated. Times are the hosts' clocks; one that went backwards counts as no time.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from verl_slurm.journal.events import Crash, Degraded, Ended, Event, Fenced, Started


@dataclass(frozen=True, kw_only=True)
class Interruptions:
    """What the journal shows.

    Attributes:
        lossy: interruptions that lost work.
        run_s: seconds the run has lived, over all its starts.
    """

    lossy: int = 0
    run_s: float = 0.0


@dataclass
class _Attempt:
    """One attempt, while its events are read."""

    began: float
    last: float
    crashes: int = 0
    degraded: bool = False
    ended: bool = False


def count_interruptions(events: Iterable[Event]) -> Interruptions:
    """Count them.

    Args:
        events: oldest first.
    """
    attempts: dict[int, _Attempt] = {}
    for event in events:
        number, time = event.attempt, event.at
        if number is None or time is None:
            continue
        # Whatever comes before an attempt's Started, or without one, has no time to be counted in.
        if isinstance(event, Started):
            attempts[number] = _Attempt(began=time, last=time)
        attempt = attempts.get(number)
        if attempt is None:
            continue
        # A clock that went backwards counts as no time.
        attempt.last = max(attempt.last, time)
        attempt.crashes += isinstance(event, Crash)
        attempt.degraded |= isinstance(event, Degraded)
        attempt.ended |= isinstance(event, Ended | Fenced)
    newest = max(attempts, default=0)
    lossy = 0
    for number, attempt in attempts.items():
        # The newest attempt may still be at work.
        mute = not attempt.ended and number != newest
        lossy += attempt.crashes + (attempt.degraded or mute)
    run_s = sum(attempt.last - attempt.began for attempt in attempts.values())
    return Interruptions(lossy=lossy, run_s=run_s)


def mean_time_between(seen: Interruptions, expected_s: float) -> float:
    """Seconds between interruptions that lose work, with what was believed before.

    The posterior mean rate under a Gamma prior of one interruption in `expected_s`:
    (1 + lossy) / (expected_s + run_s). So nothing seen in a short time changes little, and what is seen in a long
    time outweighs any belief.

    Args:
        expected_s: above 0.
    """
    return (expected_s + max(seen.run_s, 0.0)) / (1 + max(seen.lossy, 0))
