"""Starts the launcher of one node's ranks: at once, or ahead of a restart, with ranks that stand by."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from verl_slurm.base.errors import NOT_SET_UP, ConfigError
from verl_slurm.base.files import open_log, write_file
from verl_slurm.base.kernel_facts import available_memory
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.search_path import PYTHONPATH
from verl_slurm.config.schema import RunConfig
from verl_slurm.program.programs import Moves
from verl_slurm.wire.environment import LOG_VARIABLE, SEARCH_VARIABLE
from verl_slurm.wire.framing import ranks_key, relay_key, services_token
from verl_slurm.wire.lead_file import LeadAddress
from verl_slurm.wire.messages import Launch
from verl_slurm.wire.standing_by import Orders
from verl_slurm.wire.store_line import RANKS_KEY_NAME
from verl_slurm_daemon.agent.agent_log import AgentLog
from verl_slurm_daemon.agent.rank_container import ranks_argv, ranks_environ
from verl_slurm_daemon.agent.rank_environment import (
    keep_to,
    past_proxies,
    prepare_environment,
    variables_of_ranks,
)
from verl_slurm_daemon.allocation.launcher import orders_argv, standby_argv
from verl_slurm_daemon.link.relay import open_near_end

_STANDBY_BYTES = 1 << 30
"""Memory that has to be free for each rank that stands by, which takes 0.3 GB: training needs the rest."""


def require_memory(ranks: int) -> None:
    """Raises ConfigError: ranks that stand by would take memory that the training may need."""
    free, wanted = available_memory(), ranks * _STANDBY_BYTES
    if free < wanted:
        raise ConfigError(
            "too little memory for ranks that stand by", found=f"{free} bytes", expected=f"{wanted} bytes"
        )


class _Prepared(NamedTuple):
    """What a start of this node's ranks needs, and the lead does not say."""

    config: RunConfig
    environ: dict[str, str]
    place: str | None
    """Their working directory; None: the agent's."""


