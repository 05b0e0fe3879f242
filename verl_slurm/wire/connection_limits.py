"""Limits the connections of one port: a bounded queue of strangers, and separate places for proven peers.

Every user of the node or the network can connect. A stranger that finds the queue full evicts the one that has been in
it longest. So thousands of silent connections keep no peer out: a peer proves itself within milliseconds (by the
control port's handshake, or the bearer token of an HTTP port) and leaves the queue.
"""

import asyncio
import resource
from collections.abc import Callable

from verl_slurm.base.errors import WireError

REASONS = ("silent", "left", "token", "crowded", "full")
"""Reasons for a refusal: no proof in time; left before it; does not know the token; evicted by newer connections;
proven while all places are taken."""

# Far longer than what the kernel hands over at once (`listen`'s backlog), so a new peer has time for its
# proof.
ROW = 512
"""Strangers at once, in addition to the number of proven peers, who may all come together."""


class ConnectionLimits:
    """Counts connections; holds no socket open by itself. Runs in the event loop's thread.

    `refused` is called for each connection that was turned away, with the reason and the peer's address.
    """

    def __init__(self, max_proven: int, refused: Callable[[str, str], None] = lambda *_: None) -> None:
        self._max_proven, self._refused = max_proven, refused
        self._proven = 0
        self._row: dict[asyncio.WriteTransport, None] = {}  # in the order of arrival

    @property
    def most_strangers(self) -> int:
        return ROW + self._max_proven

    def arrive(self, transport: asyncio.WriteTransport) -> None:
        """Registers a new connection."""
        # The oldest leaves, not the newcomer: an honest peer needs milliseconds here, a silent stranger all the time
        # there is.
        while len(self._row) >= self.most_strangers:
            oldest = next(iter(self._row))
            del self._row[oldest]
            self._refused("crowded", _peer(oldest))
            # No close(): that waits until its buffer is sent, and a stranger may read nothing.
            oldest.abort()
        self._row[transport] = None

    def turn_away(self, transport: asyncio.WriteTransport, error: Exception) -> None:
        """Records that a connection ended unproven."""
        transport.abort()
        if transport not in self._row:
            return  # evicted, and counted
        del self._row[transport]
        if isinstance(error, WireError):
            self._refused("token", _peer(transport))
        else:
            self._refused("silent" if isinstance(error, TimeoutError) else "left", _peer(transport))

    def admit(self, transport: asyncio.WriteTransport) -> bool:
        """Gives a connection that knows the token its place; returns False if there is none, and cuts it."""
        # Else it was pushed out while its proof was checked.
        if transport in self._row:
            del self._row[transport]
            if self._proven < self._max_proven:
                self._proven += 1
                return True
            self._refused("full", _peer(transport))
        transport.abort()
        return False

    def leave(self) -> None:
        """Records the end of a proven peer's connection."""
        self._proven -= 1


def _peer(transport: asyncio.WriteTransport) -> str:
    return str((transport.get_extra_info("peername") or ("?",))[0])


def make_room(sockets: int) -> None:
    """Raises this process's limit of open descriptors to so many sockets of one port, as far as it may."""
    # The usual soft limit of 1,024 descriptors is too low for a thousand agents and the files of a lead. If
    # the hard limit is lower still, asyncio stops accepting for a second whenever it is reached, and then
    # continues.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = sockets + _OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # Without privilege the soft limit goes up to the hard one.
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Files, and the rows of a second port: a lead has one port for its agents and one for metrics.
_OWN_FILES = 1024
