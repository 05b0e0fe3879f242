"""A very small HTTP/1.1 server for ports that strangers reach: one request per connection, every size capped.

The daemon's own loop serves the port: a head of at most 8 KiB, the request within 5 s, and no byte of a body
unless the port allows one. A request beyond these limits gets its status as an answer, if possible, and the
connection is closed. Why not prometheus_client's: docs/decisions/0001-dependencies.md.

Connections wait in the row of `connection_limits`: a newer one evicts the oldest. A connection that has
brought the port's token leaves the row, and its body is kept from then on.

A reply may be a stream (server-sent events). It ends when the peer closes its side, sends more bytes, or
takes none.
"""

import asyncio
import contextlib
import hmac
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

from verl_slurm.base.errors import KeyRefused, WireError
from verl_slurm.base.files import read_private
from verl_slurm.wire.connection_limits import ConnectionLimits, make_room

_TOKEN = re.compile(r"[!-~]{32,256}")

# Room for the path of a run three directories down, each name 255 bytes long, each byte as %XX.
_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) (/[!-~]{0,2559}) HTTP/1\.[01]")
# Any host that reaches the port chooses these bytes, and the match blocks the daemon's loop. So a pattern here has no
# two neighbours that match the same byte; the blanks around a value are stripped, not matched. h11 matches them, and 8
# KiB of blanks before a NUL block it for 0.3 s (docs/decisions/0001-dependencies.md).
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}")
_VALUE = re.compile(rb"[ -~\t]*")
_MOST_HEADERS = 64
# int() itself takes the digits of all scripts, and raises for more than 4,300 of them.
_LENGTH = re.compile(r"[0-9]{1,7}")
_END = b"\r\n\r\n"
# Connections accepted in one turn of the loop, at most. A peer's head is read in the next turn or the one
# after it. The row holds eight such turns, so the peer cannot be evicted before that.
_BACKLOG = 64
_READ_BYTES = 16 * 1024


class HttpRequest(msgspec.Struct, frozen=True):
    """One request. Header names are in lower case; path and query are as they were sent, with their %XX."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""
    """Empty on a port with a token if this request does not carry it."""
    bearer: bool = False
    """The request carries the port's token."""
    query: str = ""


class HttpReply(msgspec.Struct, frozen=True):
    """The answer to one request."""

    status: int
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()
    """Beside those that every reply has. Printable ASCII, and not checked here."""
    stream: AsyncGenerator[bytes, None] | None = None
    """Pieces that follow the head, in place of `body`; closed when the peer is gone."""


