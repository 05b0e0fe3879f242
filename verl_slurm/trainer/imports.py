"""Imports all that a rank needs before it knows its number: for ranks that stand by (`rendezvous.standby`).

`trainer.__main__` imports the same later, behind its first message to the daemon.
"""

from verl_slurm.trainer import flight, known_results, place, setup

__all__ = ["flight", "known_results", "place", "setup"]
