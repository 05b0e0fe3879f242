"""Measures the cost of a step, and of a save to the training, from the times of whole steps alone.

A save works in the background. Its cost is neither its duration nor just the time that training stood still: it also
competes for cores, memory and disk. So its cost is the extra length of the steps that it overlapped, against steps
without a save. A single difference is noise where steps differ (longer answers); the median of many is not.
"""

import time
from collections import deque
from collections.abc import Callable
from statistics import median

__all__ = ["CostMeter"]

_MEASURED = 16
"""Newest steps and saves that count. Answers grow longer over a run, so old measurements no longer apply."""


class CostMeter:
    """Receives each whole step and each save of this process.

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
        """Returns the seconds of a step without a concurrent save; None: there was none yet."""
        return median(self._plain) if self._plain else None

    @property
    def save_s(self) -> float | None:
        """Returns the training seconds that a save costs; None: not known yet."""
        return median(self._costs) if self._costs else None

    def step_end(self, step: int) -> None:
        """Records that `step` whole steps are done. Leaves out the first of a process (compiling, first
        allocations).
        """
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
        """Subtracts `seconds` from the current step. An evaluation would otherwise count as the cost of a save."""
        self._left_out_s += seconds

    def save_began(self, *, counts: bool = True) -> None:
        """Records that a save now runs beside the steps.

        Args:
            counts: it is one of those whose cost is asked for.
        """
        self._counts = counts and (self._counts or not self._touched)
        self._under_way = self._touched = True

    def save_ended(self) -> None:
        """Records that the save is durable or has failed."""
        self._under_way = False
