"""The agent's side of the ranks' store: a Unix socket in its private directory; calls are relayed to the lead."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from verl_slurm.base.errors import UNREADABLE
from verl_slurm.wire.framing import MAX_FRAME
from verl_slurm.wire.messages import FromStoreClient, StoreAnswer
from verl_slurm.wire.peer_credentials import peer_of
from verl_slurm.wire.store_line import LENGTH, STORE_SOCKET_NAME
from verl_slurm_daemon.link.refusals import Refusals

__all__ = ["StoreSocket"]

_DECODER: "msgspec.msgpack.Decoder[FromStoreClient]" = msgspec.msgpack.Decoder(FromStoreClient)
_ENCODER = msgspec.msgpack.Encoder()


class StoreSocket:
    """Relays calls to the lead and answers to the ranks.

    Args:
        forward: takes each call, renumbered by this socket.
        most: connections held at once. A process uses one for each of its threads that wait at the same time.
        refusals: counts refused connections; reasons of `rank_socket.REASONS`.
    """

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
        self._server = await asyncio.start_unix_server(self._listen, path, backlog=min(self._most, 4096))

    def answer(self, message: StoreAnswer) -> None:
        """Hands an answer of the lead to the connection that asked, unless that has gone."""
        writer, call = self._calls.pop(message.call, (None, 0))
        if writer is not None and not writer.is_closing():
            data = _ENCODER.encode(msgspec.structs.replace(message, call=call))
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
            for number in [number for number, (whose, _) in self._calls.items() if whose is writer]:
                del self._calls[number]
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            try:
                if size > MAX_FRAME - 1024:  # room for a longer call number
                    raise ValueError(f"a message of {size} bytes")
                message = _DECODER.decode(await reader.readexactly(size))
            except UNREADABLE as error:
                self._refusals.add("message", str(error))
                return
            self._next += 1
            self._calls[self._next] = (writer, message.call)
            self._forward(msgspec.structs.replace(message, call=self._next))
