"""The host of one service on one node: starts it, probes it, restarts it, and leaves nothing of it behind.

A host lives as long as its service is wanted in this attempt: it outlives restarts of the ranks. It decides about the
service's restarts alone; what a service that cannot be started again means for the run is for the lead to decide. It
ends by the lead's word or with the link to it. `service_guard` stands between the host and the service.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import open_log
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.processes import become_subreaper
from verl_slurm.base.search_path import clean_environment
from verl_slurm.config.load import load_own
from verl_slurm.config.schema import RunConfig
from verl_slurm.config.services import ServiceConfig
from verl_slurm.program.programs import Moves
from verl_slurm.slurm.rank_setup import python_of
from verl_slurm.wire.environment import (
    HOST_PID_VARIABLE,
    HOST_VARIABLE,
    INDEX_VARIABLE,
    PORT_VARIABLE,
    SERVICE_TOKEN_VARIABLE,
)
from verl_slurm.wire.framing import services_token
from verl_slurm.wire.lead_file import read_lead_address
from verl_slurm.wire.messages import MAX_REASON, ServiceSaid, Shutdown, ToAgent
from verl_slurm_daemon.agent.probe import answers
from verl_slurm_daemon.agent.rank_environment import prepare_environment
from verl_slurm_daemon.agent.service_shares import set_aside
from verl_slurm_daemon.link.channel import LeadLink
from verl_slurm_daemon.link.reach import reach_lead
from verl_slurm_daemon.processes import WARNINGS, bury_orphans, child_setup, kill_tree, listen, tail

__all__ = ["ServiceHost", "restarts_in_a_row", "run_service", "service_argv"]

_BEFORE_READY_S, _AFTER_READY_S = 0.3, 10.0
"""Between two probes of a service that starts, and of one that runs."""
_STEADY_S = 600.0
_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 30.0
_TOLD_BYTES = 4000
_LEAVES_S = 30.0
"""Seconds to wait for the lead's word after the last restart failed."""


def restarts_in_a_row(before: int, ready_s: float) -> int:
    """Returns the number of the restart that is due. One that was ready for long begins a new row."""
    return 1 if ready_s >= _STEADY_S else before + 1


def service_argv(python: str, service: ServiceConfig, host: str, port: int) -> list[str]:
    """Returns the command line of the service. Only `{port}` and `{host}` are replaced: other braces may be JSON."""
    words = [word.replace("{port}", str(port)).replace("{host}", host) for word in service.command]
    by_python = words[0] == "-m" or words[0].endswith(".py")
    return [python, "-P", *words] if by_python else words


