"""Runs one command to its end: with a deadline and capped output, and unharmed by the signals of the job's end.

A requeue sends TERM to every process of the job, this command too; so it starts with TERM, USR1, USR2, INT and HUP
blocked. SIGKILL after KillWait still ends it.

Blocking: the client calls it in a worker thread. That avoids asyncio's child watching and a `preexec_fn`, which is
unsafe beside threads.
"""

import os
import re
import selectors
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import msgspec

from verl_slurm.base.errors import SlurmMissing

MAX_OUTPUT_BYTES = 2**20
"""Limit of each stream. A `scontrol show job` is 2 kB; a broken stub or wrapper is cut off here."""
_BLOCKED = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP}


_MUTE_S = 2.0
"""Seconds for which a user may wait without a word."""
_TELL: ContextVar[Callable[[str], None] | None] = ContextVar("who is told of waiting", default=None)


@contextmanager
def telling(tell: Callable[[str], None]) -> Iterator[None]:
    """Has `tell` called with a line, from another thread, for each command below that Slurm leaves unanswered, and
    with those of `tell_user`.
    """
    token = _TELL.set(tell)
    try:
        yield
    finally:
        _TELL.reset(token)


def tell_user(text: str) -> None:
    """Hands a line to what `_TELL` names; without one, as in a program of the user's, it is a warning."""
    if (tell := _TELL.get()) is not None:
        tell(text)
    else:
        warnings.warn(text, stacklevel=2)


@contextmanager
def waiting_for(command: str, timeout_s: float) -> Iterator[None]:
    """Surrounds a command of Slurm's that may take up to `timeout_s`."""
    tell = _TELL.get()
    if tell is None:
        yield
        return
    line = f"waiting for Slurm: {command} has not answered yet, and has up to {timeout_s:.0f} s"
    timer = threading.Timer(_MUTE_S, tell, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Completed(msgspec.Struct, frozen=True, kw_only=True):
    """A command that ended by itself."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float


def run_command(
    argv: list[str], env: Mapping[str, str], timeout_s: float, cwd: str | None = None
) -> Completed:
    """Runs a command, whose program is an absolute path, with this whole environment, and reads its output.

    Raises SlurmMissing: it cannot be started, does not end in time, or prints endlessly. It is dead then.
    """
    began = time.monotonic()
    # A requeue sends TERM within milliseconds. A blocked mask survives exec, a handler does not. It is set in this
    # thread alone, between two lines, so no other process that starts meanwhile inherits it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, cwd=cwd
        )
    except OSError as error:
        raise _no_answer(argv, str(error)) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with process:
        try:
            stdout, stderr = _read(process, argv, began + timeout_s)
            code = process.wait(max(0.0, began + timeout_s - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            words = slurm_words((error.stderr or b"").decode(errors="replace"))
            said = f"; it said: {words}" if words else ""
            raise _no_answer(argv, f"no end within {timeout_s:g} s{said}") from None
        except OSError as error:  # no descriptor left to listen with
            raise _no_answer(argv, str(error)) from error
        finally:
            # Also after an error: leaving `with process` waits for its end.
            if process.poll() is None:
                process.kill()
    return Completed(exit_code=code, stdout=stdout, stderr=stderr, seconds=time.monotonic() - began)


FULL, ROOM = (
    "Slurm takes no further job for now",
    "it has as many as MaxJobCount of slurm.conf: try again later",
)
_SPEAKER = re.compile(r"^(?:sbatch|srun|scontrol|scancel|squeue|sinfo|sacct): (?:(?:error|fatal): )?")
_FAILURE = re.compile(r"^(?:allocation failure|Batch job submission failed): ")


def slurm_words(text: str) -> str:
    """Returns all that a command of Slurm said, on one line: a site's plug-ins speak before its last sentence. Pure."""
    lines = [_FAILURE.sub("", _SPEAKER.sub("", line.strip())) for line in text.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))


def _read(process: "subprocess.Popen[bytes]", argv: list[str], deadline: float) -> tuple[str, str]:
    """Reads both streams to their ends; raises TimeoutExpired at the deadline."""
    assert process.stdout is not None
    assert process.stderr is not None
    said = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    with selectors.DefaultSelector() as selector:
        for stream in said:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            # A command may hang with its streams open.
            if not ready:
                raise subprocess.TimeoutExpired(argv, 0, stderr=bytes(said[process.stderr.fileno()]))
            for key, _ in ready:
                chunk = os.read(key.fd, 65536)
                said[key.fd] += chunk
                if not chunk:
                    selector.unregister(key.fd)
                elif len(said[key.fd]) > MAX_OUTPUT_BYTES:
                    raise _no_answer(argv, f"more than {MAX_OUTPUT_BYTES} bytes of output")
    stdout, stderr = (data.decode(errors="replace") for data in said.values())
    return stdout, stderr


def takes_no_job(words: str) -> bool:
    """Returns whether Slurm has as many jobs as it may hold (MaxJobCount). Pure."""
    return (
        re.search(r"unable to accept job|(failure|failed): Resource temporarily unavailable", words)
        is not None
    )


def _no_answer(argv: list[str], found: str) -> SlurmMissing:
    full = takes_no_job(found)
    return SlurmMissing(
        FULL if full else "Slurm does not answer",
        where=" ".join(argv),
        found=found,
        remedy=ROOM if full else "see whether slurmctld is up: scontrol ping",
    )
