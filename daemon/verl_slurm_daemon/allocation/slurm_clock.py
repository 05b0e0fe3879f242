"""What time it is for slurmctld: the ends of jobs are told by its clock, and a node's may be minutes off, or be set.

Asked once, at the start; from then on the machine's own steady clock counts, which runs on while a virtual machine
sleeps. Slurm says whole seconds, so nodes that agree with it that closely keep their own time.
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
    """

    Args:
        today: this machine's date.
        steady: seconds that nobody sets.
    """

    def __init__(
        self, today: Callable[[], datetime] = _today, steady: Callable[[], float] = _since_boot
    ) -> None:
        self._today, self._steady = today, steady
        self._date, self._at = today(), steady()

    def hear(self, date: datetime | None) -> float:
        """Slurm has said what time it is, just now; None: it did not say.

        Returns:
            By how many seconds this machine is ahead; 0: not so that it matters.
        """
        self._date, self._at = self._today(), self._steady()
        if date is None or abs(ahead_s := (self._date - date).total_seconds()) <= _NO_SKEW_S:
            return 0.0
        # Of the second that was cut off nobody knows; a deadline is better too early.
        self._date = date + timedelta(seconds=1)
        return ahead_s

    def now(self) -> datetime:
        return self._date + timedelta(seconds=self._steady() - self._at)
