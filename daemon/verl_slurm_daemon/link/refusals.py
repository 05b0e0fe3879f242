"""Counts refused connections. The first, tenth, hundredth, ... is reported, so that no stranger fills a disk."""

from collections.abc import Callable

__all__ = ["Refusals"]


class Refusals:
    """The refusals at one port or socket.

    Args:
        reasons: all possible reasons; a stranger's text never becomes one.
        tell: called with the reason, the peer, and the count so far.
    """

    def __init__(self, reasons: tuple[str, ...], tell: Callable[[str, str, int], None]) -> None:
        self.counts = dict.fromkeys(reasons, 0)
        self._tell, self._next = tell, 1

    def add(self, reason: str, peer: str) -> None:
        """Counts one more."""
        self.counts[reason] += 1
        total = sum(self.counts.values())
        if total >= self._next:
            self._next = 10 * total
            self._tell(reason, peer, total)
