"""Makes the environment of one node's ranks: what `slurm.rank_setup` does to the node's, and the user's variables."""

import asyncio
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.files import open_log, read_private
from verl_slurm.config.schema import RunConfig
from verl_slurm.slurm.rank_setup import setup_script
from verl_slurm_daemon.processes import child_setup, tail

__all__ = ["past_proxies", "prepare_environment"]

_TOLD_BYTES = 2000
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
# bash's own state, which says nothing about the ranks.
_OF_BASH = {"_", "SHLVL", "PWD", "OLDPWD"}


async def prepare_environment(config: RunConfig, environ: Mapping[str, str], log: Path) -> dict[str, str]:
    """Returns the environment. Takes as long as the user's commands; the lead limits the time of the start.

    Args:
        environ: the agent's.
        log: where the commands' output goes.

    Raises:
        ConfigError: a command failed, or a file holds no value.
        PermissionRefused: a file with a secret is open to others.
        OSError: bash or a file cannot be had here.
    """
    made = dict(environ)
    if script := setup_script(config.slurm):
        made = await _after(script, environ, log)
    made |= {name: str(value) for name, value in config.env.items()}
    return made | {name: _secret(name, Path(path)) for name, path in config.env_from_files.items()}


def past_proxies(environ: Mapping[str, str], hosts: Iterable[str]) -> dict[str, str]:
    """Returns `no_proxy` and `NO_PROXY` with this machine and these hosts after what the user has there; nothing where
    no proxy is set. A site's proxy cannot reach the job's nodes, and would be sent the token. Pure."""
    if not any(environ.get(name) or environ.get(name.upper()) for name in _PROXIES):
        return {}
    made, ours = {}, dict.fromkeys(("localhost", "127.0.0.1", "::1", *hosts))
    # Some programs read the one, some the other, and curl reads the first that is set.
    for name, other in (("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")):
        users = environ.get(name) or environ.get(other, "")
        words = [word.strip() for word in users.split(",") if word.strip()]
        # `*` means all hosts, and for urllib only where it stands alone.
        made[name] = (
            users if words == ["*"] else ",".join([*words, *(one for one in ours if one not in words)])
        )
    return made


async def _after(script: str, environ: Mapping[str, str], log: Path) -> dict[str, str]:
    # In memory, not in a pipe: an environment can be larger than a pipe, and holds secrets.
    answer = os.memfd_create("environment", os.MFD_CLOEXEC)
    try:
        # Kept by name from the start: the commands may set any variable, and any positional one.
        whole = f"_verl_slurm_answer=$1\nset --\n{script}exec /usr/bin/env -0 >&$_verl_slurm_answer\n"
        with _output(log) as output:
            bash = await asyncio.create_subprocess_exec(
                *("/bin/bash", "--noprofile", "--norc", "-c", whole, "verl-slurm", str(answer)),
                env=dict(environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(answer,),
                preexec_fn=child_setup,
            )
        code = await bash.wait()
        if code != 0:
            said = tail(log, _TOLD_BYTES).strip().splitlines()
            raise ConfigError(
                "the node could not be set up for its ranks",
                where="slurm.modules, slurm.python, slurm.setup",
                found=said[-1] if said else f"exit code {code}",
                remedy=f"see {log}",
            )
        size = os.fstat(answer).st_size
        pairs = os.pread(answer, size, 0).split(b"\0")
    finally:
        os.close(answer)
    found = dict(os.fsdecode(pair).partition("=")[::2] for pair in pairs if b"=" in pair)
    return {name: value for name, value in found.items() if name not in _OF_BASH}


def _output(log: Path) -> BinaryIO:
    """Opens the ranks' log for the commands; without one, what they say is dropped, and the start goes on."""
    try:
        return open(open_log(log), "wb")
    except OSError:
        return open(os.devnull, "wb")


def _secret(name: str, path: Path) -> str:
    try:
        value = os.fsdecode(read_private(path)).rstrip("\n")
    except FileNotFoundError:
        raise ConfigError(
            "a secret of the ranks is not there", where=f"env_from_files.{name}", found=f"no file {path}"
        ) from None
    if not value or "\0" in value:
        raise ConfigError(
            "a file holds no value for a variable", where=f"env_from_files.{name}", found=str(path)
        )
    return value
