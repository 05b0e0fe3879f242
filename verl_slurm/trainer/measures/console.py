"""Lines for people, from a rank: written if they can be, and never a reason to stop.

Standard output of a rank is a file beside the checkpoints. The disk that is too full for a line may have room
again, or have had room for the save that the line is about.
"""

import contextlib
import sys
from typing import TextIO

__all__ = ["complain", "flush", "say"]


def say(text: str) -> None:
    """One line on stdout."""
    _write(sys.stdout, text)


def complain(text: str) -> None:
    """One line on stderr."""
    _write(sys.stderr, text)


def flush() -> None:
    """Hand over what is still buffered, as far as that goes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _write(stream: TextIO, text: str) -> None:
    # ValueError: the stream is closed.
    with contextlib.suppress(OSError, ValueError):
        stream.write(text + "\n")
        stream.flush()
