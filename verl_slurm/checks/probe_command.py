"""Runs the command of a probe to its end: without a terminal, in bounded time."""

import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class ProcessOutput(NamedTuple):
    """What a process came to."""

    exit_code: int | None
    """None: it did not end in time, and was killed."""
    out: str
    err: str

    @property
    def last_line(self) -> str:
        """Returns the last line of its output."""
        # A `sitecustomize` of the site's may print before it.
        return self.out.strip().rpartition("\n")[2]

    @property
    def last_words(self) -> str:
        """Returns the last line of what it complained about, or how it ended."""
        return self.err.strip().rpartition("\n")[2] or f"exit code {self.exit_code}"


def run_to_end(
    argv: Sequence[str], timeout_s: float | None, *, text: str = "", env: Mapping[str, str] | None = None
) -> ProcessOutput:
    """Runs a command without a terminal, with `text` as its standard input. OSError: it cannot be started."""
    try:
        done = subprocess.run(
            argv,
            input=text,
            env=env,
            capture_output=True,
            encoding="utf-8",  # whatever the locale: JSON and templates pass here
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ProcessOutput(None, "", f"no end after {timeout_s:.0f} s")
    return ProcessOutput(done.returncode, done.stdout, done.stderr)
