"""Who was not let in: counted each time, told at the first, tenth, hundredth, ... so that no stranger fills a disk."""

from collections.abc import Callable

__all__ = ["Refusals"]


class Refusals:
    """Of one door.

    Args:
        reasons: all there are; no text of a stranger's becomes one.
        tell: is given the reason, the peer, and how many there have been.
    """

    def __init__(self, reasons: tuple[str, ...], tell: Callable[[str, str, int], None]) -> None:
        self.counts = dict.fromkeys(reasons, 0)
        self._tell, self._next = tell, 1

    def add(self, reason: str, peer: str) -> None:
        """One more."""
        self.counts[reason] += 1
        total = sum(self.counts.values())
        if total >= self._next:
            self._next = 10 * total
            self._tell(reason, peer, total)
