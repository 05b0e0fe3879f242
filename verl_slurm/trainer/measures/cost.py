"""What a step costs, and what a save costs the training: measured from the times of whole steps alone.

A save works in the background. What it takes from training is not what it lasts, and not only what training stood
still for: it also competes for cores, memory and disk. So its cost is by how much the steps it ran beside were longer
than steps without one. A single difference is noise where steps differ (longer answers); the median of many is not.
"""

import time
from collections import deque
from collections.abc import Callable
from statistics import median

__all__ = ["CostMeter"]

_MEASURED = 16
"""Newest steps and saves that count: answers grow longer over a run, so what was measured long ago does not."""


class CostMeter:
    """Told of each whole step and each save of this process.

    Args:
        clock: monotonic seconds.

    Runs on rank 0.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mark: tuple[int, float] | None = None
        self._under_way = self._touched = self._counts = False
        self._plain: deque[float] = deque(maxlen=_MEASURED)
        self._beside: list[float] = []
        self._costs: deque[float] = deque(maxlen=_MEASURED)
        self._left_out_s = 0.0

    @property
    def step_s(self) -> float | None:
        """A step without a save beside it; None: there was none yet."""
        return median(self._plain) if self._plain else None

    @property
    def save_s(self) -> float | None:
        """Training time that a save takes; None: not known yet."""
        return median(self._costs) if self._costs else None

    def step_end(self, step: int) -> None:
        """`step` whole steps are done. The first of a process (compiling, first allocations) is left out."""
        now = self._clock()
        if self._mark is not None and step > self._mark[0]:
            count = step - self._mark[0]
            spent = max(now - self._mark[1] - self._left_out_s, 0.0) / count
            (self._beside if self._touched else self._plain).extend([spent] * count)
            self._touched = self._under_way
        self._mark, self._left_out_s = (step, now), 0.0
        if self._beside and not self._touched:
            if self._plain and self._counts:
                self._costs.append(max(sum(self._beside) - len(self._beside) * median(self._plain), 0.0))
            self._beside = []

    def leave_out(self, seconds: float) -> None:
        """Of the step that runs, what only some steps have: an evaluation would be taken for the cost of a save."""
        self._left_out_s += seconds

    def save_began(self, *, counts: bool = True) -> None:
        """From here on steps have a save beside them.

        Args:
            counts: it is one of those whose cost is asked for.
        """
        self._counts = counts and (self._counts or not self._touched)
        self._under_way = self._touched = True

    def save_ended(self) -> None:
        """It is durable, or has failed."""
        self._under_way = False
