"""Who may stand at the lead's port: agents that proved themselves, and a bounded row of strangers.

Anybody on the cluster can connect. A stranger that finds the row full pushes out the one that has stood in it longest,
so a thousand that say nothing keep no agent out: an agent proves itself within milliseconds, and is in the row no
longer. Links have places of their own, which no stranger takes.
"""

import asyncio
import resource
from collections import Counter
from collections.abc import Callable
from typing import Literal

from verl_slurm.errors import WireError

__all__ = ["ROW", "Entrance", "Refusal", "make_room", "thinned"]

Refusal = Literal["silent", "left", "no_token", "crowded", "full"]
"""Did not end the handshake in time; went away in it; does not know the token; pushed out by newer ones; proved itself
where all links are taken. Closed: it is a metric's label."""

ROW = 512
"""Strangers at once, besides as many as there may be links: those may all be agents that come together. Far more than
the kernel hands over at once (`listen`'s backlog), so that one who has just come has time for its proof."""


class Entrance:
    """Counts heads; holds no socket open by itself. Called by: `channel.serve`.

    Args:
        max_links: proven peers at once.
        refused: told of everyone who was turned away, and why.
    """

    def __init__(self, max_links: int, refused: Callable[[Refusal], None]) -> None:
        self._max_links, self._refused = max_links, refused
        self._links = 0
        self._row: dict[asyncio.WriteTransport, None] = {}  # in the order in which they came

    @property
    def most_strangers(self) -> int:
        return ROW + self._max_links

    def arrive(self, transport: asyncio.WriteTransport) -> None:
        """Somebody has connected."""
        while len(self._row) >= self.most_strangers:
            oldest = next(iter(self._row))
            del self._row[oldest]
            self._refused("crowded")
            oldest.abort()
        self._row[transport] = None

    def turn_away(self, transport: asyncio.WriteTransport, error: Exception) -> None:
        """The handshake came to nothing."""
        transport.abort()
        if transport not in self._row:
            return  # pushed out, and counted
        del self._row[transport]
        if isinstance(error, WireError):
            self._refused("no_token")
        else:
            self._refused("silent" if isinstance(error, TimeoutError) else "left")

    def admit(self, transport: asyncio.WriteTransport) -> bool:
        """It knows the token; whether there is a place for it."""
        if transport in self._row:
            del self._row[transport]
            if self._links < self._max_links:
                self._links += 1
                return True
            self._refused("full")
        transport.abort()
        return False

    def leave(self) -> None:
        """A link has ended."""
        self._links -= 1


def thinned(tell: Callable[[Refusal, int], None]) -> Callable[[Refusal], None]:
    """Tell of the first, the tenth, the hundredth of each kind: whoever connects must not fill a journal.

    Called by: `lead`.
    """
    seen: Counter[Refusal] = Counter()

    def count(why: Refusal) -> None:
        seen[why] += 1
        if str(seen[why]).strip("0") == "1":
            tell(why, seen[why])

    return count


def make_room(sockets: int) -> None:
    """See to it that this process may have so many, as far as it may say so itself.

    The usual soft limit of 1,024 descriptors is less than a thousand agents and the files of a lead. Where the hard
    limit is lower still, asyncio stops to accept for a second whenever it is reached, and goes on.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = sockets + _OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


_OWN_FILES = 256
