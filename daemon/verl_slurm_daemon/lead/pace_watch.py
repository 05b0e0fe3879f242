"""Keeps the pace of one restart, from what its ranks say, and waits for a hang. What a hang is: `hang.py`.

Time in which this process itself stood still is nobody's silence: `scontrol suspend` and gang scheduling stop the lead
with its ranks, and storage that hangs stops the lead alone. It is seen by looks that come late, and left out.
"""

import asyncio
import time
from collections.abc import Callable

from verl_slurm.config.schema import DaemonConfig
from verl_slurm.wire.messages import Finished, FromRank, Progress, RankStarted, SaveStarted
from verl_slurm_daemon.decide.hang import HangWatch

__all__ = ["PaceWatch"]

_LEAST_LOOK_S = 0.1
_MOST_LOOK_S = 10.0
"""So much of a stop may go unnoticed."""
_LATE_S = 1.0
"""A look that comes so much too late shows a stop, and not a busy machine."""


class PaceWatch:
    """See the module.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, config: DaemonConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._hang = HangWatch(config.hang_factor, config.hang_floor_s, config.load_timeout_s)
        self._node_of: dict[int, str] = {}
        self._clock, self._stood_still_s = clock, 0.0
        self._next_look: float | None = None

    def awake_s(self) -> float:
        """The clock, without the time in which this process stood still."""
        now = self._clock()
        if self._next_look is not None and now - self._next_look > _LATE_S:
            self._stood_still_s += now - self._next_look
            self._next_look = now + _MOST_LOOK_S  # counted once; the look itself is due at once
        return now - self._stood_still_s

    def hear(self, node: str, message: FromRank) -> None:
        """A rank of `node` has said something."""
        match message:
            case RankStarted(rank=rank):
                self._node_of[rank] = node
                self._hang.started(rank, self.awake_s())
            case Progress(rank=rank, safe_points=safe_points):
                self._hang.passed(rank, safe_points, self.awake_s())
            case SaveStarted(rank=rank):
                self._hang.saves(rank, self.awake_s())
            case Finished(rank=rank):
                self._hang.finished(rank, self.awake_s())

    async def hang(self) -> tuple[str, str]:
        """Wait until a rank has been silent for too long: its node (empty: not known), and words for people."""
        while (silence := self._hang.silence(self.awake_s())) is None:
            pause = min(max(self._hang.next_look_s(self.awake_s()), _LEAST_LOOK_S), _MOST_LOOK_S)
            self._next_look = self._clock() + pause
            await asyncio.sleep(pause)  # silence is no event
        nodes = {self._node_of.get(rank, "") for rank in silence.ranks}
        return (nodes.pop() if len(nodes) == 1 else ""), silence.words
