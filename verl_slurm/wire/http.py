"""A very small HTTP/1.1 server for ports that strangers reach: one request a connection, everything capped.

The server of prometheus_client (wsgiref, a thread a connection) takes request lines of 64 KiB and up to a hundred
headers of that size, has no time-out, and as many threads as there are connections. So the port is served here, from
the daemon's own loop: a head of at most 8 KiB, the request within 5 s, and no byte of a body unless the port allows
one. What does not fit is answered with its status where it can be, and closed.

Connections stand in the row of `connection_limits`: a newer one pushes out the oldest. One that has brought the port's
token leaves the row, and only then is its body kept.
"""

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

from verl_slurm.base.errors import KeyRefused, WireError
from verl_slurm.base.files import read_private, write_file
from verl_slurm.wire.connection_limits import ConnectionLimits, make_room

__all__ = [
    "Caps",
    "HttpReply",
    "HttpRequest",
    "has_token",
    "parse_head",
    "read_token",
    "replace_token",
    "serve_http",
]

_TOKEN = re.compile(r"[!-~]{32,256}")

_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) (/[!-~]{0,1023}) HTTP/1\.[01]")
# Anybody who reaches the port chooses these bytes, and the match holds the daemon's loop. So a pattern here has no two
# neighbours that take the same byte; the blanks around a value are stripped, not matched. h11 matches them, and 8 KiB
# of blanks before a NUL hold it for 0.3 s (docs/decisions/0001-dependencies.md).
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}")
_VALUE = re.compile(rb"[ -~\t]*")
_MOST_HEADERS = 64
_LENGTH = re.compile(r"[0-9]{1,7}")
_END = b"\r\n\r\n"
_BACKLOG = 64
"""Accepted in one turn of the loop at most. A peer's head is read in the next turn or the one after it, so it cannot be
pushed out before that: the row holds eight such turns."""
_READ_BYTES = 16 * 1024


class HttpRequest(msgspec.Struct, frozen=True):
    """What was asked. Header names are in lower case; the path is without its query."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""
    """Empty on a port with a token where this request does not carry it."""
    bearer: bool = False
    """It carries the port's token."""


class HttpReply(msgspec.Struct, frozen=True):
    status: int
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"


class Caps(msgspec.Struct, frozen=True, kw_only=True):
    """What one port gives to strangers."""

    method: str = "GET"
    """The only one."""
    head_bytes: int = 8192
    body_bytes: int = 0
    patience_s: float = 5.0
    """For the request, and once more for taking the reply."""
    bearers: int = 16
    """Connections at once that have brought the token."""


Handler = Callable[[HttpRequest], Awaitable[HttpReply]]


def parse_head(head: bytes) -> HttpRequest:
    """The request line and the headers, up to and with the empty line.

    Raises:
        WireError: not HTTP/1.x as RFC 9112 has it, or with something that two readers may take differently (bare line
            feeds, folded or repeated headers, a transfer coding).
    """
    if not head.endswith(_END):
        raise WireError("not a request", found="no empty line")
    first, *lines = head[: -len(_END)].split(b"\r\n")
    found = _REQUEST_LINE.fullmatch(first)
    if found is None or len(lines) > _MOST_HEADERS:
        raise WireError("not a request", found=f"{len(lines)} headers after {first[:40]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        raw_name, colon, value = line.partition(b":")
        name = raw_name.decode().lower() if colon and _NAME.fullmatch(raw_name) else ""
        if not name or not _VALUE.fullmatch(value) or name in headers or name == "transfer-encoding":
            raise WireError("not a header that is taken", found=repr(line[:40]))
        headers[name] = value.strip(b" \t").decode()
    return HttpRequest(found[1].decode(), found[2].decode().partition("?")[0], headers)


def has_token(request: HttpRequest, token: str) -> bool:
    """Whether the request carries `Authorization: Bearer TOKEN`; takes as long whatever it carries."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return hmac.compare_digest(given.encode(), token.encode()) and scheme.lower() == "bearer"


def read_token(path: Path | str) -> str:
    """The token of a 0600 file.

    Raises:
        KeyRefused: it is not there, or too short to be one.
        PermissionRefused: others may read it.
    """
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


def replace_token(path: Path, token: str) -> None:
    """Write a new token, durably, 0600."""
    write_file(path, token.encode() + b"\n")


async def serve_http(
    host: str, port: int, handle: Handler, caps: Caps, token: str | None = None
) -> tuple[asyncio.Server, int]:
    """Listen. Every request that is whole and well-formed goes to `handle`; an error in there is a 500.

    Args:
        token: a request that carries it has a place that no stranger takes. Whether it is demanded, `handle` decides.

    Returns:
        The server, and its port (which may have been asked for as 0).

    Raises:
        OSError: the address cannot be had.
    """
    limits = ConnectionLimits(caps.bearers)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # asyncio would take 256 KiB for each read, and a hundred thousand strangers leave 1 MB of holes in the heap.
        transport: Any = writer.transport
        transport.max_size = caps.head_bytes
        limits.arrive(transport)
        bearer = False
        try:
            async with asyncio.timeout(caps.patience_s):
                read = await _head(reader, caps)
                if isinstance(read, HttpRequest) and token is not None and has_token(read, token):
                    if not limits.admit(transport):
                        return
                    bearer = True
                if isinstance(read, HttpRequest):
                    body = await _body(reader, read, keep=bearer or token is None)
                    read = msgspec.structs.replace(read, body=body, bearer=bearer)
            reply = read if isinstance(read, HttpReply) else await _handled(handle, read)
            async with asyncio.timeout(caps.patience_s):
                writer.write(_rendered(reply, caps))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # gone, or too slow: nothing is owed
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
    """A request without its body, or what is answered to something that is none."""
    try:
        head = await reader.readuntil(_END)
    except asyncio.LimitOverrunError:
        return HttpReply(431)
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
    """The body; a stranger's is read, since a reset would overtake the answer to it, but not held in memory."""
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


def _rendered(reply: HttpReply, caps: Caps) -> bytes:
    reason = HTTPStatus(reply.status).phrase
    body = reply.body if reply.status == 200 or reply.body else f"{reason}\n".encode()
    lines = [
        f"HTTP/1.1 {reply.status} {reason}",
        f"Content-Type: {reply.content_type}",
        f"Content-Length: {len(body)}",
        "Connection: close",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
    ]
    if reply.status == 405:
        lines.append(f"Allow: {caps.method}")
    if reply.status == 401:
        lines.append("WWW-Authenticate: Bearer")
    return "\r\n".join([*lines, "", ""]).encode() + body
