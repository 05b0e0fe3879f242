"""Lets a process answer `STACKS_SIGNAL` with the stacks of all its threads. No torch."""

import faulthandler
import os
from contextlib import suppress
from pathlib import Path

from verl_slurm.base.files import open_log
from verl_slurm.wire.environment import LOG_VARIABLE, STACKS_SIGNAL


def answer_with_stacks() -> None:
    """Writes to the log that the agent names, else to stderr, which is that log but for what Ray starts.

    In C, so that a process answers that hangs with the interpreter's lock held. Children of a fork answer, too.
    """
    file = 2
    if log := os.environ.get(LOG_VARIABLE):
        # Ray keeps the output of its processes in files of its own, which end with the job.
        with suppress(OSError):
            file = open_log(Path(log))
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
