"""Estimates slurmctld's time.

Slurm gives the ends of jobs by its own clock; a node's clock may be minutes off, or be set.

Slurm is asked once, at the start. From then on the machine's steady clock counts, which also runs while a
virtual machine sleeps. Slurm gives whole seconds, so nodes that agree with it that closely keep their own
time.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

__all__ = ["SlurmClock"]

_NO_SKEW_S = 2.0


def _today() -> datetime:
    return datetime.now(UTC)


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SlurmClock:
    """Slurm's clock as this machine estimates it.

    Args:
        today: returns this machine's date.
        steady: returns seconds of a clock that is never set.
    """

    def __init__(
        self, today: Callable[[], datetime] = _today, steady: Callable[[], float] = _since_boot
    ) -> None:
        self._today, self._steady = today, steady
        self._date, self._at = today(), steady()

    def hear(self, date: datetime | None) -> float:
        """Takes Slurm's time, given just now; None: Slurm did not say.

        Returns:
            The seconds by which this machine is ahead; 0: the difference does not matter.
        """
        self._date, self._at = self._today(), self._steady()
        if date is None or abs(ahead_s := (self._date - date).total_seconds()) <= _NO_SKEW_S:
            return 0.0
        # The fraction of a second was cut off; a deadline that is too early is safer.
        self._date = date + timedelta(seconds=1)
        return ahead_s

    def now(self) -> datetime:
        return self._date + timedelta(seconds=self._steady() - self._at)
