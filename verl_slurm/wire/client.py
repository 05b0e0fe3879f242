"""The rank's end of the line to its agent.

The line is a Unix SEQPACKET socket: one packet is one message, sent whole or not at all, so a dropped message does not
break the next one. A rank never waits for its agent: `Progress` is dropped if the agent is slow, and the few messages
that matter wait up to `_PATIENCE_S`. If the agent is gone, sending does nothing. The agent's death is noticed elsewhere
(the ranks die with it), and a save under way must not die of it.
"""

import socket
import threading
import time
from pathlib import Path
from typing import Protocol, Self

import msgspec

from verl_slurm.wire.control_page import PAGE_NAME, ControlPage
from verl_slurm.wire.messages import FromRank, Progress, SaveRequest
from verl_slurm.wire.peer_credentials import require_our_agent

SOCKET_NAME = "agent.sock"
MAX_MESSAGE = 64 * 1024
"""Bytes of one message; a rank's own are under 4 KiB."""

_PATIENCE_S = 2.0
_PROGRESS_EVERY_S = 0.5
"""Interval of rank 0, which people see; it also sends each new phase."""
_OTHERS_EVERY_S = 1.0
"""Interval of the other ranks: their messages show that they live, and each costs a machine some time."""


class RankLine(Protocol):
    """The interface of a rank to its daemon."""

    def send(self, message: FromRank) -> None:
        """Sends a message to the daemon; never raises, never blocks for long."""

    def request(self) -> SaveRequest | None:
        """Returns the daemon's newest request. Costs one memory read."""

    def waited(self, seconds: float) -> None:
        """Records that this rank has waited for the others at a safe point, until now."""


class NoDaemon:
    """Replaces the daemon for a trainer that is started by hand: it requests nothing and drops messages."""

    def send(self, message: FromRank) -> None:
        del message

    def request(self) -> SaveRequest | None:
        return None

    def waited(self, seconds: float) -> None:
        del seconds


class RankClient:
    """Connects a rank to its agent."""

    def __init__(self, connection: socket.socket, page: ControlPage) -> None:
        self._socket, self._page = connection, page
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()  # a guest's watcher and its commits send, too
        self._next_progress, self._phase = 0.0, ""
        self._since: float | None = None  # the first safe point
        self._waited_s = 0.0

    @classmethod
    def connect(cls, control: Path) -> Self:
        """Connects to the agent that made the directory `control`."""
        page = ControlPage.open(control / PAGE_NAME)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            connection.connect(path := str(control / SOCKET_NAME))
            # After connect: the directory that TMPDIR names may let others put a socket of theirs in this place.
            require_our_agent(connection, path)
        except BaseException:
            connection.close()
            raise
        return cls(connection, page)

    def send(self, message: FromRank) -> None:
        with self._lock:
            self._send(message)

    def _send(self, message: FromRank) -> None:
        now = time.monotonic()
        patience = _PATIENCE_S
        if isinstance(message, Progress):
            if self._since is not None:
                own_s = max(now - self._since - self._waited_s, 0.0)
                message = msgspec.structs.replace(message, own_s=round(own_s, 3))
            # Rank 0 always sends a new phase and the last step; a step's end carries its metrics.
            last = message.step == message.total > 0
            news = message.rank == 0 and (last or message.phase != self._phase)
            if now < self._next_progress and not news:
                return
            every = _OTHERS_EVERY_S if message.rank else _PROGRESS_EVERY_S
            self._next_progress, self._phase = now + every, message.phase
            # A step's end carries its metrics and is worth a moment; every other position is soon out of date.
            patience = _PATIENCE_S if message.phase == "step_end" else 0.0
        self._socket.settimeout(patience)
        try:
            self._socket.send(self._encoder.encode(message))
        except OSError:  # too slow, gone, or out of buffers: the rank continues without it
            return

    def request(self) -> SaveRequest | None:
        return self._page.request() if self._page.request_id() else None

    def waited(self, seconds: float) -> None:
        # Until the first safe point ranks load their models, each for its own time.
        if self._since is None:
            self._since = time.monotonic()
        else:
            self._waited_s += seconds

    def close(self) -> None:
        self._socket.close()
        self._page.close()