class ServiceHost:
    """The host of the service `name`, on the `index`-th of its nodes; see the module."""

    def __init__(
        self, paths: RunPaths, config: RunConfig, epoch: int, name: str, index: int, node: str
    ) -> None:
        self._paths, self._config, self._epoch = paths, config, epoch
        self._name, self._index, self._node = name, index, node
        self._service = config.services[name]
        self._log = paths.service_log(epoch, name, index)
        self._address = ""

    async def run(self) -> ExitCode:
        """Runs until the lead says Shutdown, or its link ends."""
        loop = asyncio.get_running_loop()
        bury_orphans(loop)
        warned = asyncio.Event()
        for number in WARNINGS:
            # None of them ends a host: the ranks may need the service until their save is done.
            listen(loop, number, warned.set if number == signal.SIGTERM else lambda: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)
        address = read_lead_address(self._paths)
        try:
            link = await reach_lead(address, self._epoch, warned)
            self._address = self._choose_address(link.own_host)
            dismissed = asyncio.create_task(self._listen(link))
            token = services_token(bytes.fromhex(address.token), self._epoch)
            work = asyncio.create_task(self._keep(link, token))
            await asyncio.wait([work, dismissed], return_when=asyncio.FIRST_COMPLETED)
            if not dismissed.done():
                if error := work.exception():
                    told = error.one_line() if isinstance(error, VerlSlurmError) else repr(error)
                    self._say(link, "failed", detail=told)
                # The lead answers with Shutdown; sent is not heard.
                await asyncio.wait([dismissed], timeout=_LEAVES_S)
            work.cancel()
            dismissed.cancel()
        finally:
            kill_tree()
        return ExitCode.OK

    async def _listen(self, link: LeadLink) -> None:
        ended = asyncio.Event()

        def hear(message: ToAgent) -> None:
            if isinstance(message, Shutdown):
                ended.set()

        with suppress(OSError, VerlSlurmError):
            reading = asyncio.create_task(link.messages(hear))
            told = asyncio.create_task(ended.wait())
            await asyncio.wait([reading, told], return_when=asyncio.FIRST_COMPLETED)

    def _say(
        self, link: LeadLink, what: str, *, restarts: int = 0, seconds: float = 0.0, detail: str = ""
    ) -> None:
        facts = {"service": self._name, "index": self._index, "node": self._node, "address": self._address}
        facts |= {"what": what, "restarts": restarts, "seconds": round(seconds, 1)}
        link.send(
            msgspec.convert(facts | {"detail": detail[:MAX_REASON], "type": "ServiceSaid"}, ServiceSaid)
        )

    def _choose_address(self, own_host: str) -> str:
        # With all ranks beside it, nobody on the network needs to reach it.
        alone = not self._service.nodes and self._config.distributed.nodes == 1
        host = "127.0.0.1" if alone else own_host
        return f"[{host}]:{self._port(host)}" if ":" in host else f"{host}:{self._port(host)}"

    def _port(self, host: str) -> int:
        if self._service.port:
            return self._service.port
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as free:
            free.bind((host, 0))
            return int(free.getsockname()[1])

    async def _keep(self, link: LeadLink, token: str) -> None:
        """Runs the service again and again, until its restarts are used up.

        Raises:
            VerlSlurmError, OSError: the node cannot be set up for it.
        """
        # Before anything that takes long: by this message the lead knows who its peer is.
        self._say(link, "started")
        service = self._service
        # The ranks' secrets are not for a process that may run what a model wrote.
        shared = msgspec.structs.replace(
            self._config, env=self._config.env | service.env, env_from_files=service.env_from_files
        )
        environ = await prepare_environment(shared, os.environ, self._log)
        restarts = 0
        while True:
            ready_s, detail = await self._once(link, environ, token)
            restarts = restarts_in_a_row(restarts, ready_s)
            if restarts > service.restarts:
                self._say(link, "failed", detail=detail)
                return
            self._say(link, "ended", restarts=restarts, detail=detail)
            await asyncio.sleep(min(_BACKOFF_S * 2 ** (restarts - 1), _LONGEST_BACKOFF_S))

    async def _once(self, link: LeadLink, environ: dict[str, str], token: str) -> tuple[float, str]:
        """Runs the service until it ends, or no longer answers; returns how long it was ready, and why it ended."""
        host, _, port = self._address.rpartition(":")
        host = host.strip("[]")
        python = python_of(self._config.slurm) or sys.executable
        argv = service_argv(python, self._service, host, int(port))
        began = time.monotonic()
        with open(open_log(self._log), "wb") as output:
            guard = await asyncio.create_subprocess_exec(
                *(python, "-P", "-m", "verl_slurm_daemon.agent.service_guard", *argv),
                env=self._environment(environ, host, port, token),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=partial(_child_setup, self._cpus()),
            )
        ended = asyncio.create_task(guard.wait())
        ready_at: float | None = None
        answered = began
        while not ended.done():
            now = time.monotonic()
            if await answers(self._service.probe, host, int(port)):
                answered = time.monotonic()
                if ready_at is None:
                    ready_at = answered
                    self._say(link, "ready", seconds=answered - began)
            elif now - answered > self._service.start_timeout_s:
                # With all that it has started; the guard's own end is what the loop waits for.
                kill_tree()
                await ended
                detail = (
                    f"no answer to its probe ({self._service.probe}) for {self._service.start_timeout_s:g} s"
                )
                return 0.0 if ready_at is None else answered - ready_at, detail
            pause = _BEFORE_READY_S if ready_at is None else _AFTER_READY_S
            await asyncio.wait([ended], timeout=pause)
        # A killed guard leaves the service's descendants to this process.
        kill_tree()
        said = tail(self._log, _TOLD_BYTES).strip().splitlines()
        code = ended.result()
        # 137: by way of a shell or a container.
        killed = " (SIGKILL: most often lack of memory, see slurm.mem_mb_per_node)" * (code in (-9, 137))
        detail = f"exit code {code}{killed}" + (f": {said[-1]}" if said else "")
        return 0.0 if ready_at is None else time.monotonic() - ready_at, detail

    def _environment(self, environ: dict[str, str], host: str, port: str, token: str) -> dict[str, str]:
        made = clean_environment(environ)
        program = self._service.command[0]
        # The user named the file, so its neighbours may be imported as well.
        if program.endswith(".py"):
            inherited = made.get("PYTHONPATH", "")
            made["PYTHONPATH"] = ":".join(part for part in (inherited, str(Path(program).parent)) if part)
        made |= {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", HOST_PID_VARIABLE: str(os.getpid())}
        gpus = set_aside(self._config, "gpus", os.environ)[self._name]
        made["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        place = {HOST_VARIABLE: host, PORT_VARIABLE: port, INDEX_VARIABLE: str(self._index)}
        return made | place | {SERVICE_TOKEN_VARIABLE: token}

    def _cpus(self) -> set[int]:
        return {int(cpu) for cpu in set_aside(self._config, "cpus", os.environ)[self._name]}


def _child_setup(cpus: set[int]) -> None:
    child_setup()
    os.sched_setaffinity(0, cpus)


def run_service(root: Path, epoch: int, name: str) -> ExitCode:
    """Runs this node's host of the service from start to end.

    Raises:
        VerlSlurmError, OSError: run.yaml or the lead cannot be reached.
    """
    # Before the first child: an orphan goes to the nearest subreaper that there is when its parent dies.
    become_subreaper()
    # `kill_tree` reaps children that asyncio also waits for.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    paths = RunPaths(root)
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    index = int(os.environ.get("SLURM_NODEID") or 0)
    # The submitted program, as the ranks run theirs.
    config = Moves.of(paths).config(load_own(paths.run_yaml))
    return asyncio.run(ServiceHost(paths, config, epoch, name, index, node).run())
