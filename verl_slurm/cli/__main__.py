"""`verl-slurm`: runs the command line and turns an error into a line and an exit code.

Standard streams that are closed, full or no longer read are replaced: each has one defined end, and none a traceback.

| standard output           | what happens                                                            |
| ------------------------- | ----------------------------------------------------------------------- |
| closed (`>&-`)            | as with /dev/null: the command does its work and keeps its own exit code |
| its reader left (`head`)  | the command ends in silence with 141, as a program that SIGPIPE ends     |
| full (`> /dev/full`)      | one line on standard error, exit code 33                                |

Errors of writing to standard error are ignored: there is no other stream to report them on. A character that the
encoding of a stream lacks is printed as Python's escape, on both.
"""

# ruff: noqa: E402 - nothing is imported before the search path is known to be safe
from verl_slurm.base.search_path import leave_working_directory

leave_working_directory("verl-slurm", __name__)

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import click

from verl_slurm.base.errors import (
    ConfigError,
    NoRoom,
    NotFound,
    OutputRefused,
    PermissionRefused,
    VerlSlurmError,
    is_transient_storage_error,
)
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.packages import PackageMissing

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


_INTERRUPTED = 130
_ENDING = (signal.SIGTERM, signal.SIGHUP)


def main(args: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code. Unexpected exceptions keep their traceback."""
    if args is None:
        _use_checked_streams()
    words = sys.argv[1:] if args is None else args
    with _signals_unwind() as received:
        code = _run_and_flush(words)
    # As a shell says it. A command that ended by itself all the same keeps its own code.
    return 128 + received[0] if received and code == _INTERRUPTED else code


def _run_and_flush(words: list[str]) -> int:
    try:
        code = _run(words)
        # Here, where a failure has its exit code: Python's own flush at exit would end with a traceback.
        sys.stdout.flush()
        return code
    except _OutputFailed as failed:
        _discard_output()
        if failed.reader_left:
            return int(ExitCode.PIPE)
        return _report(
            OutputRefused(
                "standard output cannot be written",
                found=failed.cause.strerror,
                remedy="free some space, or print somewhere else",
            ),
            words,
        )


@contextmanager
def _signals_unwind() -> Iterator[list[signal.Signals]]:
    """Makes SIGTERM and SIGHUP act like Ctrl-C. Yields a list of the first of them, once it has come."""
    received: list[signal.Signals] = []
    former = {}
    # Python lets the main thread alone set handlers; tests and programs may call `main` from another one.
    if threading.current_thread() is threading.main_thread():
        # nohup ignores SIGHUP, and that must stay so
        # So that every `finally` runs: by default Python would die of them at once.
        former = {number: signal.SIG_DFL for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL}

    def unwind(number: int, frame: FrameType | None) -> None:
        # Ignored from the first one on: a second must not interrupt what the first one's unwinding tidies up.
        for each in former:
            # `timeout` sends two.
            signal.signal(each, signal.SIG_IGN)
        received.append(signal.Signals(number))
        # asyncio's own, while it runs: it cancels the main task
        interrupt = signal.getsignal(signal.SIGINT)
        if not callable(interrupt):
            raise KeyboardInterrupt
        interrupt(signal.SIGINT, frame)

    for number in former:
        signal.signal(number, unwind)
    try:
        yield received
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _is_somewhere() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _run(words: list[str]) -> int:
    from verl_slurm.cli.main import cli

    if "_VERL_SLURM_COMPLETE" in os.environ:  # click's protocol: a shell asks for completions
        import verl_slurm.cli.command_options  # noqa: F401 - registers bash's
    try:
        # Not standalone: click would answer a closed pipe by exit code 1 itself.
        result = cli.main(words, prog_name="verl-slurm", standalone_mode=False)
        return int(result) if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show(sys.stdout)
        return int(ExitCode.OK)
    except click.ClickException as error:
        # By the bare words: what cannot be parsed has set no option.
        if "--json" in words:
            from verl_slurm.cli.show import render

            render.json_value({"error": error.format_message(), "exit_code": int(ExitCode.USAGE)})
        error.show()
        return int(ExitCode.USAGE)
    except (click.exceptions.Abort, KeyboardInterrupt):
        return int(ExitCode.INTERRUPTED)
    except VerlSlurmError as error:
        return _report(error, words)
    except FileNotFoundError:
        if _is_somewhere():
            raise
        gone = NotFound("the directory that you are in is gone", remedy="cd to one that is there")
        return _report(gone, words)
    except OSError as error:
        is_named = isinstance(error.filename, str | bytes)
        # An error of the system that names no file and none of storage may be a bug of ours.
        if not is_named and not isinstance(error, PermissionError) and not is_transient_storage_error(error):
            raise
        return _report(_refused(error, is_named), words)
    except UnicodeEncodeError as error:
        # With UTF-8 it is a bug of ours.
        if sys.getfilesystemencoding() == "utf-8":
            raise
        lacking = ConfigError(
            "this locale's encoding has no such character",
            where=error.object,
            found=f"{error.object[error.start : error.end]}, and {error.encoding}",
            remedy="export LC_ALL=C.UTF-8, and try again",
        )
        return _report(lacking, words)
    except ModuleNotFoundError as error:
        missing = PackageMissing.for_module(error.name or "")
        if missing is None:
            raise
        return _report(missing, words)


def _refused(error: OSError, is_named: bool) -> VerlSlurmError:
    if isinstance(error, PermissionError):
        remedy = "check the owner and the mode of that path"
        return PermissionRefused("permission denied", where=error.filename, remedy=remedy)
    kind: type[VerlSlurmError] = PermissionRefused
    remedy = "see what lies there"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        kind, remedy = NoRoom, "make room: `df -h` shows the file systems, `quota -s` your own share"
    elif is_transient_storage_error(error):
        remedy = "try again; if it stays so, `verl-slurm doctor` says what fails"
    what = "cannot be read or written" if is_named else "the storage or this machine fails"
    return kind(
        what, where=(error.filename or None) if is_named else None, found=error.strerror, remedy=remedy
    )


def _report(error: VerlSlurmError, words: list[str]) -> int:
    from verl_slurm.cli.show import render

    render.error(error, as_json="--json" in words)
    return int(error.exit_code)


class _OutputFailed(BaseException):
    """Standard output takes no more."""

    def __init__(self, cause: OSError) -> None:
        # No `Exception`: commands that go on after an error must not go on after this.
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
            raise _OutputFailed(error) from None


class _Complaints(io.FileIO):
    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            # As if written: otherwise the buffer would keep it and fail again at exit.
            return memoryview(data).nbytes


def _use_checked_streams() -> None:
    """Replaces the standard streams by those described above. Call it once, before anything is opened."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # If it stayed closed, the next file that is opened would get the number, and prints would end up in it.
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = _text(_Output(1, "w", closefd=False), sys.__stdout__)
    sys.stderr = _text(_Complaints(2, "w", closefd=False), sys.__stderr__)


def _discard_output() -> None:
    # What is still buffered would fail once more at exit.
    null = os.open(os.devnull, os.O_WRONLY)
    # Under the same number: what is buffered goes to the descriptor 1 that the stream holds.
    os.dup2(null, 1)
    os.close(null)


def _text(raw: io.FileIO, before: io.TextIOWrapper | None) -> io.TextIOWrapper:
    errors = before.errors if before is not None else "backslashreplace"
    # "surrogateescape": Python's choice for the C locale, as strict as "strict" towards other characters. A choice of
    # the user's (PYTHONIOENCODING=ascii:replace) stays.
    if errors in ("strict", "surrogateescape"):
        errors = "backslashreplace"
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=before.encoding if before is not None else "utf-8",
        errors=errors,
        line_buffering=True,
    )


if __name__ == "__main__":
    sys.exit(main())
