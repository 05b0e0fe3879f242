"""One agent a node: starts the ranks of its node, relays between them and the lead, and leaves nothing behind.

An agent lives for one generation. It holds no opinion: causes are the lead's to find. On its own it does two things
only: where the lead is gone it kills its ranks, and, because the lead's death would end the job without a requeue,
asks Slurm for one (`orphan.py`).
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from verl_slurm.config.load import load_resolved
from verl_slurm.config.schema import RunConfig
from verl_slurm.errors import WireError
from verl_slurm.exit_codes import ExitCode
from verl_slurm.paths import RunPaths
from verl_slurm.wire.control_page import Request
from verl_slurm.wire.messages import (
    STACKS_SIGNAL,
    AgentReady,
    DumpStacks,
    FromRank,
    Launch,
    NodeExited,
    RankStarted,
    Shutdown,
    SignalSeen,
    StacksWritten,
    StopRequest,
    ToAgent,
)
from verl_slurm_daemon.channel import LeadLink, connect
from verl_slurm_daemon.launcher import launcher_argv, launcher_env
from verl_slurm_daemon.lead_address import read_lead_address
from verl_slurm_daemon.orphan import requeue_as_orphan
from verl_slurm_daemon.processes import become_subreaper, child_setup, kill_tree, signal_ranks, tail
from verl_slurm_daemon.rank_socket import RankSocket

if TYPE_CHECKING:
    from verl_slurm_daemon.agent_metrics import AgentMetrics

__all__ = ["run_agent"]

T = TypeVar("T")

_CONNECT_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0)
_STACKS_S = 1.0
_RELAYED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


class Agent:
    """See the module. Called by: `run_agent`."""

    def __init__(self, paths: RunPaths, config: RunConfig, epoch: int, node: str, node_id: int) -> None:
        self._paths, self._config, self._epoch = paths, config, epoch
        self._node, self._node_id = node, node_id
        self._ranks = RankSocket(self._from_rank, max_ranks=4 * config.distributed.ranks_per_node)
        self._launches: asyncio.Queue[Launch] = asyncio.Queue()
        self._shutdown = asyncio.Event()
        self._lead_lost = asyncio.Event()
        self._link: LeadLink | None = None
        self._pids: set[int] = set()
        self._log = Path()
        self._dumping: asyncio.Task[None] | None = None
        self._metrics: AgentMetrics | None = None

    async def run(self) -> ExitCode:
        self._link = await self._connect()
        loop = asyncio.get_running_loop()
        for number in _RELAYED:
            loop.add_signal_handler(number, self._relay, signal.Signals(number).name)
        tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._ranks.serve())]
        self._link.send(
            AgentReady(
                node=self._node,
                node_id=self._node_id,
                address=self._link.own_host,
                free_port=_free_port(self._link.own_host),
            )
        )
        await self._open_metrics(self._link.own_host)
        try:
            return await self._live()
        finally:
            kill_tree()
            if self._metrics is not None:
                self._metrics.close()
            await self._link.close()
            for task in tasks:
                task.cancel()
            self._ranks.close()

    async def _open_metrics(self, own_host: str) -> None:
        if self._config.observability.metrics_port is None:
            return
        from verl_slurm_daemon import agent_metrics  # 2 MB, and only here

        self._metrics = agent_metrics.AgentMetrics(
            self._paths, self._config, self._node_id, lambda: not self._lead_lost.is_set()
        )
        if problem := await self._metrics.open(own_host):
            sys.stderr.write(f"verl-slurmd: {problem}\n")

    async def _connect(self) -> LeadLink:
        """Try until the lead has a place for us: strangers may hold all of them for some seconds."""
        address = read_lead_address(self._paths)
        for pause in (*_CONNECT_PAUSES_S, None):
            try:
                return await connect(address.host, address.port, bytes.fromhex(address.token), self._epoch)
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                if pause is None:
                    raise WireError(
                        "the lead cannot be reached",
                        where=f"{address.host}:{address.port}",
                        found=f"{type(error).__name__} {error}",
                        remedy="are TCP connections between the job's nodes allowed?",
                    ) from error
                await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    async def _live(self) -> ExitCode:
        launch = await self._first(self._launches.get())
        if launch is None:
            return await self._leave()
        log = self._paths.rank_log(self._epoch, launch.generation, self._node_id)
        self._log = log
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "wb") as output:
            launcher = await asyncio.create_subprocess_exec(
                *launcher_argv(sys.executable, self._config, self._paths, launch, self._ranks.directory),
                env=launcher_env(dict(os.environ), self._config, self._ranks.directory),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=child_setup,
            )
        exit_code = await self._first(launcher.wait())
        # Ranks that end because the lead's node died are no news for a lead that is gone.
        if exit_code is None or self._lead_lost.is_set():
            return await self._leave()
        await self._ranks.drain()
        detail = "" if exit_code == 0 else _first_cause(tail(log))
        assert self._link is not None
        self._link.send(NodeExited(node=self._node, exit_code=exit_code, detail=detail))
        return ExitCode.OK  # it has been said; the lead decides what it means

    async def _first(self, wanted: Coroutine[Any, Any, T]) -> T | None:
        """The result of `wanted`, or None where a shutdown or the loss of the lead comes first."""
        task = asyncio.create_task(wanted)
        ends = [asyncio.create_task(self._shutdown.wait()), asyncio.create_task(self._lead_lost.wait())]
        await asyncio.wait([task, *ends], return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if task.done():
            return task.result()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return None

    async def _leave(self) -> ExitCode:
        kill_tree()
        if self._shutdown.is_set():
            return ExitCode.OK
        await requeue_as_orphan(self._paths, self._config, self._epoch, self._node_id)
        return ExitCode.WIRE

    async def _listen(self) -> None:
        assert self._link is not None
        try:
            await self._link.messages(self._from_lead)
        finally:
            self._lead_lost.set()

    def _from_lead(self, message: ToAgent) -> None:
        match message:
            case Launch():
                self._launches.put_nowait(message)
            case StopRequest(request_id=request_id, stop=stop, deadline_s=deadline_s):
                deadline_ns = time.monotonic_ns() + int(deadline_s * 1e9) if deadline_s > 0 else 0
                self._ranks.page.post(Request(request_id, stop, deadline_ns))
            case DumpStacks():
                self._dumping = asyncio.create_task(self._dump_stacks())
            case Shutdown():
                self._shutdown.set()

    async def _dump_stacks(self) -> None:
        """Nothing tells when a rank has written its last line; what a second does not suffice for is not waited for."""
        assert self._link is not None
        signal_ranks(self._pids, STACKS_SIGNAL)
        await asyncio.sleep(_STACKS_S)
        self._link.send(StacksWritten(node=self._node, log=str(self._log)))

    def _from_rank(self, message: FromRank) -> None:
        assert self._link is not None
        if isinstance(message, RankStarted):
            self._pids.add(message.pid)
        self._link.send(message)
        if self._metrics is not None:
            self._metrics.heard(message)

    def _relay(self, name: str) -> None:
        assert self._link is not None
        self._link.send(SignalSeen(node=self._node, signal=signal.Signals[name].value))


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _first_cause(text: str) -> str:
    """The lines that say what happened; torchrun prints its own story after the rank's."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "exitcode" in line or "Signal" in line]
    return "\n".join((errors or lines)[-6:])


def run_agent(root: Path, epoch: int) -> ExitCode:
    """The agent of this node, from start to end."""
    become_subreaper()
    # `kill_tree` reaps children that asyncio also waits for; its warning about that says nothing to anybody.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    paths = RunPaths(root)
    config = load_resolved(paths.run_yaml)
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    node_id = int(os.environ.get("SLURM_NODEID") or 0)
    return asyncio.run(_run(paths, config, epoch, node, node_id))


async def _run(paths: RunPaths, config: RunConfig, epoch: int, node: str, node_id: int) -> ExitCode:
    return await Agent(paths, config, epoch, node, node_id).run()
