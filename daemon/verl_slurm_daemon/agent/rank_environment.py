"""Makes the environment of one node's ranks: what `slurm.rank_setup` does to the node's, and the user's variables.

Also divides the node's CPUs and GPUs among the ranks and the services beside them, and tells the ranks of services.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal

from verl_slurm.base.errors import NOT_SET_UP, ConfigError
from verl_slurm.base.files import open_log, read_private
from verl_slurm.config.schema import RunConfig
from verl_slurm.slurm.rank_setup import OURS, setup_script
from verl_slurm.wire.environment import SERVICE_TOKEN_VARIABLE, SERVICE_VARIABLE, users_umask
from verl_slurm.wire.messages import Launch
from verl_slurm_daemon.agent.last_words import last_words
from verl_slurm_daemon.descendants import child_setup

_SETUP_KEYS = "slurm.modules, slurm.python, slurm.setup"
# Of `daemon.start_timeout_s`: a command that hangs is named before the lead gives the start up.
_SHARE_OF_START = 0.8
_LAST_WAIT_S = 3.0
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
# bash's own state, which says nothing about the ranks.
_OF_BASH = {"_", "SHLVL", "PWD", "OLDPWD"}


async def prepare_environment(config: RunConfig, environ: Mapping[str, str], log: Path) -> dict[str, str]:
    """Returns the agent's environment as the user's commands and variables make it. Their output goes to
    `log`.

    Raises ConfigError: a command failed, or a file is missing (`NOT_SET_UP`) or holds no value.
    PermissionRefused: a file with a secret is open to others.
    """
    made, limit_s = dict(environ), _SHARE_OF_START * config.daemon.start_timeout_s
    if script := setup_script(config.slurm):
        async with _within(limit_s, _SETUP_KEYS):
            made = await _after(script, environ, log)
    made |= {name: str(value) for name, value in config.env.items()}
    for name, path in config.env_from_files.items():
        async with _within(limit_s, f"env_from_files.{name}"):
            made[name] = await asyncio.to_thread(_secret, name, Path(path))
    return made


@asynccontextmanager
async def _within(limit_s: float, where: str) -> AsyncIterator[None]:
    """Turns an error of the system, and silence, into the error of a node that cannot be set up."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except OSError as error:
        silent = f"no end after {limit_s:.0f} s" if type(error) is TimeoutError and not error.errno else error
        remedy = "is its file system mounted on this node?"
        raise ConfigError(NOT_SET_UP, where=where, found=silent, remedy=remedy) from error


def past_proxies(environ: Mapping[str, str], hosts: Iterable[str]) -> dict[str, str]:
    """Returns `no_proxy` and `NO_PROXY`, the user's hosts, then ours; nothing where no proxy is set. Pure."""
    # A site's proxy cannot reach the job's nodes, and would be sent the token.
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
            starting = asyncio.ensure_future(
                asyncio.create_subprocess_exec(
                    *("/bin/bash", "--noprofile", "--norc", "-c", whole, "verl-slurm", str(answer)),
                    env=dict(environ),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=(answer,),
                    preexec_fn=child_setup,
                    umask=users_umask(),
                )
            )
            try:
                # Shielded: a start that is given up half-way would leave its bash running.
                bash = await asyncio.shield(starting)
                code = await bash.wait()
            except asyncio.CancelledError:  # they took too long: none of them may go on beside the next start
                bash = await starting
                with suppress(ProcessLookupError):
                    os.killpg(bash.pid, signal.SIGKILL)
                # One that waits for a dead mount does not even die.
                with suppress(TimeoutError):
                    await asyncio.wait_for(bash.wait(), _LAST_WAIT_S)
                raise
        if code != 0:
            raise ConfigError(
                NOT_SET_UP, where=_SETUP_KEYS, found=_words(log, code), remedy=_setup_remedy(script, log)
            )
        size = os.fstat(answer).st_size
        pairs = os.pread(answer, size, 0).split(b"\0")
    finally:
        os.close(answer)
    found = dict(os.fsdecode(pair).partition("=")[::2] for pair in pairs if b"=" in pair)
    return {name: value for name, value in found.items() if name not in _OF_BASH}


def _words(log: Path, code: int) -> str:
    """Returns what failed, and what the commands said: our own line comes last in the log."""
    said, is_ours, ours = last_words(log).rpartition(OURS)
    if not is_ours:
        said, ours = ours, f"exit code {code}"
    return f"{ours}: {said.removesuffix(' / ')}" if said else ours


def _setup_remedy(script: str, log: Path) -> str:
    # `conda activate` needs conda's hook, which a shell without the user's profile lacks.
    conda = "slurm.python=NAME activates an environment of conda's; " * ("conda activate" in script)
    return f"{conda}see {log}"


def _output(log: Path) -> BinaryIO:
    try:
        return open(open_log(log), "wb")
    # What the commands say is dropped, and the start goes on.
    except OSError:
        return open(os.devnull, "wb")


def _secret(name: str, path: Path) -> str:
    value = os.fsdecode(read_private(path)).rstrip("\n")
    if not value or "\0" in value:
        raise ConfigError(
            "a file holds no value for a variable", where=f"env_from_files.{name}", found=str(path)
        )
    return value


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
