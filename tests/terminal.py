"""The command line on a terminal of its own: a pseudo-terminal, in which it finds what a user types."""

import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.processes import python_path


class Shown(NamedTuple):
    """What a command has left on its terminal."""

    code: int
    text: str

    @property
    def lines(self) -> list[str]:
        """Without the blanks at the ends."""
        return [line.rstrip() for line in self.text.splitlines()]


def on_a_terminal(
    *words: object,
    typed: str = "",
    columns: int = 80,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Shown:
    """Runs `verl-slurm WORDS` to its end.

    Args:
        typed: lies in the terminal's input from the start; `\\x04` at the beginning of a line ends the input.
    """
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    # Without echo, so that the text is the program's alone.
    mode = termios.tcgetattr(follower)
    mode[3] &= ~termios.ECHO
    termios.tcsetattr(follower, termios.TCSANOW, mode)
    os.write(leader, typed.encode())
    environ = {**os.environ, **python_path(), "LC_ALL": "C.UTF-8", "TERM": "xterm", **(env or {})}
    environ.pop("COLUMNS", None)
    argv = [sys.executable, "-m", "verl_slurm.cli", *map(str, words)]
    child = os.posix_spawn(
        "/usr/bin/env",
        # The working directory: posix_spawn has no argument for it.
        ["env", "-C", str(cwd or Path.cwd()), *argv],
        environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, follower, fd) for fd in (0, 1, 2)],
    )
    os.close(follower)
    shown = b""
    # A terminal whose last program has left gives EIO.
    try:
        while part := os.read(leader, 1 << 16):
            shown += part
    except OSError:
        pass
    os.close(leader)
    return Shown(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), shown.decode().replace("\r\n", "\n"))
