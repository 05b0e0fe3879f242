"""Which signals Slurm and its users send to the processes of a step: none of them is a reason to die."""

import signal

__all__ = ["RELAYED", "WARNINGS"]

WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGCONT, signal.SIGHUP)
"""What the ranks and their launcher ignore; and in a Slurm job, what an agent tells its lead."""
RELAYED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
"""What an agent outside Slurm tells its lead: there may be a terminal, and Ctrl-C is to end it."""
