"""The host of one service on one node: starts it, probes it, restarts it, and leaves nothing of it behind.

Ranks reach the service through the host (`link.relay`), which asks who listens before each connection: the
service's own port is chosen here and let go, and another user may take it.

A host outlives restarts of the ranks, and ends by the lead's word or with the link to it. It decides about
the service's restarts alone. `ranks` stands between the host and the service, as between the agent and its
ranks.

Probes send no token. Of an answer the first bytes of the status line are read (RFC 9112, section 4), and
redirects count as no answer.
"""

import asyncio
import logging
import os
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from verl_slurm.base.errors import NOT_SET_UP, ConfigError, PermissionRefused, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import open_log
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.processes import become_subreaper
from verl_slurm.base.search_path import clean_environment
from verl_slurm.config.load import load_own
from verl_slurm.config.schema import RunConfig, ServiceConfig
from verl_slurm.program.programs import Moves
from verl_slurm.slurm.rank_setup import python_of
from verl_slurm.wire import environment
from verl_slurm.wire.framing import relay_key, services_token
from verl_slurm.wire.lead_file import read_lead_address
from verl_slurm.wire.messages import MAX_STORY, ServiceSaid, Shutdown, ToAgent
from verl_slurm.wire.tcp_table import Listener, listener_of
from verl_slurm_daemon.agent.last_words import last_words
from verl_slurm_daemon.agent.rank_environment import past_proxies, prepare_environment, set_aside
from verl_slurm_daemon.descendants import WARNINGS, bury_orphans, child_setup, kill_tree, listen
from verl_slurm_daemon.link.channel import LeadLink, reach_lead
from verl_slurm_daemon.link.relay import Streams, open_far_end

SERVICE_HOST = "127.0.0.1"
"""Where services listen: ranks reach them through relays (`link.relay`)."""
_LIMIT_S = 5.0
_STATUS = re.compile(rb"HTTP/1\.[01] 2[0-9][0-9]\b")
_LOOKS, _LOOK_AGAIN_S = 5, 0.02


async def connect_checked(port: int) -> Streams:
    """Connects to the service at `port` of this node.

    Raises OSError: nothing listens, or it changes all the time. PermissionRefused: another user may listen
    there.
    """
    for _ in range(_LOOKS):
        # A service may end, and another user listen in its place, at any moment. So the look comes before and
        # after: a connection that began between two looks at the same sockets has one of these at its other
        # end.
        before = listener_of(port, loopback=True)
        if before.uid is not None and before.stranger:
            raise taken(port, before)
        reader, writer = await asyncio.open_connection(SERVICE_HOST, port)
        now = listener_of(port, loopback=True)
        if before == now and not now.stranger:
            return reader, writer
        writer.transport.abort()
        # It has just begun to listen; or the kernel, which lists in pieces, has left it out.
        await asyncio.sleep(_LOOK_AGAIN_S)
    if now.stranger:
        raise taken(port, now)
    raise ConnectionAbortedError(f"port {port}: the listening sockets change all the time")


def taken(port: int, listener: Listener) -> PermissionRefused:
    """Makes the error that names who listens in the service's place."""
    return PermissionRefused(
        "another program listens in the place of this service, and was sent nothing",
        where=f"port {port} of this node",
        found=listener.name,
        expected="the service itself",
        remedy="choose another `port` for the service, or 0; see docs/services.md",
    )


async def answers(probe: str, port: int, limit_s: float = _LIMIT_S) -> bool:
    """Returns whether a probe, `tcp` or a GET's path, is answered. PermissionRefused as `connect_checked`."""
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await connect_checked(port)
            try:
                if probe == "tcp":
                    return True
                asked = f"GET {probe} HTTP/1.1\r\nHost: {SERVICE_HOST}:{port}\r\nConnection: close\r\n\r\n"
                writer.write(asked.encode())
                return _STATUS.match(await reader.readexactly(len(b"HTTP/1.1 200 "))) is not None
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False


_BEFORE_READY_S, _AFTER_READY_S = 0.3, 10.0
"""Between two probes of a service that starts, and of one that runs."""
_STEADY_S = 600.0
_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 30.0
_LEAVES_S = 30.0
"""Seconds to wait for the lead's word after the last restart failed."""


