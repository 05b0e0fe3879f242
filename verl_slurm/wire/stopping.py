"""How a rank hears that it should save, and how all ranks come to hear it at the same safe point.

The daemon writes a request into the control page of each node, at slightly different moments. So at every
safe point the ranks combine what each has read with one tiny all-reduce on the CPU; from the same numbers
all draw the same conclusion. Nothing happens in a signal handler: a rank that computes is asked at its next
safe point, and one that hangs is the daemon's business.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl_slurm.wire.client import RankLine
from verl_slurm.wire.messages import SaveRequest

__all__ = ["Agreement", "Stopper"]


_NO_HURRY = -(2**62)


@dataclass(frozen=True)
class Agreement:
    """What the ranks know of each other at a safe point; the same on every rank.

    Attributes:
        request: one that is new to this run: all save now, and leave if it says `stop`; its `seconds_left` are those of
            the node where they are fewest. None: train on.
        busy: some rank still writes the checkpoint that was begun last.
    """

    request: SaveRequest | None
    busy: bool


class Stopper:
    """Reads the page and asks the other ranks; remembers what was already obeyed. Of every rank.

    Args:
        line: this rank's, to its daemon.
        greatest: the maximum of each number over all ranks; collective (`Collective.max`).
    """

    def __init__(self, line: RankLine, greatest: Callable[[Sequence[int]], list[int]]) -> None:
        self._line, self._greatest = line, greatest
        self._obeyed = 0

    def agree(self, *, busy: bool = False) -> Agreement:
        """Exchange what each rank has read and whether it is `busy` saving. Collective.

        A request to stop is not lost when a newer one, to save only, is seen by some ranks first: the ids
        of the newest request and of the newest that says stop travel separately.
        """
        read = self._line.request()
        mine = (0, 0) if read is None else (read.request_id, read.request_id if read.stop else 0)
        left = None if read is None else read.seconds_left
        # Negative, so that the greatest is the soonest; no two nodes have the same monotonic clock.
        hurry_ms = _NO_HURRY if left is None else -int(max(0.0, left) * 1000)
        newest, newest_stop, any_busy, hurry_ms = self._greatest((*mine, int(busy), hurry_ms))
        if newest <= self._obeyed:
            return Agreement(None, bool(any_busy))
        left = None if hurry_ms == _NO_HURRY else -hurry_ms / 1000
        request = SaveRequest(request_id=newest, stop=newest_stop > self._obeyed, seconds_left=left)
        self._obeyed = newest
        return Agreement(request, bool(any_busy))
