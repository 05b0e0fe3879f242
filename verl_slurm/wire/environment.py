"""Environment variables, and the signal, that the run's own processes use among themselves.

Settings of the user are in the configuration.

The agent sets the first five for the launcher of a node's ranks; the ranks and their children inherit them. The
daemon's `ranks` adds what torchrun would give each rank (RANK, WORLD_SIZE, ...).
"""

import signal

__all__ = [
    "CONTROL_VARIABLE",
    "EPOCH_VARIABLE",
    "GENERATION_VARIABLE",
    "LOCAL_RESTART_VARIABLE",
    "RESUME_VARIABLE",
    "RUN_VARIABLE",
    "STACKS_SIGNAL",
]

CONTROL_VARIABLE = "VERL_SLURM_CONTROL"
"""The agent's control directory on this node, 0700: socket, control page and keys. Unset: there is no daemon."""

RUN_VARIABLE = "VERL_SLURM_RUN"
"""The run's directory, absolute. This variable and the three below are set for guests' loops; our own trainer has
options."""

EPOCH_VARIABLE = "VERL_SLURM_EPOCH"
"""The number of the attempt that may write."""

GENERATION_VARIABLE = "VERL_SLURM_GENERATION"
"""The number of this start of the ranks, from 1 in each attempt."""

RESUME_VARIABLE = "VERL_SLURM_RESUME"
"""The name of the checkpoint that the lead verified (step_000012); empty: start from nothing."""

LOCAL_RESTART_VARIABLE = "VERL_SLURM_LOCAL_RESTART"
"""Replaces SLURM_RESTART_COUNT in a run without Slurm. A lead sets it for the attempt that it becomes by exec."""

STACKS_SIGNAL = signal.SIGRTMIN + 3
"""Makes a rank write the stacks of all its threads into its log (`faulthandler`, in C, whichever thread holds the GIL).
Slurm and launchers do not send this signal."""
