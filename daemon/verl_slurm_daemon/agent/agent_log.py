"""An agent's own log: what it saw and did while it could not tell the lead.

Output that an agent prints goes by srun to the lead's node, and is lost with it. Logging never hurts the
agent: it swallows every error (a full disk, a directory that is no longer ours). A line is one `write`
without fsync. After `detach` a thread does even that.
"""

import io
import os
import queue
import select
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl_slurm.base.files import open_log
from verl_slurm_daemon.journal import log_line

# For one agent. It writes about ten; an operator who sends signals in a loop must not fill a disk.
_MAX_LINES = 500


class AgentLog:
    """The log of one agent, 0600. All restarts of one attempt append to the same file."""

    def __init__(self, path: Path, who: str) -> None:
        self._path, self._who = path, who
        self._fd: int | None = None
        self._left, self._torn = _MAX_LINES, False
        self._queue: queue.SimpleQueue[bytes | None] | None = None
        self._thread: threading.Thread | None = None

    def say(self, event: str, *, loud: bool = False, **fields: Any) -> None:
        """Writes one line. Never raises; after `detach`, never waits."""
        if self._left <= 0:
            return
        self._left -= 1
        try:
            line = log_line(self._who, event, fields, loud=loud)
        except Exception as error:  # noqa: BLE001 - a fact that cannot be written is no reason to die
            line = log_line(self._who, event, {"log": f"{type(error).__name__}"}, loud=loud)
        data = line.encode("utf-8", "replace")
        if self._queue is not None:
            self._queue.put(data)
        else:
            self._write(data)

    def detach(self) -> None:
        """Lets a thread write from now on."""
        if self._queue is not None:
            return
        pending: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # Not from the start: a launcher must be forked by a process with one thread.
        thread = threading.Thread(target=self._drain, args=(pending,), daemon=True, name="agent-log")
        with suppress(RuntimeError):  # no thread can be started: the caller keeps writing
            thread.start()
            self._queue, self._thread = pending, thread

    def close(self, patience_s: float = 1.0) -> None:
        """Waits at most `patience_s` seconds until all is written."""
        if self._queue is not None and self._thread is not None:
            self._queue.put(None)
            # The file stays open: the thread may still hang in it.
            self._thread.join(patience_s)

    def _drain(self, pending: "queue.SimpleQueue[bytes | None]") -> None:
        while (data := pending.get()) is not None:
            self._write(data)

    def _write(self, data: bytes) -> None:
        try:
            if self._fd is None:
                self._fd = open_log(self._path, os.O_NONBLOCK)
            data = b"\n" + data if self._torn else data
            self._torn = os.write(self._fd, data) != len(data)  # the next entry then begins a new line
        except OSError:
            return  # tried again with the next line


class _Quiet(io.TextIOBase):
    """A standard stream that neither raises nor blocks: output that does not fit into the pipe now is lost."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            data = memoryview(text.encode("utf-8", "replace"))
            poll = select.poll()
            poll.register(self._fd, select.POLLOUT)
            # If poll(2) reports a pipe as writable, PIPE_BUF bytes fit.
            while data and any(flags & select.POLLOUT for _, flags in poll.poll(0)):
                data = data[os.write(self._fd, data[: select.PIPE_BUF]) :]
        return len(text)


def quiet_streams() -> None:
    """Replaces the standard streams by ones that neither raise nor block."""
    sys.stdout, sys.stderr = _Quiet(1), _Quiet(2)
