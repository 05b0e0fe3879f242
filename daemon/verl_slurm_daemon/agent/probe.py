"""Asks a service on this node whether it answers: a connection, or an HTTP GET. It sends no token.

Only the first bytes of the status line are read (RFC 9112, section 4), and redirects count as no answer.
"""

import asyncio
import re
from contextlib import suppress

__all__ = ["answers"]

_LIMIT_S = 5.0
_STATUS = re.compile(rb"HTTP/1\.[01] 2[0-9][0-9]\b")


async def answers(probe: str, host: str, port: int, limit_s: float = _LIMIT_S) -> bool:
    """Returns whether the service answers.

    Args:
        probe: `tcp`, or the path of a GET.
        limit_s: an answer that takes longer is none.
    """
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(host, port, limit=1024)
            try:
                if probe == "tcp":
                    return True
                name = f"[{host}]" if ":" in host else host
                asked = f"GET {probe} HTTP/1.1\r\nHost: {name}:{port}\r\nConnection: close\r\n\r\n"
                writer.write(asked.encode())
                return _STATUS.match(await reader.readexactly(len(b"HTTP/1.1 200 "))) is not None
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False
