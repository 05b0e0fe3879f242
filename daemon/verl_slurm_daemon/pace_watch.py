"""Keeps the pace of one generation, from what its ranks say, and waits for a hang. What a hang is: `hang.py`."""

import asyncio
import time

from verl_slurm.config.schema import DaemonConfig
from verl_slurm.wire.messages import Finished, FromRank, Progress, RankStarted
from verl_slurm_daemon.hang import HangWatch

__all__ = ["PaceWatch"]

_LEAST_LOOK_S = 0.1


class PaceWatch:
    """See the module. Called by: effects, one a generation."""

    def __init__(self, config: DaemonConfig) -> None:
        self._hang = HangWatch(config.hang_factor, config.hang_floor_s, config.load_timeout_s)
        self._node_of: dict[int, str] = {}

    def hear(self, node: str, message: FromRank) -> None:
        """A rank of `node` has said something."""
        match message:
            case RankStarted(rank=rank):
                self._node_of[rank] = node
                self._hang.started(rank, time.monotonic())
            case Progress(rank=rank, safe_points=safe_points):
                self._hang.passed(rank, safe_points, time.monotonic())
            case Finished(rank=rank):
                self._hang.finished(rank)

    async def hang(self) -> tuple[str, str]:
        """Wait until a rank has been silent for too long: its node (empty: not known), and words for people."""
        while (silence := self._hang.silence(time.monotonic())) is None:  # noqa: ASYNC110 - silence is no event
            await asyncio.sleep(max(self._hang.next_look_s(time.monotonic()), _LEAST_LOOK_S))
        nodes = {self._node_of.get(rank, "") for rank in silence.ranks}
        return (nodes.pop() if len(nodes) == 1 else ""), silence.words
