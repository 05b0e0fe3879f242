"""The TCP channel between lead and agents: sockets here, bytes and rules in `verl_slurm.wire.framing`.

`Refusals` counts refused connections, of this port and of an agent's sockets, and reports some of them.
"""

import asyncio
import contextlib
import hmac
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

from verl_slurm.base.errors import WireError
from verl_slurm.wire.connection_limits import ConnectionLimits, make_room
from verl_slurm.wire.framing import HELLO, NONCE_BYTES, PROOF_BYTES, Framer, proof, session_key
from verl_slurm.wire.lead_file import LeadAddress
from verl_slurm.wire.messages import FromAgent, ToAgent


class Refusals:
    """The refusals at one port or socket. `tell` is called with the reason, the peer, and the count so far."""

    def __init__(self, reasons: tuple[str, ...], tell: Callable[[str, str, int], None]) -> None:
        # All possible reasons; a stranger's text never becomes one.
        self.counts = dict.fromkeys(reasons, 0)
        self._tell, self._next = tell, 1

    def add(self, reason: str, peer: str) -> None:
        """Counts one more."""
        self.counts[reason] += 1
        total = sum(self.counts.values())
        if total >= self._next:
            # The first, tenth, hundredth, ... is reported, so that no stranger fills a disk.
            self._next = 10 * total
            self._tell(reason, peer, total)


_HANDSHAKE_S = 5.0
_READ_BYTES = 64 * 1024
_BACKLOG, MOST_BACKLOG = 128, 4096
# It outlasts the restart of a switch, after which everything that was sent meanwhile arrives. A stopped or
# slow process does not count as silent at first: its kernel acknowledges for it until the unread bytes fill
# its buffer. If it still reads nothing for this long, the link is given up, too.
_SILENCE_S = 180
"""Seconds without an acknowledgement after which a link is dead: a node without power sends nothing more."""


Sent = TypeVar("Sent")
Heard = TypeVar("Heard")


class _Link(Generic[Sent, Heard]):
    """One end of a connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, framer: Framer[Any]
    ) -> None:
        self._reader, self._writer, self._framer = reader, writer, framer

    def send(self, message: Sent) -> None:
        """Hands one message to the kernel. A broken link shows by its end, not by an error here."""
        if not self._writer.is_closing():
            # Without drain(): asyncio keeps what the kernel does not take, so one slow agent holds up neither lead nor
            # others.
            self._writer.write(self._framer.encode(message))

    async def messages(self, deliver: Callable[[Heard], None]) -> None:
        """Passes every message to `deliver` until the link ends. Raises OSError: it broke."""
        while data := await self._reader.read(_READ_BYTES):
            for message in self._framer.feed(data):
                deliver(message)


class AgentLink(_Link[ToAgent, FromAgent]):
    """The lead's end of the connection to one agent."""

    def close(self) -> None:
        self._writer.close()


async def serve(
    host: str,
    token: bytes,
    attempt: int,
    max_links: int,
    on_link: Callable[[AgentLink], Awaitable[None]],
    refused: Callable[[str, str], None] = lambda *_: None,
) -> tuple[asyncio.Server, int]:
    """Listens as `serve_proven` does, for messages. `on_link` runs for each peer that proved it knows the token."""

    async def on_peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> None:
        # The direction (`L`) is part of each MAC: no frame can be sent back to its sender.
        await on_link(AgentLink(reader, writer, Framer(key, b"L", FromAgent)))

    return await serve_proven(host, token, attempt, max_links, on_peer, refused)


