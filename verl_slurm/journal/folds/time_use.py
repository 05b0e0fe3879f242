"""Where the time of a run went: goodput, ETTR and the rest in parts that add up, from its journal and steps. Pure.

| part | meaning | in the terms of Google's ml-goodput-measurement |
| --- | --- | --- |
| useful | steps that count | goodput |
| repeated | steps that were thrown back, and done again | WASTED_PROGRESS_FROM_DISRUPTION |
| unfinished | the first part of steps that an interruption cut, and what lies between steps | OTHER |
| saving | saves before an end | UNPRODUCTIVE_CHECKPOINT_SAVE_TIME |
| starting | ranks start, and load | TPU_INITIALIZATION, TRAINING_PREP and others, see `PARTS` |
| preempted, hung | leaving nodes, hanging | INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION |
| requeued | waiting for nodes after an attempt | INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION |
| queued | waiting before the first attempt of a submission | not counted |

A periodic save runs beside the training; where the training waited for one, the wait is a part of its step.
Goodput is useful of allocated time, as the metric `verl_goodput_ratio` has it. ETTR (effective training time ratio,
arXiv:2410.21680) is useful of all time, with the queue.
"""

from collections.abc import Sequence

import msgspec

from verl_slurm.journal.folds.goodput import RunNumbers
from verl_slurm.journal.folds.timeline import Interval

PARTS: dict[str, str] = {
    "useful": "GOODPUT",
    "repeated": "WASTED_PROGRESS_FROM_DISRUPTION",
    "unfinished": "OTHER",
    "saving": "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    "starting": "TPU_INITIALIZATION, TRAINING_PREP, PROGRAM_STARTUP, UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    "preempted": "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    "hung": "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    "requeued": "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    "queued": "",
}
"""Each part of the time, with Google's terms for it."""


class TimeUse(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a run."""

    wall_s: float
    """From the first submission to the end, without the time between an end and the next submission."""
    allocated_s: float
    """From each start of the job to its end."""
    useful_s: float
    goodput: float | None
    """Useful of allocated, 0 to 1. None: nothing was allocated, or no step has a duration."""
    ettr: float | None
    """Useful of all time, 0 to 1; None likewise."""
    parts: dict[str, float]
    """Seconds by the names of `PARTS`, in their order, without empty ones. They add up to `wall_s`."""


def time_use(numbers: RunNumbers, intervals: Sequence[Interval], now: float) -> TimeUse:
    """Returns the use of the time until `now`.

    Args:
        numbers: of the journal and of all steps.
        intervals: until `now`.
    """
    seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    trained = 0.0
    before: float | None = None
    for interval in intervals:
        if interval.kind in ("training", "recovering"):
            trained += interval.seconds
        # A wait that follows an attempt belongs to its interruption. After a final end there is a gap before the wait.
        elif interval.kind == "queued" and before == interval.began:
            seconds["requeued"] += interval.seconds
        else:
            seconds[interval.kind] += interval.seconds
        before = interval.ended
    # Clamped: the first step of a start also counts what its ranks did before their first safe point.
    seconds["useful"] = min(numbers.useful_seconds, trained)
    seconds["repeated"] = min(numbers.repeated_seconds, trained - seconds["useful"])
    seconds["unfinished"] = trained - seconds["useful"] - seconds["repeated"]
    wall = sum(interval.seconds for interval in intervals)
    measured = numbers.useful_seconds > 0.0
    return TimeUse(
        wall_s=round(wall, 3),
        allocated_s=round(numbers.allocated_seconds(now), 3),
        useful_s=round(numbers.useful_seconds, 3),
        goodput=numbers.goodput(now) if measured else None,
        ettr=min(numbers.useful_seconds / wall, 1.0) if measured and wall > 0.0 else None,
        parts={name: round(value, 3) for name, value in seconds.items() if value > 0.0},
    )
