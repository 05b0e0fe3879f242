"""Builds the command lines of container runtimes as values. Pure.

One row of `RUNTIMES` is one runtime. `apptainer` and `podman` stand around the launcher of one node's ranks,
which the agent starts. Pyxis is a plugin of srun, so it stands around the agents: an srun of the agent's own would not
survive Slurm's TERM (docs/decisions/0019-containers.md).

What the runtimes have in common: no namespace for network and IPC, as ranks use the job's network and shared memory; a
read-only image; no home directory; no variable on the command line. The ranks' environment goes by a file
(`inside`).
"""

import os
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from verl_slurm.config.checks.options import asks_for_gpus
from verl_slurm.config.schema import ContainerConfig, RunConfig
from verl_slurm.containers.image_mounts import Mount, mounts
from verl_slurm.containers.runtime_probe import probe_argv

Gpus = Literal["", "nvidia", "amd"]
"""The maker of the GPUs that a node has; empty: none, or the run uses none."""

_NVIDIA = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
"""Enroot's hook mounts the driver for these. "all": those that Slurm has granted (its cgroup); ranks choose by
CUDA_VISIBLE_DEVICES."""


class RuntimeRequest(NamedTuple):
    """What a runtime has to provide."""

    container: ContainerConfig
    mounts: Sequence[Mount]
    gpus: Gpus


class Runtime(NamedTuple):
    """One runtime: what it stands around, and its words up to and with the image."""

    around: Literal["ranks", "agents"]
    words: Callable[[RuntimeRequest], list[str]]


def _apptainer(wanted: RuntimeRequest) -> list[str]:
    gpus = {"": [], "nvidia": ["--nv"], "amd": ["--rocm"]}[wanted.gpus]
    binds = [f"--bind={path}:{path}:{'rw' if writable else 'ro'}" for path, writable in wanted.mounts]
    # cleanenv: else all variables of the node's, LD_LIBRARY_PATH included, would be in the image.
    own = ["apptainer", "exec", "--cleanenv", "--no-home", *gpus, *binds]
    return [*own, *wanted.container.extra_args, wanted.container.image]


def _podman(wanted: RuntimeRequest) -> list[str]:
    gpus = {
        "": [],
        "nvidia": ["--device=nvidia.com/gpu=all"],
        "amd": ["--device=/dev/kfd", "--device=/dev/dri"],
    }[wanted.gpus]
    binds = [f"--volume={path}:{path}:{'rw' if writable else 'ro'}" for path, writable in wanted.mounts]
    # Ranks stay in Slurm's cgroup, under its limits.
    own = ["podman", "run", "--rm", "--cgroups=disabled", "--network=host", "--ipc=host", "--read-only"]
    own += ["--security-opt=label=disable", "--entrypoint="]
    # The user's own number inside, by which ranks know their agent's socket. root has it without a word.
    own += ["--userns=keep-id"] if os.geteuid() != 0 else []
    return [*own, *gpus, *binds, *wanted.container.extra_args, wanted.container.image]


def _pyxis(wanted: RuntimeRequest) -> list[str]:
    binds = ",".join(f"{path}:{path}:{'rw' if writable else 'ro'}" for path, writable in wanted.mounts)
    own = [f"--container-image={wanted.container.image}", f"--container-mounts={binds}"]
    own += [f"--container-workdir={wanted.container.workdir}", "--no-container-mount-home"]
    return [*own, *wanted.container.extra_args]


RUNTIMES = {
    "apptainer": Runtime("ranks", _apptainer),
    "podman": Runtime("ranks", _podman),
    "pyxis": Runtime("agents", _pyxis),
}


def ranks_inside(config: RunConfig) -> bool:
    """Returns whether an agent outside starts a container for its ranks."""
    container = config.slurm.container
    return container is not None and RUNTIMES[container.runtime].around == "ranks"


def agents_inside(config: RunConfig) -> bool:
    """Returns whether agents run inside, with their ranks."""
    return config.slurm.container is not None and not ranks_inside(config)


def contained_ranks_argv(config: RunConfig, gpus: Gpus, control: str, launcher: Sequence[str]) -> list[str]:
    """Returns the command of an agent outside.

    Args:
        gpus: of this node.
        control: the agent's control directory.
        launcher: Python and its arguments, as outside of a container.

    Raises:
        ConfigError: `mounts.mounts`.
    """
    container = config.slurm.container
    assert container is not None
    inside = ["verl_slurm.containers.inside", control, container.workdir, container.python, *launcher[1:]]
    return contained_argv(config, inside, control, gpus=gpus)


def contained_argv(config: RunConfig, module: Sequence[str], *places: str, gpus: Gpus = "") -> list[str]:
    """Returns the command of a module of ours inside; for agents the words of srun, and their command.

    Args:
        module: its name and its arguments.
        places: that it writes to, besides those of the run.

    Raises:
        ConfigError: `mounts.mounts`.
    """
    container = config.slurm.container
    assert container is not None
    words = RUNTIMES[container.runtime].words(RuntimeRequest(container, mounts(config, *places), gpus))
    return [*words, *probe_argv(config, module)]


def in_image(config: RunConfig) -> dict[str, str]:
    """Returns the variables with which srun has to be started, so that Pyxis mounts the driver."""
    wanted = config.distributed.device == "cuda" or (
        config.distributed.device == "auto"
        and (config.slurm.gpus_per_node > 0 or asks_for_gpus(config.slurm.extra))
    )
    return dict(_NVIDIA) if agents_inside(config) and wanted else {}
