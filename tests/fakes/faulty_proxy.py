"""A TCP proxy that does to a connection what networks and their boxes do. In this process, on the loopback.

It stands for the network, which loses, repeats and flips nothing on demand. It works on chunks of a TCP stream, not on
packets: what the kernel does with a cut cable is shown by `hostile/netlab.py`.

What it does next is asked of it for every chunk, so that it may be changed at any time.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field


@dataclass
class Chaos:
    """What happens. Offsets count the bytes that go up, client to server, of each connection."""

    chunk: int = 65536
    """Bytes at once, both ways; 1: every byte by itself."""
    hold: int = 0
    """Nothing goes up before so many bytes have come; then all of it, at once."""
    cut_after: int | None = None
    """Then the connection is reset, both ends."""
    twice: range = range(0)
    """These bytes are sent, and then sent once more."""
    flip_up: int = 0
    """So many times a bit is flipped, in the middle of a large chunk that goes up."""
    flip_down: int = 0
    cut_down_after: int | None = None
    """As `cut_after`, of what comes down."""
    stall: bool = False
    """Nothing moves any more, either way, and nothing is closed: a black hole."""
    on_stall: Callable[[], object] = lambda: None
    """Told of everything that is swallowed."""
    port: int = 0
    connections: int = 0
    up: bytearray = field(default_factory=bytearray)
    """All that came from clients, as they sent it."""


@contextlib.asynccontextmanager
async def chaos_proxy(port: int, chaos: Chaos) -> AsyncIterator[Chaos]:
    """In front of `port`; `chaos.port` is its own."""
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        chaos.connections += 1
        there, back = await asyncio.open_connection("127.0.0.1", port)
        pumps = [
            asyncio.create_task(_up(reader, back, chaos)),
            asyncio.create_task(_down(there, writer, chaos)),
        ]
        try:
            await asyncio.gather(*pumps)
        except ConnectionError:
            _reset(writer)
            _reset(back)
        except asyncio.CancelledError:
            pass  # the end of the test; asyncio's streams log a handler that was cancelled
        finally:
            for pump in pumps:
                pump.cancel()
            writer.close()
            back.close()
            tasks.discard(task)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    chaos.port = server.sockets[0].getsockname()[1]
    try:
        yield chaos
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chaos: Chaos) -> None:
    at, held = 0, b""
    while data := await reader.read(chaos.chunk):
        chaos.up += data
        await _stalled(chaos)
        if chaos.flip_up and len(data) > _LARGE:
            chaos.flip_up -= 1
            data = _flipped(data)
        cut = chaos.cut_after
        if cut is not None and at + len(data) >= cut:
            writer.write(data[: cut - at])
            await writer.drain()
            raise ConnectionResetError
        again = bytes(data[max(chaos.twice.start - at, 0) : max(chaos.twice.stop - at, 0)])
        at += len(data)
        held += data + again
        if at >= chaos.hold:
            writer.write(held)
            await writer.drain()
            held = b""
    with contextlib.suppress(OSError):
        writer.write_eof()


async def _down(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chaos: Chaos) -> None:
    at = 0
    while data := await reader.read(chaos.chunk):
        await _stalled(chaos)
        if chaos.flip_down and len(data) > _LARGE:
            chaos.flip_down -= 1
            data = _flipped(data)
        cut = chaos.cut_down_after
        if cut is not None and at + len(data) >= cut:
            writer.write(data[: cut - at])
            await writer.drain()
            raise ConnectionResetError
        at += len(data)
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


_LARGE = 4096
"""More than the head of a request or of an answer."""


async def _stalled(chaos: Chaos) -> None:
    if chaos.stall:
        chaos.on_stall()
        await asyncio.Event().wait()


def _flipped(data: bytes) -> bytes:
    at = len(data) * 3 // 4
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@contextlib.contextmanager
def proxied(port: int) -> Iterator[Chaos]:
    """The same in a thread of its own, for clients that block."""
    chaos, loop = Chaos(), asyncio.new_event_loop()
    ready, end = threading.Event(), asyncio.Event()

    async def live() -> None:
        async with chaos_proxy(port, chaos):
            ready.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(live(),))
    thread.start()
    try:
        assert ready.wait(30)
        yield chaos
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(30)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket | None = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