def restarts_in_a_row(before: int, ready_s: float) -> int:
    """Returns the number of the restart that is due. One that was ready for long begins a new row."""
    return 1 if ready_s >= _STEADY_S else before + 1


def service_argv(python: str, service: ServiceConfig, host: str, port: int) -> list[str]:
    """Returns the command line of the service. Only `{port}` and `{host}` are replaced: other braces may be JSON."""
    words = [word.replace("{port}", str(port)).replace("{host}", host) for word in service.command]
    if words[0].endswith(".py"):
        # As a rank: its neighbours may be imported, and not before it begins.
        return [python, "-P", "-m", "verl_slurm.loops.rendezvous", *words]
    return [python, "-P", *words] if words[0] == "-m" else words


class ServiceHost:
    """The host of the service `name`, on the `index`-th of its nodes; see the module."""

    def __init__(
        self,
        paths: RunPaths,
        config: RunConfig,
        attempt: int,
        name: str,
        index: int,
        node: str,
        place: str | None,
    ) -> None:
        self._place = place  # None: where this process is
        self._paths, self._config, self._attempt = paths, config, attempt
        self._name, self._index, self._node = name, index, node
        self._service = config.services[name]
        self._log = paths.service_log(attempt, name, index)
        self._address, self._port = "", 0  # the ranks' way to it, and its own port; 0: it does not run
        self._stranger, self._problem = asyncio.Event(), ""

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
            link = await reach_lead(address, self._attempt, warned)
            await self._open_relay(link.own_host, relay_key(bytes.fromhex(address.token), self._attempt))
            dismissed = asyncio.create_task(self._listen(link))
            token = services_token(bytes.fromhex(address.token), self._attempt)
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
        link.send(msgspec.convert(facts | {"detail": detail[:MAX_STORY], "type": "ServiceSaid"}, ServiceSaid))

    async def _open_relay(self, own_host: str, key: bytes) -> None:
        # With all ranks beside it, nobody on the network needs to reach it.
        ranks_nodes = self._config.distributed.nodes
        host = "127.0.0.1" if not self._service.nodes and ranks_nodes == 1 else own_host
        self._relay, port = await open_far_end(host, key, self._attempt, ranks_nodes, self._reach)
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def _reach(self) -> Streams:
        try:
            return await connect_checked(self._port)
        except PermissionRefused as error:
            self._found_stranger(error)
            raise

    def _found_stranger(self, error: PermissionRefused) -> None:
        self._problem = error.one_line()
        self._stranger.set()

    def _choose_port(self) -> int:
        """Returns the service's own port. Raises PermissionRefused: something listens there already."""
        port = self._service.port
        # A new one at each start: who has seen the last one knows nothing of it.
        if not port:
            with socket.socket() as free:
                free.bind((SERVICE_HOST, 0))
                port = int(free.getsockname()[1])
        # Of the same user, too: the judge of another run would be asked.
        if (listener := listener_of(port, loopback=True)).uid is not None:
            raise taken(port, listener)
        return port

    async def _keep(self, link: LeadLink, token: str) -> None:
        """Runs the service until its restarts are used up. Raises VerlSlurmError, OSError: its setup failed."""
        # Before anything that takes long: by this message the lead knows who its peer is.
        self._say(link, "started")
        service = self._service
        # The ranks' secrets are not for a process that may run what a model wrote.
        shared = msgspec.structs.replace(
            self._config, env=self._config.env | service.env, env_from_files=service.env_from_files
        )
        environ = await prepare_environment(shared, os.environ, self._log)
        environ |= past_proxies(environ, [link.own_host])
        for program in (service.command[0], python_of(self._config.slurm) or ""):
            if "/" in program and not os.path.exists(program):
                raise ConfigError(
                    NOT_SET_UP, where=f"services.{self._name}.command", found=f"no file {program}"
                )
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
        """Runs the service once; returns for how many seconds it was ready, and why it ended."""
        try:
            port = self._port = self._choose_port()
        except PermissionRefused as error:
            return 0.0, error.one_line()
        self._stranger.clear()
        began = time.monotonic()
        ended = asyncio.create_task((await self._start(environ, port, token)).wait())
        strange = asyncio.create_task(self._stranger.wait())
        ready_at: float | None = None
        answered, problem = began, ""
        while not (ended.done() or problem):
            now = time.monotonic()
            if await self._answers(port):
                answered = time.monotonic()
                if ready_at is None:
                    ready_at = answered
                    self._say(link, "ready", seconds=answered - began)
            elif now - answered > self._service.start_timeout_s:
                problem = (
                    f"no answer to its probe ({self._service.probe}) for {self._service.start_timeout_s:g} s"
                )
                break
            pause = _BEFORE_READY_S if ready_at is None else _AFTER_READY_S
            await asyncio.wait([ended, strange], timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            if self._stranger.is_set():
                problem, answered = self._problem, time.monotonic()
        strange.cancel()
        # With all that it has started, and what a killed launcher has left to this process; that ends by it, too.
        listener = listener_of(port, loopback=True)
        self._port = 0
        kill_tree()
        code = await ended
        if problem:
            return 0.0 if ready_at is None else answered - ready_at, problem
        said = last_words(self._log)
        # 137: by way of a shell or a container.
        killed = " (SIGKILL: most often lack of memory, see slurm.mem_mb_per_node)" * (code in (-9, 137))
        detail = f"exit code {code}{killed}" + (f": {said}" if said else "")
        if listener.uid is not None and listener.stranger:
            detail = f"{taken(port, listener).one_line()}; it ended with {detail}"
        return 0.0 if ready_at is None else time.monotonic() - ready_at, detail

    async def _start(self, environ: dict[str, str], port: int, token: str) -> asyncio.subprocess.Process:
        python = python_of(self._config.slurm) or sys.executable
        argv = service_argv(python, self._service, SERVICE_HOST, port)
        with open(open_log(self._log), "wb") as output:
            return await asyncio.create_subprocess_exec(
                *(python, "-P", "-m", "verl_slurm_daemon.agent.ranks", "--service", *argv),
                env=self._environment(environ, port, token),
                cwd=self._place,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=partial(_child_setup, self._cpus()),
            )

    async def _answers(self, port: int) -> bool:
        try:
            return await answers(self._service.probe, port)
        except PermissionRefused as error:
            self._found_stranger(error)
            return False

    def _environment(self, environ: dict[str, str], port: int, token: str) -> dict[str, str]:
        made = clean_environment(environ) | {
            "PYTHONSAFEPATH": "1",
            "PYTHONUNBUFFERED": "1",
            environment.HOST_PID_VARIABLE: str(os.getpid()),
        }
        gpus = set_aside(self._config, "gpus", os.environ)[self._name]
        made["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        place = {
            environment.HOST_VARIABLE: SERVICE_HOST,
            environment.PORT_VARIABLE: str(port),
            environment.INDEX_VARIABLE: str(self._index),
        }
        if self._place is not None:
            made["PWD"] = self._place
        return made | place | {environment.SERVICE_TOKEN_VARIABLE: token}

    def _cpus(self) -> set[int]:
        return {int(cpu) for cpu in set_aside(self._config, "cpus", os.environ)[self._name]}


def _child_setup(cpus: set[int]) -> None:
    child_setup()
    os.sched_setaffinity(0, cpus)


def run_service(root: Path, attempt: int, name: str) -> ExitCode:
    """Runs this node's host of the service. Raises VerlSlurmError, OSError: no run.yaml, or no lead."""
    # Before the first child: an orphan goes to the nearest subreaper that there is when its parent dies.
    become_subreaper()
    # `kill_tree` reaps children that asyncio also waits for.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    paths = RunPaths(root)
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    index = int(os.environ.get("SLURM_NODEID") or 0)
    # The submitted program, as the ranks run theirs.
    moves = Moves.of(paths)
    config = moves.config(load_own(paths.run_yaml))
    place = None if config.slurm.container is not None else moves.working_directory(copied=False)
    return asyncio.run(ServiceHost(paths, config, attempt, name, index, node, place).run())
