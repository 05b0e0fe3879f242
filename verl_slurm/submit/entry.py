"""The object that submitit unpickles on the first node: it turns its process into the lead.

Imports as little as it can.

`os.execv` keeps the process id, so Slurm's `B:` signals and submitit's local controller continue to reach it. It also
drops submitit's own handlers, which would requeue by elapsed time.
"""

import os
import signal
import sys
from typing import NoReturn

__all__ = ["BecomeLead"]

_EARLY = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGCONT}


class BecomeLead:
    """Turns its process into the lead. Picklable by reference; holds a path and nothing else.

    Args:
        run_dir: the run directory, absolute.
    """

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir

    def __call__(self) -> NoReturn:
        # Some hundred milliseconds lie between exec and the lead's own handlers, in which a warning would kill it.
        # Blocked signals stay blocked over exec, and a pending one is delivered when the lead unblocks them.
        signal.pthread_sigmask(signal.SIG_BLOCK, _EARLY)
        sys.stdout.flush()
        sys.stderr.flush()
        # `start_job` put the path of an open descriptor there, which this exec closes.
        os.environ["SUBMITIT_FOLDER"] = os.path.join(self.run_dir, "logs")
        argv = [sys.executable, "-P", "-m", "verl_slurm_daemon", "lead", "--run", self.run_dir]
        os.execv(sys.executable, argv)  # noqa: S606 - an argument list of ours, and no shell is what we want