class NodeStart:
    """One start of this node's ranks.

    Args:
        address: of the lead, with the token.
        control: the agent's control directory.
        refused: counts a connection to a service that is refused; reasons of `rank_socket.REASONS`.

    Attributes:
        log: the ranks'; empty before anything was started.
    """

    def __init__(
        self,
        paths: RunPaths,
        config: RunConfig,
        address: LeadAddress,
        node_id: int,
        control: Path,
        said: AgentLog,
        refused: Callable[[str, str], None],
    ) -> None:
        self._paths, self._config, self._control = paths, config, control
        self._address, self._node_id, self._said, self._refused = address, node_id, said, refused
        self._standing: tuple[_Prepared, asyncio.subprocess.Process] | None = None
        self._relays: list[asyncio.Server] = []
        self.log = Path()

    async def stand_by(self, restart: int) -> None:
        """Starts ranks that import and wait, for a restart that may come. Raises as `launch`."""
        prepared = await self._prepare(restart)
        # What a restart adds to this is in the orders.
        unknown = Launch(
            restart=restart,
            attempt=self._address.attempt,
            node_rank=self._node_id % self._config.distributed.nodes,
            master_addr="",
            master_port=0,
            resume="",
        )
        start = (prepared.config, self._paths, unknown, self._control)
        argv, environ = ranks_argv(*start), ranks_environ(*start, prepared.environ)
        argv = standby_argv(argv, self._paths.imports)
        launcher = await self._begin(prepared, argv, environ, 0, asyncio.subprocess.PIPE)
        self._said.say("stands_by", restart=restart, launcher=launcher.pid)
        self._standing = prepared, launcher

    async def launch(self, launch: Launch) -> asyncio.subprocess.Process:
        """Returns the launcher of the ranks: that which stands by, or a new one.

        Raises ConfigError, PermissionRefused: the node cannot be set up (`prepare_environment`). OSError:
        storage is away.
        """
        if self._standing is not None:
            prepared, launcher = self._standing
            start = (prepared.config, self._paths, launch, self._control)
            environ = ranks_environ(*start, await self._with_services(prepared.environ, launch))
            orders = Orders.of(orders_argv(ranks_argv(*start)), environ)
            assert launcher.stdin is not None
            with contextlib.suppress(OSError):
                launcher.stdin.write(orders.encode())
                await launcher.stdin.drain()
                launcher.stdin.close()
                # It cannot have ended by itself: it waits.
                if launcher.returncode is None:
                    return launcher
            self._said.say("stands_by", loud=True, problem="its launcher is gone")
        prepared = await self._prepare(launch.restart)
        start = (prepared.config, self._paths, launch, self._control)
        environ = ranks_environ(*start, await self._with_services(prepared.environ, launch))
        return await self._begin(prepared, ranks_argv(*start), environ, launch.node_rank)

    async def _prepare(self, restart: int) -> _Prepared:
        # Ranks get a key derived from the token, in a 0600 file, and never the token: that opens the lead's port.
        key = ranks_key(bytes.fromhex(self._address.token), self._address.attempt, restart)
        # Not durable: it serves processes of this restart, which a power cut ends as well.
        write_file(self._control / RANKS_KEY_NAME, key, durable=False)
        self.log = log = self._paths.rank_log(self._address.attempt, restart, self._node_id)
        environ = await prepare_environment(self._config, os.environ, log)
        environ[LOG_VARIABLE] = str(log)
        moves = Moves.of(self._paths)
        config = moves.config(self._config)
        environ[SEARCH_VARIABLE] = environ.get(PYTHONPATH, "")
        if path := moves.search_path(environ.get(PYTHONPATH, "")):
            environ[PYTHONPATH] = path
        # The program reads its settings by relative names: those that were submitted, not those that lie there now.
        copied, inside = bool(config.trainer.command), config.slurm.container is not None
        # An image has a directory of its own (`slurm.container.workdir`).
        place = None if inside else moves.working_directory(copied=copied)
        if place is not None:
            environ["PWD"] = place
        return _Prepared(config, environ, place)

    async def _begin(
        self,
        prepared: _Prepared,
        argv: list[str],
        environ: dict[str, str],
        node_rank: int,
        stdin: int = asyncio.subprocess.DEVNULL,
    ) -> asyncio.subprocess.Process:
        # A file and no pipe: a pipe that is not read any more would stop the ranks at a print.
        with open(self._open_log(), "wb") as output:
            try:
                return await asyncio.create_subprocess_exec(
                    *argv,
                    env=environ,
                    cwd=prepared.place,
                    stdin=stdin,
                    stdout=output,
                    stderr=output,
                    # A session leader is how `bury_orphans` tells our children, which asyncio waits for, from adopted
                    # ones.
                    start_new_session=True,
                    preexec_fn=partial(keep_to, self._config, node_rank),
                )
            # No process can be had, or the ranks' Python or the program's folder is not there.
            except OSError as error:
                raise ConfigError(NOT_SET_UP, where=argv[0], found=error) from error

    async def _with_services(self, environ: dict[str, str], launch: Launch) -> dict[str, str]:
        environ = environ | past_proxies(environ, launch.hosts)
        if not self._config.services:
            return environ
        secret, attempt = bytes.fromhex(self._address.token), self._address.attempt
        near: dict[str, str] = {}
        for name, addresses in launch.services.items():
            ends = []
            for far in addresses.split(","):
                tell = partial(self._tell_of_stranger, name)
                key = relay_key(secret, attempt)
                server, address = await open_near_end(far, key, attempt, tell, self._refused)
                # Held until this process ends, and the ranks before it: the port is never another user's meanwhile.
                self._relays.append(server)
                ends.append(address)
            near[name] = ",".join(ends)
        here = msgspec.structs.replace(launch, services=near)
        return environ | variables_of_ranks(self._config, here, services_token(secret, attempt), os.environ)

    def _tell_of_stranger(self, service: str, problem: str) -> None:
        self._said.say("service_refused", loud=True, service=service, problem=problem)

    def _open_log(self) -> int:
        try:
            return open_log(self.log)
        # Training matters more than its log: the output is discarded.
        except OSError as error:
            self._said.say("no_rank_log", loud=True, error=f"{error}")
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"verl-slurmd: the ranks have no log: {error}\n")
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
