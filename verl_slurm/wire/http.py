"""A very small HTTP/1.1 server for ports that strangers reach: one request a connection, everything capped.

The server of prometheus_client (wsgiref, a thread a connection) takes request lines of 64 KiB and up to a hundred
headers of that size, has no time-out, and as many threads as there are connections. So the port is served here, from
the daemon's own loop: a head of at most 8 KiB, the request within 5 s, at most 16 connections, and no byte of a
body unless the caller allows one. What does not fit is answered with its status where it can be, and closed.
"""

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from verl_slurm.errors import KeyRefused, WireError
from verl_slurm.files import read_private

__all__ = ["Caps", "HttpReply", "HttpRequest", "has_token", "parse_head", "read_token", "serve_http"]

_TOKEN = re.compile(r"[!-~]{32,256}")

_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) (/[!-~]{0,1023}) HTTP/1\.[01]")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}):[ \t]*([ -~\t]*?)[ \t]*")
_MOST_HEADERS = 64
_LENGTH = re.compile(r"[0-9]{1,7}")
_END = b"\r\n\r\n"
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    411: "Length Required",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class HttpRequest(msgspec.Struct, frozen=True):
    """What was asked. Header names are in lower case; the path is without its query."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""


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
    connections: int = 16


Handler = Callable[[HttpRequest], Awaitable[HttpReply]]


def parse_head(head: bytes) -> HttpRequest:
    """The request line and the headers, up to and with the empty line.

    Raises:
        WireError: not HTTP/1.x as RFC 9112 has it, or with something that two readers may take differently (bare line
            feeds, folded or repeated headers, a transfer coding).

    Called by: `serve_http`.
    """
    if not head.endswith(_END):
        raise WireError("not a request", found="no empty line")
    first, *lines = head[: -len(_END)].split(b"\r\n")
    found = _REQUEST_LINE.fullmatch(first)
    if found is None or len(lines) > _MOST_HEADERS:
        raise WireError("not a request", found=f"{len(lines)} headers after {first[:40]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        header = _HEADER.fullmatch(line)
        name = header[1].decode().lower() if header else ""
        if header is None or name in headers or name == "transfer-encoding":
            raise WireError("not a header that is taken", found=repr(line[:40]))
        headers[name] = header[2].decode()
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

    Called by: verl_slurm_daemon.exporter, submit.preflight, cli.alert_receiver.
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


async def serve_http(host: str, port: int, handle: Handler, caps: Caps) -> tuple[asyncio.Server, int]:
    """Listen. Every request that is whole and well-formed goes to `handle`; an error in there is a 500.

    Returns:
        The server, and its port (which may have been asked for as 0).

    Raises:
        OSError: the address cannot be had.

    Called by: verl_slurm_daemon.exporter, cli.alert_receiver.
    """
    held = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal held
        # asyncio would take 256 KiB for each read, and a hundred thousand strangers leave 1 MB of holes in the heap.
        transport: Any = writer.transport
        transport.max_size = caps.head_bytes
        if held >= caps.connections:
            writer.transport.abort()
            return
        held += 1
        try:
            async with asyncio.timeout(caps.patience_s):
                read = await _read(reader, caps)
            reply = read if isinstance(read, HttpReply) else await _handled(handle, read)
            async with asyncio.timeout(caps.patience_s):
                writer.write(_rendered(reply, caps))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # gone, or too slow: nothing is owed
        finally:
            held -= 1
            writer.transport.abort()

    server = await asyncio.start_server(
        connected, host, port, limit=caps.head_bytes, backlog=caps.connections
    )
    return server, int(server.sockets[0].getsockname()[1])


async def _read(reader: asyncio.StreamReader, caps: Caps) -> HttpRequest | HttpReply:
    """A request, or what is answered to something that is none."""
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
        request = msgspec.structs.replace(request, body=await reader.readexactly(int(length)))
    return request


async def _handled(handle: Handler, request: HttpRequest) -> HttpReply:
    try:
        return await handle(request)
    except Exception:  # noqa: BLE001 - a bug behind the port must not become words of a traceback on it
        return HttpReply(500)


def _rendered(reply: HttpReply, caps: Caps) -> bytes:
    reason = _REASONS[reply.status]
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
