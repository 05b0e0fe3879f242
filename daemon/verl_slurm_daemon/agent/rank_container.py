"""How an agent starts its ranks, outside or in a container: command, environment, and a line that ends a container."""

import asyncio
import contextlib
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.files import write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import RunConfig
from verl_slurm.containers.inside import ENVIRONMENT, LIFELINE, pack_environment
from verl_slurm.containers.runtimes import Gpus, contained_ranks_argv, ranks_inside
from verl_slurm.slurm.rank_setup import python_of
from verl_slurm.wire.messages import Launch
from verl_slurm.wire.peer_credentials import peer_of
from verl_slurm_daemon.allocation.launcher import launcher_argv, launcher_env

# They name places of this node's file system, or its programs' state. The image has its own.
_OF_NODE = re.compile(
    r"PATH|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|PYTHONHOME|VIRTUAL_ENV|HOME|TMPDIR|TMP|TEMP|SHELL|PWD|OLDPWD|ENV|BASH_.*"
    r"|CONDA_.*|MAMBA_.*|XDG_.*|MODULE.*|LMOD_.*|LOADEDMODULES|_LMFILES_|__.*|MANPATH|INFOPATH|APPTAINER.*|SINGULARITY.*"
    r"|ENROOT_.*|SSL_CERT_.*|NVIDIA_VISIBLE_DEVICES|NVIDIA_DRIVER_CAPABILITIES"
)
_NVIDIA, _AMD = Path("/proc/driver/nvidia/version"), Path("/dev/kfd")
_END_S = 5.0
"""Seconds for the processes in a container to be gone; killed ones are within milliseconds."""


def gpus_here(config: RunConfig, nvidia: Path = _NVIDIA, amd: Path = _AMD) -> Gpus:
    """Returns the maker of this node's GPUs. Asked on the node: the one that submits may have none."""
    if config.distributed.device == "cpu":
        return ""
    return "nvidia" if nvidia.exists() else "amd" if amd.exists() else ""


def environ_of_image(environ: Mapping[str, str], config: RunConfig) -> dict[str, str]:
    """Returns the part of a node's environment that also holds in an image, and what the user has said."""
    said = {*config.env, *config.env_from_files}
    return {name: value for name, value in environ.items() if name in said or not _OF_NODE.fullmatch(name)}


def ranks_argv(config: RunConfig, paths: RunPaths, launch: Launch, control: Path) -> list[str]:
    """Returns the ranks' command. Raises ConfigError: the container's runtime cannot mount what they need."""
    container = config.slurm.container
    if container is None or not ranks_inside(config):
        return launcher_argv(python_of(config.slurm) or sys.executable, config, paths, launch, control)
    launcher = launcher_argv(container.python, config, paths, launch, control)
    return contained_ranks_argv(config, gpus_here(config), str(control), launcher)


def ranks_environ(
    config: RunConfig, paths: RunPaths, launch: Launch, control: Path, environ: dict[str, str]
) -> dict[str, str]:
    """Returns that command's environment; ranks in a container find theirs in the control directory.

    Raises ConfigError: the container's runtime is not here.
    """
    container = config.slurm.container
    if container is None or not ranks_inside(config):
        return launcher_env(environ, config, paths, launch, control)
    if shutil.which(container.runtime, path=environ.get("PATH")) is None:
        raise ConfigError(
            "the container's runtime is not on this node",
            where="slurm.container.runtime",
            found=f"no {container.runtime} in PATH",
            remedy=f"install it, or load it: slurm.modules: [{container.runtime}]",
        )
    inner = launcher_env(environ_of_image(environ, config), config, paths, launch, control)
    # Not durable: it serves processes of this restart. It holds the user's secrets, and is deleted once read.
    write_file(control / ENVIRONMENT, pack_environment(inner), durable=False)
    # Secrets reach the ranks by that file alone: a runtime may keep its own environment.
    return {name: value for name, value in environ.items() if name not in config.env_from_files}


class Lifeline:
    """A connection that the first process in the container holds (`containers.inside`)."""

    def __init__(self) -> None:
        self._held: asyncio.StreamWriter | None = None
        self._reader: asyncio.StreamReader | None = None
        self._server: asyncio.Server | None = None

    @classmethod
    async def open(cls, control: Path) -> "Lifeline":
        """Listens in the control directory."""
        line = cls()
        line._server = await asyncio.start_unix_server(line._hold, str(control / LIFELINE))
        return line

    async def end(self) -> bool:
        """Has all processes in the container killed; returns whether they are gone."""
        self.close()
        if self._held is None or self._reader is None:
            return True  # none has come; the runtime is below this process, and is killed with the rest
        try:
            async with asyncio.timeout(_END_S):
                self._held.write_eof()
                await self._reader.read()
        except TimeoutError:
            return False
        except OSError:
            return True
        finally:
            self._held.close()
        return True

    def close(self) -> None:
        """Takes no further connection."""
        if self._server is not None:
            self._server.close()

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            if self._held is None and peer_of(writer.get_extra_info("socket")).is_ours:
                self._held, self._reader = writer, reader
                return
        writer.close()
