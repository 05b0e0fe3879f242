"""Identifies the process at the other end of a Unix socket, as the kernel reports it (socket(7), SO_PEERCRED)."""

import os
import socket
import struct
from typing import NamedTuple

from verl_slurm.base.errors import WireError

# Unsigned ids, as in socket(7): one above 2^31 would else be another user's.
_UCRED = struct.Struct("iII")  # pid_t, uid_t, gid_t


class Peer(NamedTuple):
    """Identifies the process that connected, or that listens."""

    pid: int
    uid: int

    @property
    def is_ours(self) -> bool:
        """Returns whether it runs as our user."""
        return self.uid == os.geteuid()

    def __str__(self) -> str:
        return f"pid {self.pid} of uid {self.uid}"


def peer_of(connection: socket.socket) -> Peer:
    """Returns the process at the other end of a connection. Raises OSError: the system does not tell."""
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid, uid)


def require_our_agent(connection: socket.socket, path: str) -> None:
    """Refuses a socket on which another user listens. Raises WireError: one does. OSError as `peer_of`."""
    # The path to our agent's socket may have been replaced.
    peer = peer_of(connection)
    if not peer.is_ours:
        raise WireError(
            "another user answers in the place of this node's agent",
            where=path,
            found=f"uid {peer.uid}",
            expected=f"uid {os.geteuid()}",
            remedy="set TMPDIR to a directory that others cannot write to",
        )
