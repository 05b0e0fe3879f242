"""Keeps the pace of one restart from its ranks' messages: waits for a hang, and names stragglers (`decide.rank_pace`).

Time during which this process itself stood still does not count as silence.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Self

from verl_slurm.config.schema import DaemonConfig, RunConfig
from verl_slurm.journal.events import Notice, Warned
from verl_slurm.wire.messages import Finished, FromRank, Progress, RankStarted, SaveStarted
from verl_slurm_daemon.decide.rank_pace import HangWatch, StragglerWatch

_HANG_FACTOR = 5.0
"""A rank counts as hung after this many times the longest pause so far."""
_LEAST_LOOK_S = 0.1
_MOST_LOOK_S = 10.0
"""The longest stop, in seconds, that may go unnoticed."""
_LATE_S = 1.0
"""Seconds by which a look must be late to show a stop rather than a busy machine."""


class PaceWatch:
    """Watches the pace of one restart. `clock`: monotonic seconds. `stragglers`: None compares no ranks."""

    def __init__(
        self,
        config: DaemonConfig,
        clock: Callable[[], float] = time.monotonic,
        stragglers: StragglerWatch | None = None,
    ) -> None:
        self._hang = HangWatch(_HANG_FACTOR, config.hang_floor_s, config.load_timeout_s)
        self._node_of: dict[int, str] = {}
        self._stragglers = stragglers
        self._clock, self._stood_still_s = clock, 0.0
        self._next_look: float | None = None

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Returns the watch of a restart with this configuration."""
        compared = StragglerWatch(config.health.straggler_factor, config.speakers)
        return cls(config.daemon, stragglers=compared)

    @property
    def stragglers(self) -> list[str]:
        """Returns the ranks that are slow now, with their nodes."""
        slow = () if self._stragglers is None else self._stragglers.slow
        return [f"rank {rank} on {self._node_of.get(rank, '?')}" for rank in slow]

    def awake_s(self) -> float:
        """Returns the clock without the time during which this process stood still."""
        now = self._clock()
        # `scontrol suspend` and gang scheduling stop the lead with its ranks, and storage that hangs stops the lead
        # alone. A look that comes late reveals such a stop.
        if self._next_look is not None and now - self._next_look > _LATE_S:
            self._stood_still_s += now - self._next_look
            self._next_look = now + _MOST_LOOK_S  # counted once; the look itself is due at once
        return now - self._stood_still_s

    def hear(self, node: str, message: FromRank) -> list[Notice]:
        """Takes note of a message from a rank of `node`; returns what is new for the journal."""
        news: list[Notice] = []
        match message:
            case RankStarted(rank=rank, by_program=by_program):
                self._node_of[rank] = node
                self._hang.started(rank, self.awake_s(), by_program)
            case Progress(rank=rank, safe_points=safe_points):
                self._hang.passed(rank, safe_points, self.awake_s())
                if self._stragglers is not None:
                    for one in self._stragglers.passed(rank, safe_points, message.own_s):
                        form = Warned if one.slow else Notice
                        news.append(form("straggler", f"{self._node_of.get(one.rank, '?')}: {one.words}"))
            case SaveStarted(rank=rank):
                self._hang.saves(rank, self.awake_s())
            case Finished(rank=rank):
                self._hang.finished(rank, self.awake_s())
        return news

    async def hang(self) -> tuple[str, str]:
        """Waits until a rank has been silent for too long. Returns its node (empty: not known) and a text."""
        while (silence := self._hang.silence(self.awake_s())) is None:
            # Short looks also where nothing is due for long: a stop that falls between two looks counts as silence.
            pause = min(max(self._hang.next_look_s(self.awake_s()), _LEAST_LOOK_S), _MOST_LOOK_S)
            self._next_look = self._clock() + pause
            await asyncio.sleep(pause)  # silence is no event
        # Ranks of several nodes at one safe point: any of them may be the one that hangs, so no node is blamed.
        nodes = {self._node_of.get(rank, "") for rank in silence.ranks}
        return (nodes.pop() if len(nodes) == 1 else ""), silence.words