class Caps(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one port for strangers."""

    method: str = "GET"
    """The one method that the port answers."""
    head_bytes: int = 8192
    body_bytes: int = 0
    patience_s: float = 5.0
    """Seconds for the request, and again for taking the reply."""
    bearers: int = 16
    """Connections at once that have brought the token."""


Handler = Callable[[HttpRequest], Awaitable[HttpReply]]


def parse_head(head: bytes) -> HttpRequest:
    """Parses the request line and the headers, including the empty line.

    Raises WireError: the head is not HTTP/1.x by RFC 9112, or two readers may read it differently (bare line
    feeds, folded or repeated headers, a transfer coding).
    """
    if not head.endswith(_END):
        raise WireError("not a request", found="no empty line")
    # By CRLF alone: where another reader takes a bare line feed for an end, it sees another request. The patterns below
    # refuse one.
    first, *lines = head[: -len(_END)].split(b"\r\n")
    found = _REQUEST_LINE.fullmatch(first)
    if found is None or len(lines) > _MOST_HEADERS:
        raise WireError("not a request", found=f"{len(lines)} headers after {first[:40]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        raw_name, colon, value = line.partition(b":")
        name = raw_name.decode().lower() if colon and _NAME.fullmatch(raw_name) else ""
        # A header that comes twice, and a transfer coding: two readers may not agree where the body ends.
        if not name or not _VALUE.fullmatch(value) or name in headers or name == "transfer-encoding":
            raise WireError("not a header that is taken", found=repr(line[:40]))
        headers[name] = value.strip(b" \t").decode()
    path, _, query = found[2].decode().partition("?")
    return HttpRequest(found[1].decode(), path, headers, query=query)


def has_token(request: HttpRequest, token: str) -> bool:
    """Returns whether the request carries `Authorization: Bearer TOKEN`, in constant time."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return hmac.compare_digest(given.encode(), token.encode()) and scheme.lower() == "bearer"


def read_token(path: Path | str) -> str:
    """Reads the token from a 0600 file. Raises KeyRefused: no token; PermissionRefused: others may read it."""
    remedy = f"umask 077; openssl rand -hex 32 > {path}"
    try:
        text = read_private(Path(path)).decode(errors="replace").strip()
    except OSError as error:
        raise KeyRefused(
            "the token cannot be read", where=path, found=error.strerror, remedy=remedy
        ) from error
    if not _TOKEN.fullmatch(text):
        raise KeyRefused(
            "not a token",
            where=path,
            found=f"{len(text)} characters",
            expected="32 to 256, no blanks",
            remedy=remedy,
        )
    return text


async def serve_http(
    host: str,
    port: int,
    handle: Handler,
    caps: Caps,
    token: str | None = None,
    *,
    carries: Callable[[HttpRequest, str], bool] = has_token,
) -> tuple[asyncio.Server, int]:
    """Listens, and passes every complete, well-formed request to `handle`; an error in `handle` is answered
    by a 500.

    A request that carries the `token` gets a place that no stranger takes; `handle` decides whether it is
    required. Returns the server, and its port (0 asks for any). Raises OSError: the address cannot be bound.
    """
    limits = ConnectionLimits(caps.bearers)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # asyncio's default of 256 KiB per read, for a hundred thousand strangers, leaves 1 MB of holes in the heap.
        transport: Any = writer.transport
        transport.max_size = caps.head_bytes
        # ---- a stranger: one that is newer may push this one out
        limits.arrive(transport)
        bearer = False
        try:
            # One limit for head and body together: a byte now and then extends nothing.
            async with asyncio.timeout(caps.patience_s):
                read = await _head(reader, caps)
                if isinstance(read, HttpRequest) and token is not None and carries(read, token):
                    # All places of bearers are taken.
                    if not limits.admit(transport):
                        return
                    bearer = True
                if isinstance(read, HttpRequest):
                    body = await _body(reader, read, keep=bearer or token is None)
                    read = msgspec.structs.replace(read, body=body, bearer=bearer)
            reply = read if isinstance(read, HttpReply) else await _handled(handle, read)
            # ---- the reply, with a limit of its own: a peer that takes no bytes must not keep its place
            async with asyncio.timeout(caps.patience_s):
                writer.write(_rendered(reply, caps))
                await writer.drain()
            if reply.stream is not None:
                await _send_stream(reader, writer, reply.stream, caps)
            async with asyncio.timeout(caps.patience_s):
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # gone or too slow: no answer is due
        except asyncio.CancelledError:
            pass  # the loop ends; asyncio's own callback would log it as an error of the task
        finally:
            if bearer:
                limits.leave()
                transport.abort()
            else:
                limits.turn_away(transport, ConnectionError())

    make_room(limits.most_strangers + caps.bearers + _BACKLOG)
    server = await asyncio.start_server(connected, host, port, limit=caps.head_bytes, backlog=_BACKLOG)
    return server, int(server.sockets[0].getsockname()[1])


async def _head(reader: asyncio.StreamReader, caps: Caps) -> HttpRequest | HttpReply:
    """Returns a request without its body, or the answer to an invalid one."""
    try:
        head = await reader.readuntil(_END)
    except asyncio.LimitOverrunError:
        # Bytes that are not read make the kernel send a reset, which may overtake this answer.
        return HttpReply(431)
    # `readuntil` counts without the empty line.
    if len(head) > caps.head_bytes:
        return HttpReply(431)
    try:
        request = parse_head(head)
    except WireError:
        return HttpReply(400)
    if request.method != caps.method:
        return HttpReply(405)
    length = request.headers.get("content-length")
    if length is None and caps.body_bytes:
        return HttpReply(411)
    if length is not None:
        if not _LENGTH.fullmatch(length):
            return HttpReply(400)
        if int(length) > caps.body_bytes:
            return HttpReply(413)
    return request


async def _body(reader: asyncio.StreamReader, request: HttpRequest, *, keep: bool) -> bytes:
    """Reads the body. A stranger's body is read, since a reset would overtake the answer, and not kept in memory."""
    left = int(request.headers.get("content-length", "0"))
    kept = bytearray()
    while left:
        data = await reader.read(min(left, _READ_BYTES))
        if not data:
            raise asyncio.IncompleteReadError(b"", left)
        left -= len(data)
        if keep:
            kept += data
    return bytes(kept)


async def _handled(handle: Handler, request: HttpRequest) -> HttpReply:
    try:
        return await handle(request)
    except Exception:  # noqa: BLE001 - a bug behind the port must not become words of a traceback on it
        return HttpReply(500)


async def _send_stream(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    stream: AsyncGenerator[bytes, None],
    caps: Caps,
) -> None:
    async def send() -> None:
        async with contextlib.aclosing(stream):
            async for piece in stream:
                async with asyncio.timeout(caps.patience_s):
                    writer.write(piece)
                    await writer.drain()

    # A stream that is silent notices no peer that has gone: its end is read beside it.
    sending, leaving = asyncio.create_task(send()), asyncio.create_task(reader.read(1))
    try:
        await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (sending, leaving):
            task.cancel()
        await asyncio.gather(sending, leaving, return_exceptions=True)


def _rendered(reply: HttpReply, caps: Caps) -> bytes:
    reason = HTTPStatus(reply.status).phrase
    body = reply.body if reply.status == 200 or reply.body else f"{reason}\n".encode()
    lines = [
        f"HTTP/1.1 {reply.status} {reason}",
        f"Content-Type: {reply.content_type}",
        # Without it, a body lasts until the connection ends.
        *([f"Content-Length: {len(body)}"] if reply.stream is None else []),
        "Connection: close",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        *(f"{name}: {value}" for name, value in reply.headers),
    ]
    if reply.status == 405:
        lines.append(f"Allow: {caps.method}")
    if reply.status == 401:
        lines.append("WWW-Authenticate: Bearer")
    head = "\r\n".join([*lines, "", ""]).encode()
    return head if reply.stream is not None else head + body
