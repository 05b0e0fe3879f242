"""Who may stand at the lead's port: agents that proved themselves, and a bounded row of strangers.

Anybody on the cluster can connect. A stranger that finds the row full pushes out the one that has stood in it longest,
so a thousand that say nothing keep no agent out: an agent proves itself within milliseconds, and is in the row no
longer. Links have places of their own, which no stranger takes.
"""

import asyncio
import resource
from collections.abc import Callable

from verl_slurm.errors import WireError

__all__ = ["REASONS", "ROW", "Entrance", "make_room"]

REASONS = ("silent", "left", "token", "crowded", "full")
"""Did not end the handshake in time; went away in it; does not know the token; pushed out by newer ones; proved itself
where all links are taken."""

ROW = 512
"""Strangers at once, besides as many as there may be links: those may all be agents that come together. Far more than
the kernel hands over at once (`listen`'s backlog), so that one who has just come has time for its proof."""


class Entrance:
    """Counts heads; holds no socket open by itself. Called by: `channel.serve`.

    Args:
        max_links: proven peers at once.
        refused: told of everyone who was turned away: the reason, and who.
    """

    def __init__(self, max_links: int, refused: Callable[[str, str], None]) -> None:
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
            self._refused("crowded", _peer(oldest))
            oldest.abort()
        self._row[transport] = None

    def turn_away(self, transport: asyncio.WriteTransport, error: Exception) -> None:
        """The handshake came to nothing."""
        transport.abort()
        if transport not in self._row:
            return  # pushed out, and counted
        del self._row[transport]
        if isinstance(error, WireError):
            self._refused("token", _peer(transport))
        else:
            self._refused("silent" if isinstance(error, TimeoutError) else "left", _peer(transport))

    def admit(self, transport: asyncio.WriteTransport) -> bool:
        """It knows the token; whether there is a place for it."""
        if transport in self._row:
            del self._row[transport]
            if self._links < self._max_links:
                self._links += 1
                return True
            self._refused("full", _peer(transport))
        transport.abort()
        return False

    def leave(self) -> None:
        """A link has ended."""
        self._links -= 1


def _peer(transport: asyncio.WriteTransport) -> str:
    return str((transport.get_extra_info("peername") or ("?",))[0])


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
