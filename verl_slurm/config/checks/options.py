"""Checks options for sbatch that a user writes by their long names. Pure."""

import re
from collections.abc import Iterator, Mapping

from verl_slurm.config.checks import Complaint

__all__ = ["OWN_OPTIONS", "option_complaints"]

_LONG_OPTION = re.compile(r"[a-z][a-z0-9-]{1,40}")
OWN_OPTIONS = {
    "array",
    "cpus-per-task",
    "error",
    "export",
    "gpus-per-node",
    "job-name",
    "mem",
    "no-requeue",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "open-mode",
    "output",
    "parsable",
    "requeue",
    "signal",
    "test-only",
    "time",
    "wait",
    "wrap",
}
"""Options that submit sets itself; a second value would contradict the daemon."""


def option_complaints(key: str, options: Mapping[str, str | int | bool]) -> Iterator[Complaint]:
    """Yields the options that are misspelt, and values that would begin a line of their own."""
    for option, value in options.items():
        if not _LONG_OPTION.fullmatch(option):
            yield Complaint(
                f"{key}.{option!r}", "not an option", "sbatch's long name without dashes", "e.g. constraint"
            )
        elif isinstance(value, str) and not value.isprintable():
            # A line break would end the #SBATCH line and start a command of its own.
            yield Complaint(f"{key}.{option}", repr(value), "one line of text", "remove the line break")
