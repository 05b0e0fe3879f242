"""The agent's sockets for its ranks' messages and the calls of their store, and its control page."""

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from verl_slurm.base.errors import UNREADABLE, WireError
from verl_slurm.base.files import unsafe_on_the_way
from verl_slurm.base.scratch import Scratch
from verl_slurm.wire.client import MAX_MESSAGE, SOCKET_NAME
from verl_slurm.wire.control_page import PAGE_NAME, ControlPage
from verl_slurm.wire.framing import MAX_FRAME
from verl_slurm.wire.messages import FromRank, FromStoreClient, RankStarted, StoreAnswer
from verl_slurm.wire.peer_credentials import Peer, peer_of
from verl_slurm.wire.store_line import LENGTH, STORE_SOCKET_NAME
from verl_slurm_daemon.link.channel import Refusals

REASONS = ("user", "left", "crowded", "message", "rank")
"""Why an agent refuses a connection. `user`: another user's process. `left`: one to a service that was closed before
the kernel said whose it is. `crowded`: all places are taken. `message`: not in the ranks' vocabulary. `rank`: not a
rank of this node, or not the rank that this connection has spoken for before.
"""


# By it the next agent finds and removes the directory of one that was killed (`Scratch`).
_PREFIX = "verl-slurm-"
_DECODER: "msgspec.msgpack.Decoder[FromRank]" = msgspec.msgpack.Decoder(FromRank)


def parse_packet(packet: bytes) -> FromRank:
    """Decodes the message of one packet. Raises WireError: it is not in the ranks' vocabulary."""
    try:
        return _DECODER.decode(packet)
    except UNREADABLE as error:
        raise WireError("a message is not of our vocabulary", where=str(error)) from error


# Bytes. A Unix socket's path is limited to 107 (unix(7)). The rest of it holds the scratch directory (8: what
# mkdtemp adds) and the longest name of a socket in it: vLLM's, a UUID.
_LONGEST_ROOT = 107 - len(f"/{_PREFIX}4194304-") - 8 - len("/") - 36


def _control_root() -> str:
    """Returns a node-local directory that is short and safe; if there is none, the usual one."""
    usual = tempfile.gettempdir()
    shared = ("/tmp", "/dev/shm")  # noqa: S108 - mkdtemp makes it 0700 under an unguessable name
    for candidate in (os.environ.get("SLURM_TMPDIR"), f"/run/user/{os.geteuid()}", usual, *shared):
        if (
            not candidate
            or len(os.fsencode(candidate)) > _LONGEST_ROOT
            or not os.access(candidate, os.W_OK | os.X_OK)
        ):
            continue
        # A user who may write in a directory on the way can replace our tree by another.
        if unsafe_on_the_way(Path(candidate)) is None:
            return candidate
    # None is short and safe: ranks at least check who listens (`peer_credentials.require_our_agent`).
    return usual


