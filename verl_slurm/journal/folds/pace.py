"""How far a run is, how long its last steps took, and how much training is left."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

LOOKED_AT = 30
"""Last steps that count: a run's pace changes with the length of its responses."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Steps done, and the time of those to come."""

    steps_done: int
    steps: int | None
    """Of the whole run; None: its loop does not say."""
    step_s: float | None
    """The median of the last steps; None: no step has a time yet."""
    steps_timed: int
    seconds_left: float | None
    """Of training, at this pace: no wait in a queue, no save and no restart is in it. None: it cannot be known."""

    @property
    def share(self) -> float | None:
        """Of the steps, those that are done: 0 to 1."""
        return min(self.steps_done / self.steps, 1.0) if self.steps else None


def pace_of(rows: Sequence[Mapping[str, Any]], steps_done: int, steps: int | None) -> Pace:
    """Returns the pace.

    Args:
        rows: of the last steps (`journal.steps`), oldest first.
        steps: of the whole run; None or 0: not known.
    """
    times = [
        time for row in rows[-LOOKED_AT:] if (time := number(row.get("step_s"))) is not None and time > 0
    ]
    usual = median(times) if times else None
    left = None if usual is None or not steps else usual * max(steps - steps_done, 0)
    return Pace(
        steps_done=steps_done,
        steps=steps or None,
        step_s=usual,
        steps_timed=len(times),
        seconds_left=0.0 if steps and steps_done >= steps else left,
    )


def steps_of_equal_rewards(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the steps whose rewards were all equal, and taught nothing: by our numbers, TRL's or verl's."""
    found = []
    for row in rows:
        shares = [
            row.get(name) for name in ("equal_rewards", "frac_reward_zero_std", "train/frac_reward_zero_std")
        ]
        low, high = number(row.get("critic/score/min")), number(row.get("critic/score/max"))
        step = number(row.get("step"))
        if step is not None and (1.0 in map(number, shares) or (low is not None and low == high)):
            found.append(step)
    return found


def number(value: object) -> float | None:
    """Returns a row's value as a float; None if it is no number, or one that no float can hold or compare."""
    # A row comes from a file, and an integer beyond all floats would be a traceback.
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or abs(value) > 1 << 53
        or value != value
    ):
        return None
    return float(value)
