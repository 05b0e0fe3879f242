"""Environment variables of the project, and the signal that the run's own processes use among themselves.

Settings of the user are in the configuration. docs/reference-environment.md is made from the texts below.

The agent sets the first five for the launcher of a node's ranks; the ranks and their children inherit them. The
daemon's `ranks` adds what torchrun would give each rank (RANK, WORLD_SIZE, ...).
"""

import os
import signal

CONTROL_VARIABLE = "VERL_SLURM_CONTROL"
"""The agent's control directory on this node, 0700: socket, control page and keys. Unset: there is no daemon."""

RUN_VARIABLE = "VERL_SLURM_RUN"
"""The run's directory, absolute. This variable and the three below are set for guests' loops; our own trainer has
options."""

ATTEMPT_VARIABLE = "VERL_SLURM_ATTEMPT"
"""The number of the attempt that may write."""

RESTART_VARIABLE = "VERL_SLURM_RESTART"
"""The number of this start of the ranks, from 1 in each attempt."""

RESUME_VARIABLE = "VERL_SLURM_RESUME"
"""The name of the checkpoint that the lead verified (step_000012); empty: start from nothing."""

SERVICE_VARIABLE = "VERL_SLURM_SERVICE_"
"""With the name of a service behind it, in capitals, for the ranks: its `host:port`, of all its nodes and with commas
between them. It is an address of the process's own node."""

SERVICE_TOKEN_VARIABLE = "VERL_SLURM_SERVICE_TOKEN"  # noqa: S105 - its name
"""A secret that ranks and services of one attempt have in common. A service may ask for it. `TOKEN` names no service.
"""

HOST_VARIABLE, PORT_VARIABLE = "VERL_SLURM_HOST", "VERL_SLURM_PORT"
"""Where a service has to listen: 127.0.0.1, and a port. The daemon carries the ranks' connections there."""

INDEX_VARIABLE = "VERL_SLURM_SERVICE_INDEX"
"""Of a service: on which of its nodes it runs, from 0."""

LOCAL_RESTART_VARIABLE = "VERL_SLURM_LOCAL_RESTART"
"""Replaces SLURM_RESTART_COUNT in a run without Slurm. A lead sets it for the attempt that it becomes by exec."""

RECIPE_VARIABLE = "VERL_SLURM_RECIPE"
"""Set for processes of verl below a recipe's own main."""

HOOK_VARIABLE = "VERL_SLURM_HOOK"
"""Of a command of the section `hooks`: the key that it stands at, e.g. `on_end`."""

HOOK_RUN_VARIABLE = "VERL_SLURM_RUN_DIR"
"""Of a command of the section `hooks`: the run's directory, absolute."""

DEVCLUSTER_VARIABLE = "VERL_SLURM_DEVCLUSTER"
"""Set by a user: where `verl-slurm devcluster` keeps its cluster, in the place of ~/.cache/verl-slurm/devcluster."""

HOST_PID_VARIABLE = "VERL_SLURM_HOST_PID"
"""For the launcher of a service: the process that started it. The launcher removes it before the service starts."""

LOG_VARIABLE = "VERL_SLURM_LOG"
"""The log of this node's ranks, to which processes append that have another output (`wire.hang_records`)."""

SEARCH_VARIABLE = "VERL_SLURM_PYTHONPATH"
"""PYTHONPATH as it was at `submit`, before ours. A run that a program of another run submits gets this one."""

UMASK_VARIABLE = "VERL_SLURM_UMASK"
"""The umask of the process that submitted, octal: programs, services and hooks of the user's get it back."""

STACKS_SIGNAL = signal.SIGRTMIN + 3
"""Makes a rank write the stacks of all its threads into its log (`faulthandler`, in C, whichever thread holds the GIL).
Slurm and launchers do not send this signal."""


def users_umask() -> int:
    """Returns the umask for processes of the user's; 077 where it is not known."""
    # Ours, which a daemon's processes inherit, would keep a model that the program writes from the user's colleagues.
    return int(os.environ.get(UMASK_VARIABLE, "077"), 8)
