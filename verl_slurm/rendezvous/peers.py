"""Checks that the other ends of a process group's connections belong to the run. No torch here.

gloo takes the first connection with the right pair number. So when a gloo group is built, each rank sends every other
rank a proof over the very connections that the group will use:

    proof(i → j) = HMAC-SHA256(key of the restart, "gloo" ‖ nonce ‖ i ‖ j)

The key reaches a rank by its agent's private directory, and never crosses a network; the nonce is rank 0's, through the
ranks' store. A rank that receives anything but a peer's proof does not use the group.
"""

import hashlib
import hmac
import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

NONCE_BYTES = 32
PROOF_BYTES = 32
_PAIR = struct.Struct(">II")
_ESTABLISHED = "01"  # include/net/tcp_states.h
_MOST_NAMED = 8


def proof(key: bytes, nonce: bytes, sender: int, receiver: int) -> bytes:
    """Returns the proof that `sender` sends to `receiver`."""
    return hmac.new(key, b"gloo" + nonce + _PAIR.pack(sender, receiver), hashlib.sha256).digest()


def wrong_peers(key: bytes, nonce: bytes, rank: int, said: bytes) -> list[int]:
    """Lists the peers that did not send their proof.

    Args:
        said: the received bytes, PROOF_BYTES of each rank in turn.
    """
    words = [said[at : at + PROOF_BYTES] for at in range(0, len(said), PROOF_BYTES)]
    return [
        peer
        for peer, word in enumerate(words)
        # The pair is part of the proof: one that was sent to another rank, or comes back, is none.
        if not hmac.compare_digest(word, proof(key, nonce, peer, rank))
    ]


def others_connected() -> list[str]:
    """Lists connections of this process whose other end, on this node, belongs to another user, for people.

    A peer on another node is not seen. Never raises.
    """
    with suppress(OSError, ValueError, IndexError):
        # Of this process alone: the tables list the sockets of the whole node.
        mine = set(_socket_inodes())
        table = [row for name in ("tcp", "tcp6") for row in _connections(Path(f"/proc/net/{name}"))]
        owners = {(local, remote): uid for local, remote, uid, _ in table}
        found = [
            f"{remote} of uid {owners[remote, local]}"
            for local, remote, _, inode in table
            # The other end's row has the addresses the other way round; a peer on another node has none here.
            if inode in mine and owners.get((remote, local), os.geteuid()) != os.geteuid()
        ]
        return found[:_MOST_NAMED]
    return []


def _socket_inodes() -> Iterable[int]:
    for fd in os.listdir("/proc/self/fd"):
        # A descriptor may be closed between the two calls.
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:["):
                yield int(target[8:-1])


def _connections(path: Path) -> Iterable[tuple[str, str, int, int]]:
    """Yields (local, remote, uid, inode) of each established connection; addresses mapped into IPv6 are IPv4."""
    for line in path.read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == _ESTABLISHED:
            yield _address(words[1]), _address(words[2]), int(words[7]), int(words[9])


def _address(text: str) -> str:
    host, _, port = text.partition(":")
    # The kernel prints each 32-bit word of an address in the machine's own order.
    raw = b"".join(struct.pack("=I", int(host[at : at + 8], 16)) for at in range(0, len(host), 8))
    address: IPv4Address | IPv6Address
    if len(raw) == 4:
        address = IPv4Address(raw)
    else:
        address = IPv6Address(raw)
        address = address.ipv4_mapped or address
    return f"{address}:{int(port, 16)}"
