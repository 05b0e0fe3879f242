"""Replaces standard streams that are closed, full or no longer read: each has one defined end, and none a traceback.

| standard output           | what happens                                                            |
| ------------------------- | ----------------------------------------------------------------------- |
| closed (`>&-`)            | as with /dev/null: the command does its work and keeps its own exit code |
| its reader left (`head`)  | the command ends in silence with 141, as a program that SIGPIPE ends     |
| full (`> /dev/full`)      | one line on standard error, exit code 33                                |

Errors of writing to standard error are ignored: there is no other stream to report them on.
"""

import errno
import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["OutputFailed", "discard_output", "use_checked_streams"]


class OutputFailed(BaseException):
    """Standard output takes no more. No `Exception`: commands that go on after an error must not go on after this."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause)
        self.cause = cause

    @property
    def reader_left(self) -> bool:
        return self.cause.errno == errno.EPIPE


class _Output(io.FileIO):
    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            raise OutputFailed(error) from None


class _Complaints(io.FileIO):
    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return memoryview(data).nbytes


def use_checked_streams() -> None:
    """Replaces this process's standard streams by those described above. Call it once, before anything is opened."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # If it stayed closed, the next file that is opened would get the number, and prints would end up in it.
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = _text(_Output(1, "w", closefd=False), sys.__stdout__)
    sys.stderr = _text(_Complaints(2, "w", closefd=False), sys.__stderr__)


def discard_output() -> None:
    """Discards the output that is still buffered, instead of failing once more at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def _text(raw: io.FileIO, before: io.TextIOWrapper | None) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=before.encoding if before is not None else "utf-8",
        errors=before.errors if before is not None else "backslashreplace",
        line_buffering=True,
    )
