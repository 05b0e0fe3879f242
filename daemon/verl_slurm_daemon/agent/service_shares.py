"""Divides the CPUs and GPUs of a node among the ranks and the services beside them, and tells the ranks of services."""

import os
from collections.abc import Mapping
from typing import Literal

from verl_slurm.config.schema import RunConfig
from verl_slurm.wire.environment import SERVICE_TOKEN_VARIABLE, SERVICE_VARIABLE
from verl_slurm.wire.messages import Launch
from verl_slurm_daemon.descendants import child_setup

RANKS = ""
"""The ranks' place in the answer; a service has a name."""


def divide(config: RunConfig, what: Literal["cpus", "gpus"], there: list[str]) -> dict[str, list[str]]:
    """Returns what the ranks on the first node have, and each service on its own. Pure.

    Services beside the ranks take theirs from the end, so that the ranks' numbers stay. A service that asks for no
    CPUs shares the ranks'; one that asks for no GPUs has none.
    """
    left, shares = list(there), dict[str, list[str]]()
    for name, service in config.services.items():
        wanted = getattr(service, what)
        if service.nodes:
            shares[name] = there[:wanted] if wanted or what == "gpus" else there
        elif wanted:
            # The ranks keep one CPU even if the node has fewer than was asked for.
            taken = min(wanted, len(left) - (what == "cpus"))
            shares[name], left = left[len(left) - taken :], left[: len(left) - taken]
    for name in config.services:
        shares.setdefault(name, left if what == "cpus" else [])
    return shares | {RANKS: left}


def set_aside(
    config: RunConfig, what: Literal["cpus", "gpus"], environ: Mapping[str, str]
) -> dict[str, list[str]]:
    """Does the same with what this node gives this process."""
    if what == "cpus":
        there = [str(cpu) for cpu in sorted(os.sched_getaffinity(0))]
    elif (seen := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        there = [gpu for gpu in seen.split(",") if gpu]
    else:
        # Without Slurm's word: as many as there may be; a number without a device is none.
        most = max([config.slurm.gpus_per_node, *(service.gpus for service in config.services.values())])
        there = [str(gpu) for gpu in range(most)]
    return divide(config, what, there)


def keep_to(config: RunConfig, node_rank: int) -> None:
    """Runs between fork and exec of the ranks' launcher: leaves the services' CPUs on the first node to them."""
    child_setup()
    if node_rank == 0 and any(service.cpus and not service.nodes for service in config.services.values()):
        os.sched_setaffinity(0, {int(cpu) for cpu in set_aside(config, "cpus", {})[RANKS]})


def variables_of_ranks(
    config: RunConfig, launch: Launch, token: str, environ: Mapping[str, str]
) -> dict[str, str]:
    """Returns what the ranks of a node find of services in their environment."""
    found = {f"{SERVICE_VARIABLE}{name.upper()}": address for name, address in launch.services.items()}
    found[SERVICE_TOKEN_VARIABLE] = token
    if launch.node_rank == 0 and any(
        service.gpus and not service.nodes for service in config.services.values()
    ):
        found["CUDA_VISIBLE_DEVICES"] = ",".join(set_aside(config, "gpus", environ)[RANKS])
    return found
