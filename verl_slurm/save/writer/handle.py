"""The rank's end of its saver process. Blocking calls, made from a thread that has nothing else to do."""

import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import msgspec

from verl_slurm.base.errors import UNREADABLE
from verl_slurm.config.schema import EncryptionConfig
from verl_slurm.save.writer.arena import Arena
from verl_slurm.save.writer.protocol import FromSaver, SaverReady, Write, Written


class SaverDied(OSError):
    """The saver process is gone or talks nonsense; a save that was under way is lost."""


class SaverProcess:
    """A saver for `arena`, started at once, once per rank; `wait_ready` waits until it can serve."""

    def __init__(self, arena: Arena, *, hashers: int = 1, encryption: EncryptionConfig | None = None) -> None:
        # -P: otherwise Python imports from the working directory first, and a module that lies there would run here.
        argv = [sys.executable, "-P", "-m", "verl_slurm.save.writer.process"]
        argv += ["--arena", str(arena.fd), "--size", str(arena.size), "--hashers", str(hashers)]
        if encryption is not None:
            # A path or a variable's name. The key itself stays out of argv, which every user of the node can read.
            argv += ["--encryption", msgspec.json.encode(encryption).decode()]
        # No pipe: processes that the rank forks later (workers of a data loader) hold a pipe's end open, and its reader
        # would wait for theirs.
        self._in, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            # stderr is inherited: what the saver says goes to the rank's log. Every other descriptor of the rank stays
            # closed in it.
            argv,
            stdin=theirs.fileno(),
            stdout=subprocess.PIPE,
            pass_fds=(arena.fd,),
            bufsize=0,
        )
        theirs.close()
        assert self._process.stdout is not None
        self._out = self._process.stdout
        self._decoder = msgspec.json.Decoder(FromSaver)
        self._pending = b""
        self._count = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Waits until the arena is faulted in. SaverDied: it did not start."""
        if not isinstance(self._receive(), SaverReady):
            # No request has been sent, so this is not our program's protocol. Nothing that follows could be believed.
            raise self._died("an answer before its first word")

    def write(
        self, request: Write, on_done: Callable[[Written], None] = lambda _: None
    ) -> tuple[Written, ...]:
        """Sends `request`; returns an answer for each of its directories, in order, once it has all.

        `on_done` is told of each as soon as it comes, from this thread. SaverDied: it ended, or talks
        nonsense.
        """
        # Numbered, so that a late answer to an earlier request never counts for this one.
        self._count += 1
        request, directories = msgspec.structs.replace(request, save=self._count), request.directories
        data = memoryview(msgspec.json.encode(request) + b"\n")
        try:
            while data:
                data = data[self._in.send(data) :]
        except OSError as error:
            raise self._died(str(error)) from error
        answers: dict[str, Written] = {}
        while len(answers) < len(directories):
            answer = self._receive()
            if not isinstance(answer, Written) or answer.save != self._count:
                raise self._died(f"{answer!r:.200}")
            # Twice, or not asked for: the caller sets one future for each directory, and would fail in another place.
            if answer.directory not in directories or answer.directory in answers:
                raise self._died(f"an answer for {answer.directory!r:.200}")
            answers[answer.directory] = answer
            # At once: the nodes' disks are committed on this answer while shared storage is still being written.
            on_done(answer)
        return tuple(answers[directory] for directory in directories)

    def close(self) -> None:
        """End it; what it writes just now is finished first."""
        # The end of its input ends the saver's loop after the request in hand; a signal would cut a write short.
        with suppress(OSError):  # it is gone
            self._in.shutdown(socket.SHUT_WR)
        self._process.wait()
        self._in.close()
        self._out.close()

    def _receive(self) -> FromSaver:
        while b"\n" not in self._pending:
            more = self._out.read(1 << 20)
            if not more:
                raise self._died("the end of its output")
            self._pending += more
        # More than one answer may come in one read, and an answer in several.
        line, _, self._pending = self._pending.partition(b"\n")
        try:
            message: FromSaver = self._decoder.decode(line)
        except UNREADABLE as error:
            raise self._died(f"{line[:200]!r}") from error
        return message

    def _died(self, found: str) -> SaverDied:
        code = self._process.poll()
        state = "is still there" if code is None else f"ended with {code}"
        return SaverDied(f"the saver process {state}: {found}")
