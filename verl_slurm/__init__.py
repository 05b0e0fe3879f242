"""verl-slurm: RL post-training that survives anything a Slurm cluster does to it.

This file imports nothing: whatever it imported would reach the daemon, which must stay small.
"""

__version__ = "0.1.0"
