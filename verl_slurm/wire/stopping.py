"""Tells a rank that it should save, and makes all ranks agree on the same safe point.

The daemon writes a request into the control page of each node, at slightly different moments. So at every safe point
the ranks combine their readings with one tiny all-reduce on the CPU. From the same numbers all ranks draw the same
conclusion. No signal handler does any work: a computing rank is asked at its next safe point, and the daemon handles a
hanging one.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl_slurm.wire.client import RankLine
from verl_slurm.wire.messages import SaveRequest

_NO_HURRY = -(2**62)


@dataclass(frozen=True)
class Agreement:
    """The ranks' common state at a safe point; the same on every rank."""

    request: SaveRequest | None
    """New to this run: all ranks save now, and leave if it says `stop`. Its `seconds_left` are those of the
    node that has the fewest. None: train on.
    """
    busy: bool
    """Some rank still writes the previous checkpoint."""


class Stopper:
    """Reads the page, asks the other ranks and remembers which requests were obeyed. One on every rank.

    `greatest`: the maximum of each number over all ranks; collective (`Collective.max`).
    """

    def __init__(self, line: RankLine, greatest: Callable[[Sequence[int]], list[int]]) -> None:
        self._line, self._greatest = line, greatest
        self._obeyed = 0

    def agree(self, *, busy: bool = False) -> Agreement:
        """Exchanges each rank's reading and whether it is `busy` saving. Collective."""
        read = self._line.request()
        # The ids of the newest request and of the newest stop travel separately: a request to stop is not
        # lost if some ranks first see a newer one that only saves.
        mine = (0, 0) if read is None else (read.request_id, read.request_id if read.stop else 0)
        left = None if read is None else read.seconds_left
        # Negative, so that the maximum is the soonest; no two nodes have the same monotonic clock.
        hurry_ms = _NO_HURRY if left is None else -int(max(0.0, left) * 1000)
        # One collective for all four numbers, at each safe point.
        began = time.monotonic()
        newest, newest_stop, any_busy, hurry_ms = self._greatest((*mine, int(busy), hurry_ms))
        self._line.waited(time.monotonic() - began)
        # The page shows a request for as long as no newer one replaces it.
        if newest <= self._obeyed:
            return Agreement(None, bool(any_busy))
        left = None if hurry_ms == _NO_HURRY else -hurry_ms / 1000
        request = SaveRequest(request_id=newest, stop=newest_stop > self._obeyed, seconds_left=left)
        self._obeyed = newest
        return Agreement(request, bool(any_busy))
