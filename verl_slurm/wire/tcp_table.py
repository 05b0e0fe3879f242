"""Who listens on a port of this machine, and who has connected, from /proc/net/tcp, which every user may read."""

import contextlib
import os
import pwd
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# TCP_ESTABLISHED and TCP_LISTEN of include/net/tcp_states.h.
ESTABLISHED, _LISTEN = "01", "0A"
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def _in_table(packed: bytes) -> str:
    words = (packed[first : first + 4] for first in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)


_LOOPBACK = tuple(
    _in_table(socket.inet_pton(family, address))
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1"))
)
_EVERYWHERE = ("0" * 8, "0" * 32)


def address_of(in_table: str) -> str:
    words = (int(in_table[first : first + 8], 16) for first in range(0, len(in_table), 8))
    packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed).removeprefix("::ffff:")  # mapped into IPv6


def rows_of(table: Path) -> Iterator[list[str]]:
    """Yields the fields of each socket: sl, local_address, rem_address, st, queues, timer, retrnsmt, uid, timeout,
    inode. Ports are hexadecimal."""
    # A machine without IPv6 has no tcp6.
    with contextlib.suppress(OSError), table.open() as lines:
        next(lines, None)
        yield from (fields for line in lines if len(fields := line.split()) >= 10)


class Listener(NamedTuple):
    """Identifies who listens, or who has connected.

    Attributes:
        uid: None: none is listed. The port is bound without listening yet, the one who connected has closed it, or
            /proc cannot be read.
        sockets: the inodes of all that listen there. A socket has its inode for as long as it lives.
    """

    uid: int | None
    sockets: frozenset[int] = frozenset()

    @property
    def stranger(self) -> bool:
        """Returns whether it may be another user. Root does not count: it could read the token anyway."""
        return self.uid is None or not _is_ours(self.uid)

    @property
    def name(self) -> str:
        if self.uid is None:
            return "a process that /proc/net/tcp does not show"
        try:
            return f"uid {self.uid} ({pwd.getpwuid(self.uid).pw_name})"
        except KeyError:
            return f"uid {self.uid}"


def _is_ours(uid: int) -> bool:
    """Returns whether it is this user's, root's, or one that root gave this user for containers (/etc/subuid)."""
    if uid in (os.geteuid(), 0):
        return True
    try:
        mine = {str(os.geteuid()), pwd.getpwuid(os.geteuid()).pw_name}
        lines = [line.split(":") for line in Path("/etc/subuid").read_text().splitlines()]
        return any(int(first) <= uid < int(first) + int(n) for who, first, n in lines if who in mine)
    except (OSError, KeyError, ValueError):
        return False


def listener_of(port: int, *, loopback: bool = False) -> Listener:
    """Finds who listens on `port`, another user before us. `loopback`: only where 127.0.0.1 may lead."""
    found: dict[str, set[tuple[int, int]]] = {}
    for table in TABLES:
        for fields in rows_of(table):
            # The kernel lists all that listen before the rest (proc_net_tcp.rst), which may be 100,000 lines.
            if fields[3] != _LISTEN:
                break
            address, _, number = fields[1].rpartition(":")
            if int(number, 16) == port:
                found.setdefault(address, set()).add((int(fields[7]), int(fields[9])))
    if loopback:
        # As the kernel chooses: a socket at the very address comes before one at all addresses.
        for addresses in (_LOOPBACK, _EVERYWHERE):
            if chosen := {address: found[address] for address in addresses if address in found}:
                break
        found = chosen
    # Several sockets may listen on one port, at different addresses; a stranger's among them is the news.
    uids = {uid for sockets in found.values() for uid, _ in sockets}
    strangers = {uid for uid in uids if not _is_ours(uid)}
    inodes = frozenset(inode for sockets in found.values() for _, inode in sockets)
    return Listener(min(strangers or uids, default=None), inodes)


def peers_of(port: int) -> dict[tuple[str, int], Listener]:
    """Finds who has connected to `port` of 127.0.0.1, by the address and port of each; as `listener_of`."""
    found = {}
    there = {f"{address}:{port:04X}" for address in _LOOPBACK}
    for table in TABLES:
        for fields in rows_of(table):
            if fields[2] in there:
                address, _, number = fields[1].rpartition(":")
                # Without an inode, no process holds it any more, and the uid may stand as 0.
                inode = int(fields[9])
                owner = Listener(int(fields[7]), frozenset((inode,))) if inode else Listener(None)
                found[address_of(address), int(number, 16)] = owner
    return found
