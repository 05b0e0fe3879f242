"""How a rank hears that it should save, and how all ranks come to hear it at the same safe point.

The daemon writes a request into the control page of each node, at slightly different moments. So at every
safe point the ranks combine what each has read with one tiny all-reduce on the CPU; from the same numbers
all draw the same conclusion. Nothing happens in a signal handler: a rank that computes is asked at its next
safe point, and one that hangs is the daemon's business.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Agreement", "Asked", "Order", "Page", "Stopper"]


_NO_HURRY = -(2**62)


class Asked(Protocol):
    """One request, as a page shows it (`wire.control_page.Request`)."""

    @property
    def request_id(self) -> int: ...
    @property
    def stop(self) -> bool: ...
    @property
    def deadline_ns(self) -> int: ...


class Page(Protocol):
    """What a rank reads at a safe point (`wire.client.RankLine`). Costs one memory read, never blocks."""

    def request(self) -> Asked | None: ...


@dataclass(frozen=True)
class Order:
    """What all ranks do now: save, and then leave if `stop`."""

    request_id: int
    stop: bool
    seconds_left: float | None = None
    """Until the ranks must be gone, on the node where that is soonest; None: no deadline."""

    def less(self, seconds: float) -> float | None:
        """What is left after `seconds` more."""
        return None if self.seconds_left is None else max(0.0, self.seconds_left - seconds)


@dataclass(frozen=True)
class Agreement:
    """What the ranks know of each other at a safe point; the same on every rank.

    Attributes:
        order: one that is new to this run; None: train on.
        busy: some rank still writes the checkpoint that was begun last.
    """

    order: Order | None
    busy: bool


class Stopper:
    """Asks the page and the other ranks; remembers what was already obeyed.

    Args:
        page: this rank's line to its daemon.
        greatest: the maximum of each number over all ranks; collective (`Collective.max`).
        clock_ns: CLOCK_MONOTONIC.

    Called by: trainer.loop, on every rank at every safe point; guest.loop at every step's end.
    """

    def __init__(
        self,
        page: Page,
        greatest: Callable[[Sequence[int]], list[int]],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._page, self._greatest, self._clock_ns = page, greatest, clock_ns
        self._obeyed = 0

    def agree(self, *, busy: bool = False) -> Agreement:
        """Exchange what each rank has read and whether it is `busy` saving. Collective.

        A request to stop is not lost when a newer one, to save only, is seen by some ranks first: the ids
        of the newest request and of the newest that says stop travel separately.
        """
        asked = self._page.request()
        mine = (0, 0) if asked is None else (asked.request_id, asked.request_id if asked.stop else 0)
        deadline_ns = asked.deadline_ns if asked is not None else 0
        # Negative, so that the greatest is the soonest; no two nodes have the same monotonic clock.
        hurry_ms = -(max(0, deadline_ns - self._clock_ns()) // 1_000_000) if deadline_ns else _NO_HURRY
        newest, newest_stop, any_busy, hurry_ms = self._greatest((*mine, int(busy), hurry_ms))
        if newest <= self._obeyed:
            return Agreement(None, bool(any_busy))
        left = None if hurry_ms == _NO_HURRY else -hurry_ms / 1000
        order = Order(request_id=newest, stop=newest_stop > self._obeyed, seconds_left=left)
        self._obeyed = newest
        return Agreement(order, bool(any_busy))
