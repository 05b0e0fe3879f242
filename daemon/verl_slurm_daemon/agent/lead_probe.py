"""Connects to a service on this node, once it is known who listens, and asks whether it answers: by a connection, or by
an HTTP GET. It sends no token.

Only the first bytes of the status line are read (RFC 9112, section 4), and redirects count as no answer.
"""

import asyncio
import re
from contextlib import suppress

from verl_slurm.base.errors import PermissionRefused
from verl_slurm.wire.http import Listener, listener_of
from verl_slurm_daemon.link.relay import Streams

SERVICE_HOST = "127.0.0.1"
"""Where services listen: ranks reach them through relays (`link.relay`)."""
_LIMIT_S = 5.0
_STATUS = re.compile(rb"HTTP/1\.[01] 2[0-9][0-9]\b")
_LOOKS, _LOOK_AGAIN_S = 5, 0.02


async def connect_checked(port: int) -> Streams:
    """Connects to the service at `port` of this node.

    A service may end, and another user listen in its place, at any moment. So the look comes before and after: a
    connection that began between two looks at the same sockets has one of these at its other end.

    Raises:
        OSError: nothing listens, or it changes all the time.
        PermissionRefused: another user may listen there.
    """
    for _ in range(_LOOKS):
        before = listener_of(port, loopback=True)
        if before.uid is not None and before.stranger:
            raise taken(port, before)
        reader, writer = await asyncio.open_connection(SERVICE_HOST, port)
        now = listener_of(port, loopback=True)
        if before == now and not now.stranger:
            return reader, writer
        writer.transport.abort()
        # It has just begun to listen; or the kernel, which lists in pieces, has left it out.
        await asyncio.sleep(_LOOK_AGAIN_S)
    if now.stranger:
        raise taken(port, now)
    raise ConnectionAbortedError(f"port {port}: the listening sockets change all the time")


def taken(port: int, listener: Listener) -> PermissionRefused:
    """Makes the error that names who listens in the service's place."""
    return PermissionRefused(
        "another program listens in the place of this service, and was sent nothing",
        where=f"port {port} of this node",
        found=listener.name,
        expected="the service itself",
        remedy="choose another `port` for the service, or 0; see docs/services.md",
    )


async def answers(probe: str, port: int, limit_s: float = _LIMIT_S) -> bool:
    """Returns whether the service answers.

    Args:
        probe: `tcp`, or the path of a GET.
        limit_s: an answer that takes longer is none.

    Raises:
        PermissionRefused: another user may listen there.
    """
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await connect_checked(port)
            try:
                if probe == "tcp":
                    return True
                asked = f"GET {probe} HTTP/1.1\r\nHost: {SERVICE_HOST}:{port}\r\nConnection: close\r\n\r\n"
                writer.write(asked.encode())
                return _STATUS.match(await reader.readexactly(len(b"HTTP/1.1 200 "))) is not None
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False
