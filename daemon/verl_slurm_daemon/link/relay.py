"""Carries connections of ranks to services: an end in each agent, and an end in each service's host.

```
rank ──▶ 127.0.0.1 of its node, the agent's port ──proof──▶ the host's port on the service's node ──▶ the service
```

A rank sends its token to a port that its own agent holds for as long as the rank lives. The agent asks the kernel who
has connected, and resets another user's connection. The ends prove to each other that they know the key
(`framing.relay_key`), so a port that a dead host leaves is of no use to another user. The host asks who listens before
it hands a connection on. No end knows what the bytes mean.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable

from verl_slurm.base.errors import VerlSlurmError, WireError
from verl_slurm.wire.connection_limits import make_room
from verl_slurm.wire.tcp_table import Listener, peers_of
from verl_slurm_daemon.link.channel import MOST_BACKLOG, connect_proven, serve_proven

MOST_CONNECTIONS = 512
"""From one node to one place of a service, at once. Further ones wait."""
_READ_BYTES = 64 * 1024
_LOOKS, _LOOK_S = 5, 0.01

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def open_near_end(
    far: str, key: bytes, attempt: int, tell: Callable[[str], None], refused: Callable[[str, str], None]
) -> tuple[asyncio.Server, str]:
    """Listens on 127.0.0.1 for the ranks of this node; returns the server and its address, `host:port`.

    Args:
        far: the address of the other end.
        tell: called if a stranger is at that address, and once if all connections are in use.
        refused: called for each connection that is not of this user, or that was closed at once, with one of
            `rank_socket.REASONS` and who it was.
    """
    host, _, port = far.rpartition(":")
    places = asyncio.Semaphore(MOST_CONNECTIONS)
    full = [f"all {MOST_CONNECTIONS} connections of this node to {far} are in use; further ones wait"]

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # Before it takes a place: another user's silent connections would keep the ranks out.
            owner = await peers.owner(writer.get_extra_info("peername"))
            if owner.stranger:
                refused("left" if owner.uid is None else "user", owner.name)
                _reset(writer)
                return
            if places.locked() and full:
                tell(full.pop())
            async with places:
                there = await connect_proven(host.strip("[]"), int(port), key, attempt)
                await _carry((reader, writer), there[:2])
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            _reset(writer)
        except WireError as error:
            _reset(writer)
            tell(error.one_line())

    make_room(2 * MOST_CONNECTIONS + MOST_BACKLOG)
    # Where more come at once than this queue takes, the kernel answers some with a reset.
    server = await asyncio.start_server(on_connection, "127.0.0.1", 0, backlog=MOST_BACKLOG)
    peers = _Peers(server.sockets[0].getsockname()[1])
    return server, "{}:{}".format(*server.sockets[0].getsockname())


class _Peers:
    """Tells who has connected to a port."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._next: asyncio.Future[dict[tuple[str, int], Listener]] | None = None

    async def owner(self, peer: tuple[str, int]) -> Listener:
        for _ in range(_LOOKS):
            if self._next is None:
                loop = asyncio.get_running_loop()
                self._next = loop.create_future()
                # A look at the kernel's table may take milliseconds: one serves all connections of a
                # hundredth of a second.
                loop.call_later(_LOOK_S, self._look, self._next)
            if found := (await asyncio.shield(self._next)).get(peer):
                return found
            # It is gone; or the kernel, which lists in pieces, has left it out.
        return Listener(None)

    def _look(self, waiting: asyncio.Future[dict[tuple[str, int], Listener]]) -> None:
        self._next = None
        waiting.set_result(peers_of(self._port))


async def open_far_end(
    host: str, key: bytes, attempt: int, nodes: int, reach: Callable[[], Awaitable[Streams]]
) -> tuple[asyncio.Server, int]:
    """Listens for the near ends of so many nodes. OSError or VerlSlurmError of `reach` ends one connection."""

    async def on_peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _key: bytes) -> None:
        try:
            await _carry((reader, writer), await reach())
        except (OSError, VerlSlurmError, asyncio.CancelledError):
            _reset(writer)

    return await serve_proven(host, key, attempt, nodes * MOST_CONNECTIONS, on_peer)


async def _carry(one: Streams, other: Streams) -> None:
    """Carries bytes both ways until both sides have ended, or one of them breaks."""
    ways = [asyncio.create_task(_pump(one[0], other[1])), asyncio.create_task(_pump(other[0], one[1]))]
    whole = False
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
        whole = all(way.done() and way.exception() is None for way in ways)
    finally:
        for way in ways:
            way.cancel()
        for _, writer in (one, other):
            # An answer may end with its connection: one that was cut must not look whole.
            writer.close() if whole else _reset(writer)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_READ_BYTES):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        connection: socket.socket = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
