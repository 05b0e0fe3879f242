"""Writes lines for people from a rank, if it can; a failure never stops training."""

import contextlib
import sys
from typing import TextIO


def say(text: str) -> None:
    """Writes one line to stdout."""
    _write(sys.stdout, text)


def complain(text: str) -> None:
    """Writes one line to stderr."""
    _write(sys.stderr, text)


def _write(stream: TextIO, text: str) -> None:
    # OSError: standard output is a file beside the checkpoints, whose disk may be full for now.
    # ValueError: the stream is closed.
    with contextlib.suppress(OSError, ValueError):
        stream.write(text + "\n")
        # At once: the line must be there if the process is killed next.
        stream.flush()
