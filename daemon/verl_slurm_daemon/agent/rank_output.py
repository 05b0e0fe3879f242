"""Finds in the output of a node's ranks why they ended."""

import re
from pathlib import Path

from verl_slurm_daemon.processes import tail

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TOLD_BYTES, _TOLD_CHARS = 1 << 16, 500
"""Bytes at the end of the log that are searched for the cause; characters of each line."""
_HYDRA = "Error executing job with overrides: "


def first_cause(log: Path) -> str:
    """Returns the lines of the ranks' log that state why they ended. A launcher prints its own after the rank's, verl's
    processes warn of errors that were none, and Hydra repeats each word of the command line.
    """
    text = tail(log, _TOLD_BYTES)
    lines = [_COLOUR.sub("", line)[:_TOLD_CHARS] for line in text.splitlines() if line.strip()]
    told = [line for line in lines if "Warning" not in line and not line.startswith(_HYDRA)]
    errors = [line for line in told if "Error" in line or "exitcode" in line or "Signal" in line]
    return "\n".join((errors or lines)[-6:])
