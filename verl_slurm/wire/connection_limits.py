"""Limits the connections of one port: a bounded row of strangers, and places of their own for proven peers.

Every user of the node or the network can connect. A stranger that finds the row full pushes out the one that has stood
in it longest. So thousands of connections that say nothing keep no peer out: a peer proves itself (the control port's
handshake, the bearer token of an HTTP port) within milliseconds, and is in the row no longer.
"""

import asyncio
import resource
from collections.abc import Callable

from verl_slurm.base.errors import WireError

__all__ = ["REASONS", "ROW", "ConnectionLimits", "make_room"]

REASONS = ("silent", "left", "token", "crowded", "full")
"""Did not prove itself in time; went away before; does not know the token; pushed out by newer ones; proved itself
where all places are taken."""

ROW = 512
"""Strangers at once, besides as many as there may be proven peers: those may all come together. Far more than the
kernel hands over at once (`listen`'s backlog), so that a peer that has just come has time for its proof."""


class ConnectionLimits:
    """Counts connections; holds no socket open by itself. For the event loop's thread.

    Args:
        max_proven: proven peers at once.
        refused: told of each connection that was turned away: the reason, and the peer's address.
    """

    def __init__(self, max_proven: int, refused: Callable[[str, str], None] = lambda *_: None) -> None:
        self._max_proven, self._refused = max_proven, refused
        self._proven = 0
        self._row: dict[asyncio.WriteTransport, None] = {}  # in the order in which they came

    @property
    def most_strangers(self) -> int:
        return ROW + self._max_proven

    def arrive(self, transport: asyncio.WriteTransport) -> None:
        """A connection has come."""
        while len(self._row) >= self.most_strangers:
            oldest = next(iter(self._row))
            del self._row[oldest]
            self._refused("crowded", _peer(oldest))
            oldest.abort()
        self._row[transport] = None

    def turn_away(self, transport: asyncio.WriteTransport, error: Exception) -> None:
        """It has ended unproven."""
        transport.abort()
        if transport not in self._row:
            return  # pushed out, and counted
        del self._row[transport]
        if isinstance(error, WireError):
            self._refused("token", _peer(transport))
        else:
            self._refused("silent" if isinstance(error, TimeoutError) else "left", _peer(transport))

    def admit(self, transport: asyncio.WriteTransport) -> bool:
        """It knows the token. Returns whether there is a place for it; without one it is cut."""
        if transport in self._row:
            del self._row[transport]
            if self._proven < self._max_proven:
                self._proven += 1
                return True
            self._refused("full", _peer(transport))
        transport.abort()
        return False

    def leave(self) -> None:
        """A proven peer's connection has ended."""
        self._proven -= 1


def _peer(transport: asyncio.WriteTransport) -> str:
    return str((transport.get_extra_info("peername") or ("?",))[0])


def make_room(sockets: int) -> None:
    """Raise this process's limit of open descriptors to so many sockets of one port, as far as it is allowed to.

    The usual soft limit of 1,024 descriptors is less than a thousand agents and the files of a lead. Where the hard
    limit is lower still, asyncio stops to accept for a second whenever it is reached, and goes on.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = sockets + _OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


_OWN_FILES = 1024
"""Files, and the rows of a second port: a lead has one for its agents and one for metrics."""
