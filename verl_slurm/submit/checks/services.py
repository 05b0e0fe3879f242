"""Checks the programs and secrets of a run's services on the machine that submits, which has the nodes' files."""

import shutil
from pathlib import Path

import msgspec

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.files import read_private
from verl_slurm.config.schema import RunConfig
from verl_slurm.config.services import ServiceConfig
from verl_slurm.slurm.rank_setup import setup_script
from verl_slurm.submit.relative_paths import Places

__all__ = ["absolute_service", "check_services"]


def absolute_service(name: str, service: ServiceConfig, places: Places) -> ServiceConfig:
    """Returns the service with its program and its secrets' files as absolute paths.

    Raises:
        ConfigError: a path that means two files (`relative_paths`).
    """
    command, key = service.command, f"services.{name}"
    # A program without a slash is looked for in PATH on the node, as a shell does.
    if command[0].endswith(".py") or "/" in command[0]:
        command = (places.path(f"{key}.command", command[0]), *command[1:])
    secrets = {
        variable: places.path(f"{key}.env_from_files.{variable}", text)
        for variable, text in service.env_from_files.items()
    }
    return msgspec.structs.replace(service, command=command, env_from_files=secrets)


def check_services(config: RunConfig) -> list[str]:
    """Checks that the programs of services are there; returns what was checked.

    Args:
        config: paths absolute.

    Raises:
        ConfigError: a program or a secret is not there.
        PermissionRefused: a file with a secret is open to others.
    """
    for name, service in config.services.items():
        program, key = service.command[0], f"services.{name}"
        is_python = program.endswith(".py")
        # What is set up on the node, or is in an image, may bring programs of its own.
        may_come = config.slurm.container is not None or (
            "/" not in program and setup_script(config.slurm) != ""
        )
        there = Path(program).is_file() if is_python else shutil.which(program) is not None
        if program != "-m" and not there and not may_come:
            raise ConfigError(
                "a service cannot be started",
                where=f"{key}.command",
                found=f"no program {program}",
                expected="a Python file, an executable file, or -m and a module, that the nodes see, too",
                remedy="give its path, with its arguments as further words",
            )
        for variable, path in service.env_from_files.items():
            try:
                value = read_private(Path(path)).strip()
            except OSError as error:
                raise ConfigError(
                    "a secret of a service cannot be read",
                    where=f"{key}.env_from_files.{variable}",
                    found=f"{path}: {error.strerror}",
                    remedy="write the value into it, and chmod 600",
                ) from None
            if not value:
                raise ConfigError(
                    "a file holds no value for a variable",
                    where=f"{key}.env_from_files.{variable}",
                    found=path,
                )
    return [f"services {', '.join(config.services)}"] if config.services else []
