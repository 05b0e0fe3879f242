"""Checks the programs and secrets of a run's services on the machine that submits, which has the nodes' files."""

import shutil
from pathlib import Path

import msgspec

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.files import read_private
from verl_slurm.config.schema import RunConfig, ServiceConfig
from verl_slurm.slurm.rank_setup import setup_script
from verl_slurm.submit.checks.user_programs import MODULE, Found, check_executable, check_file, check_module
from verl_slurm.submit.relative_paths import Places


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


def check_services(config: RunConfig) -> Found:
    """Checks that the programs of services are there and find what they import, and their secrets.

    Args:
        config: paths absolute.

    Raises:
        ConfigError: a program, a module that it imports, or a secret is not there.
        DataError: a program's Python source cannot be parsed.
        PermissionRefused: a file with a secret is open to others.
    """
    good, notes = [], list[str]()
    for name, service in config.services.items():
        found = _check_program(config, f"services.{name}.command", service)
        notes += found.notes
        if found.good:
            good.append(name)
        for variable, path in service.env_from_files.items():
            _check_secret(f"services.{name}.env_from_files.{variable}", path)
    return Found([f"services {', '.join(good)}"] if good else [], notes)


def _check_program(config: RunConfig, key: str, service: ServiceConfig) -> Found:
    words, program = service.command, service.command[0]
    own = msgspec.structs.replace(config, env={**config.env, **service.env})
    if program == "-m" and words[1:] and MODULE.fullmatch(words[1]):
        return check_module(own, words[1], key)
    is_python = program.endswith(".py")
    if Path(program).is_file() if is_python else shutil.which(program) is not None:
        return check_file(own, Path(program), key) if is_python else check_executable(own, words, key)
    # What is set up on the node, or is in an image, may bring programs of its own.
    in_image = config.slurm.container is not None
    if program != "-m" and (in_image or ("/" not in program and setup_script(config.slurm) != "")):
        where = "the container" if in_image else "slurm.modules or slurm.setup"
        return Found([], [f"not looked at: {key}: no program {program} here; {where} may bring it"])
    raise ConfigError(
        "a service cannot be started",
        where=key,
        found="-m without a module" if program == "-m" else f"no program {program}",
        expected="a Python file, an executable file, or -m and a module, that the nodes see, too",
        remedy="give its path, with its arguments as further words",
    )


def _check_secret(key: str, path: str) -> None:
    try:
        value = read_private(Path(path)).strip()
    except OSError as error:
        raise ConfigError(
            "a secret of a service cannot be read",
            where=key,
            found=f"{path}: {error.strerror}",
            remedy="write the value into it, and chmod 600",
        ) from None
    if not value:
        raise ConfigError("a file holds no value for a variable", where=key, found=path)