class RankSocket:
    """Accepts this node's ranks and hands on their messages.

    Args:
        max_ranks: connections held at once; a rank uses one.

    Attributes:
        ranks: the ranks of this node. None: not known yet; every message is refused.
    """

    def __init__(
        self, deliver: Callable[[FromRank], None], max_ranks: int, refusals: Refusals | None = None
    ) -> None:
        self.ranks: range | None = None
        self._refusals = refusals or Refusals(REASONS, lambda *_: None)
        self._scratch = Scratch(_PREFIX, _control_root())
        self.directory = self._scratch.path
        self.page = ControlPage.create(self.directory / PAGE_NAME)
        self._deliver, self._max_ranks = deliver, max_ranks
        # SEQPACKET keeps the borders of messages, so a rank that is killed in a send leaves no half of one.
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._listener.setblocking(False)
        self._listener.bind(str(self.directory / SOCKET_NAME))
        self._listener.listen(max_ranks)
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Accepts connections until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._listener)
            peer = peer_of(connection)
            if not peer.is_ours or len(self._tasks) >= self._max_ranks:
                self._refusals.add("crowded" if peer.is_ours else "user", str(peer))
                connection.close()
                continue
            task = asyncio.create_task(self._listen(connection, peer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _listen(self, connection: socket.socket, peer: Peer) -> None:
        loop = asyncio.get_running_loop()
        spoken_for: int | None = None
        # A rank that is killed resets the connection; its launcher tells of the end.
        with connection, contextlib.suppress(ConnectionError):
            connection.setblocking(False)
            while packet := await loop.sock_recv(connection, MAX_MESSAGE):
                try:
                    message = parse_packet(packet)
                except WireError as error:
                    self._refusals.add("message", str(error.where))
                    return  # this peer cannot send anything more
                # A rank speaks for itself alone: the lead acts on each message in the name of the rank that it gives.
                if message.rank not in (self.ranks or ()) or spoken_for not in (None, message.rank):
                    self._refusals.add("rank", f"{type(message).__name__} of rank {message.rank}")
                    return
                spoken_for = message.rank
                if isinstance(message, RankStarted):
                    # As this node knows it: in a container, a rank may know itself by another number.
                    message = msgspec.structs.replace(message, pid=peer.pid)
                self._deliver(message)

    async def drain(self) -> None:
        """Waits, bounded, until the last message of every rank that has left is read."""
        if self._tasks:
            # Bounded: a forked child of a rank, such as a data loader's worker, may hold the rank's end of the socket
            # open.
            await asyncio.wait(self._tasks, timeout=1.0)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._listener.close()
        self.page.close()
        self._scratch.close()


_CALL_DECODER: "msgspec.msgpack.Decoder[FromStoreClient]" = msgspec.msgpack.Decoder(FromStoreClient)
_ANSWER_ENCODER = msgspec.msgpack.Encoder()


class StoreSocket:
    """Relays calls, renumbered, to the lead, and answers to the ranks. `most`: connections held at once."""

    def __init__(
        self, directory: Path, forward: Callable[[FromStoreClient], None], most: int, refusals: Refusals
    ) -> None:
        self._path, self._forward, self._most, self._refusals = directory, forward, most, refusals
        self._server: asyncio.Server | None = None
        self._held: set[asyncio.StreamWriter] = set()
        self._calls: dict[int, tuple[asyncio.StreamWriter, int]] = {}
        self._next = 0

    async def open(self) -> None:
        path = str(self._path / STORE_SOCKET_NAME)
        # asyncio's default of 100 is too short for threads of all ranks that connect at once.
        self._server = await asyncio.start_unix_server(self._listen, path, backlog=min(self._most, 4096))

    def answer(self, message: StoreAnswer) -> None:
        """Hands an answer of the lead to the connection that asked, unless that has gone."""
        # Ranks number their calls independently: our own number finds the connection, and the rank's goes back in.
        writer, call = self._calls.pop(message.call, (None, 0))
        if writer is not None and not writer.is_closing():
            data = _ANSWER_ENCODER.encode(msgspec.structs.replace(message, call=call))
            writer.write(LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._held):
            writer.close()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection: socket.socket = writer.get_extra_info("socket")
        peer = peer_of(connection)
        if not peer.is_ours or len(self._held) >= self._most:
            self._refusals.add("crowded" if peer.is_ours else "user", str(peer))
            writer.close()
            return
        self._held.add(writer)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._serve(reader, writer)
        finally:
            self._held.discard(writer)
            # Calls of a connection that has ended would stay in the table for as long as the restart lasts.
            for number in [number for number, (whose, _) in self._calls.items() if whose is writer]:
                del self._calls[number]
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            try:
                if size > MAX_FRAME - 1024:  # room for a longer call number
                    # Refused before any of it is read into memory.
                    raise ValueError(f"a message of {size} bytes")
                message = _CALL_DECODER.decode(await reader.readexactly(size))
            except UNREADABLE as error:
                self._refusals.add("message", str(error))
                return
            self._next += 1
            self._calls[self._next] = (writer, message.call)
            self._forward(msgspec.structs.replace(message, call=self._next))