async def serve_proven(
    host: str,
    token: bytes,
    attempt: int,
    max_links: int,
    on_peer: Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]],
    refused: Callable[[str, str], None] = lambda *_: None,
) -> tuple[asyncio.Server, int]:
    """Listens on a free port. `on_peer` runs for each peer that proved it knows the token, with the session's
    key.

    Args:
        host: the address that peers will be given. It listens there if it is a loopback address, else on all
            interfaces.
        refused: called for every other peer with one of `connection_limits.REASONS` and the peer's address.

    Peers that do not finish the handshake in 5 s are dropped, and sooner if newer ones push them out.
    """
    limits = ConnectionLimits(max_links, refused)

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transport: Any = writer.transport
        transport.max_size = _READ_BYTES  # asyncio would allocate 256 KiB for each read of each unproven peer
        _notice_silence(writer)
        limits.arrive(transport)
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                # ---- a stranger, in the row of strangers, until it has proved that it knows the token
                key = await _greet_agent(reader, writer, token, attempt)
        except (WireError, TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            limits.turn_away(transport, error)
            return
        if not limits.admit(transport):
            return
        # ---- a peer with a place of its own
        try:
            await on_peer(reader, writer, key)
        except (WireError, OSError):
            pass  # a peer that died; the code that waits for it notices
        finally:
            limits.leave()
            await _close(writer)

    # All agents of a large job connect within milliseconds. One that finds the queue full retries after a
    # second.
    backlog = min(max(_BACKLOG, max_links), MOST_BACKLOG)
    make_room(max_links + limits.most_strangers + backlog)
    # On the node itself its name may mean 127.0.1.1.
    everywhere = "::" if ":" in host else "0.0.0.0"  # noqa: S104 - every peer must know the token
    server = await asyncio.start_server(
        on_connection, host if host.startswith("127.") else everywhere, port=0, backlog=backlog
    )
    port = int(server.sockets[0].getsockname()[1])
    return server, port


async def _greet_agent(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes, attempt: int
) -> bytes:
    # Each side brings a nonce, so that no proof of an earlier session counts, and each session has a key of its own.
    nonce_lead = secrets.token_bytes(NONCE_BYTES)
    writer.write(HELLO + nonce_lead)
    answer = await reader.readexactly(NONCE_BYTES + PROOF_BYTES)
    nonce_agent, theirs = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(theirs, proof(token, b"agent", attempt, nonce_lead, nonce_agent)):
        raise WireError("a peer does not know the token")
    writer.write(proof(token, b"lead", attempt, nonce_agent, nonce_lead))
    return session_key(token, attempt, nonce_lead, nonce_agent)


class LeadLink(_Link[FromAgent, ToAgent]):
    """The agent's end of the connection to the lead."""

    @property
    def own_host(self) -> str:
        """Returns this node's address on the network that reaches the lead: the address to rendezvous on."""
        return str(self._writer.get_extra_info("sockname")[0])

    async def messages(self, deliver: Callable[[ToAgent], None]) -> None:
        """Passes every message to `deliver` until the lead is gone."""
        # A reset is one of the ways in which a lead ends; what it means is decided elsewhere (`leaving`).
        with contextlib.suppress(ConnectionError):
            await super().messages(deliver)

    async def close(self) -> None:
        """Sends what is still in the buffer, bounded in time, and closes."""
        try:
            async with asyncio.timeout(1.0):
                # NodeExited may be in the buffer. Bounded, because a lead that is gone takes nothing, and KillWait
                # runs.
                await self._writer.drain()
                self._writer.close()
                await self._writer.wait_closed()
        except (TimeoutError, OSError):
            return


async def connect(host: str, port: int, token: bytes, attempt: int) -> LeadLink:
    """Connects to the lead; both sides prove that they know the token. Raises as `connect_proven`."""
    reader, writer, key = await connect_proven(host, port, token, attempt)
    return LeadLink(reader, writer, Framer(key, b"A", ToAgent))


async def connect_proven(
    host: str, port: int, token: bytes, attempt: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
    """Connects to a port of `serve_proven`, also for the session's key. WireError: other token or attempt."""
    async with asyncio.timeout(_HANDSHAKE_S):
        reader, writer = await asyncio.open_connection(host, port)
        _notice_silence(writer)
        try:
            key = await _greet_lead(reader, writer, token, attempt, f"{host}:{port}")
        # A time-out or a cancel, too: an open connection would take a place in the lead's row of strangers.
        except BaseException:
            await _close(writer)
            raise
    return reader, writer, key


async def _greet_lead(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes, attempt: int, where: str
) -> bytes:
    hello = await reader.readexactly(len(HELLO) + NONCE_BYTES)
    if not hello.startswith(HELLO):
        raise WireError("the peer is not a lead", where=where, expected=HELLO.decode())
    nonce_lead, nonce_agent = hello[len(HELLO) :], secrets.token_bytes(NONCE_BYTES)
    writer.write(nonce_agent + proof(token, b"agent", attempt, nonce_lead, nonce_agent))
    theirs = await reader.readexactly(PROOF_BYTES)
    if not hmac.compare_digest(theirs, proof(token, b"lead", attempt, nonce_agent, nonce_lead)):
        raise WireError("the lead does not know the token", where=where)
    return session_key(token, attempt, nonce_lead, nonce_agent)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def _notice_silence(writer: asyncio.StreamWriter) -> None:
    """Sets TCP's limits. Without them an idle link never ends, and one with data under way ends after 15 minutes."""
    connection: socket.socket = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):  # the kernel may not know one of these options
        # Keepalive finds the end of an idle link: a third of the time, then eight probes a twelfth of it apart. While
        # data is under way the kernel sends no probes, and TCP_USER_TIMEOUT counts.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(_SILENCE_S // 3, 1))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(_SILENCE_S // 12, 1))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 8)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000)


CONNECT_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0)


async def reach_lead(
    address: LeadAddress, attempt: int, warned: asyncio.Event, pauses: Sequence[float] = CONNECT_PAUSES_S
) -> LeadLink:
    """Connects, with tries until the lead has a free place or `warned` is set. Raises WireError: in vain."""
    # Unknown peers may hold all places for some seconds.
    for pause in (*pauses, None):
        try:
            return await connect(address.host, address.port, bytes.fromhex(address.token), attempt)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            if pause is None or warned.is_set():
                raise WireError(
                    "the lead cannot be reached",
                    where=f"{address.host}:{address.port}",
                    found=f"{type(error).__name__} {error}",
                    remedy="are TCP connections between the job's nodes allowed?",
                ) from error
            # Slurm's TERM means that there may soon be nobody to reach, nor anybody who tries.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(warned.wait(), pause)
    raise AssertionError("unreachable")
