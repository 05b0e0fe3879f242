"""The rank's end of the store that all ranks of a restart share; no torch here (`verl_slurm.loops.rendezvous.store`).

It is a Unix stream socket beside the rank's other one, in the agent's 0700 directory; the agent checks the peer's uid.
Each message is a u32 length (big endian) and that many bytes of msgpack: `FromStoreClient` one way, `StoreAnswer` the
other. One connection carries one call at a time, so a call that waits for a key blocks no other call.
"""

import os
import socket
import struct
import threading
from pathlib import Path

import msgspec

from verl_slurm.base.errors import UNREADABLE, WireError
from verl_slurm.wire.framing import MAX_FRAME
from verl_slurm.wire.messages import FromStoreClient, StoreAnswer
from verl_slurm.wire.peer_credentials import require_our_agent

STORE_SOCKET_NAME = "store.sock"
RANKS_KEY_NAME = "ranks.key"
"""File of 32 bytes, 0600: the key by which the ranks of one restart prove themselves to each other
(`rendezvous.install`)."""

LENGTH = struct.Struct(">I")
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(StoreAnswer)


class StoreLine:
    """Calls the store from any thread; torch's C++ threads call it, too. Idle connections are kept."""

    def __init__(self, control: Path) -> None:
        self._path = str(control / STORE_SOCKET_NAME)
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._pid = os.getpid()

    def call(self, message: FromStoreClient) -> StoreAnswer:
        """Sends one message and waits for its answer. Raises WireError: the agent is gone, or not ours."""
        # One call on one connection: a call that waits for a key holds up no other thread.
        connection = self._take()
        try:
            data = _ENCODER.encode(message)
            connection.sendall(LENGTH.pack(len(data)) + data)
            (size,) = LENGTH.unpack(_receive(connection, LENGTH.size))
            if size > MAX_FRAME:
                raise WireError("an answer of the ranks' store is too large", found=size, expected=MAX_FRAME)
            answer = _DECODER.decode(_receive(connection, size))
        except UNREADABLE as error:
            connection.close()
            raise WireError("an answer of the ranks' store cannot be read", found=error) from error
        except OSError as error:
            connection.close()
            raise WireError(
                "the agent of this node does not answer", where=self._path, found=error
            ) from error
        except BaseException:  # after Ctrl-C in a call, its answer would be taken for the next call's
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)
        return answer

    def _take(self) -> socket.socket:
        # A forked child has the parent's descriptors: both would read each other's answers. Its lock may be held, too.
        if self._pid != os.getpid():
            self._lock, self._idle, self._pid = threading.Lock(), [], os.getpid()
        with self._lock:
            if self._idle:
                return self._idle.pop()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.connect(self._path)
            require_our_agent(connection, self._path)
        except OSError as error:
            connection.close()
            raise WireError(
                "the agent of this node does not listen", where=self._path, found=error
            ) from error
        except WireError:
            connection.close()
            raise
        return connection


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise ConnectionResetError("it closed the connection")
        data += part
    return bytes(data)
