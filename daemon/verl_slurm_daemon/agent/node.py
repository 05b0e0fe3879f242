"""One agent per node: starts its ranks, relays between them and the lead, and leaves no process behind.

An agent lives for one restart. One that is started ahead of it stands by, with ranks that have done their
imports, until the restart comes. It decides nothing about causes; the lead finds them. However its work ends,
it kills all processes below it, closes its link, and stays until it may leave (`leaving.py`, `orphan.py`).
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, assert_never

from verl_slurm.base.errors import VerlSlurmError, WireError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import open_log
from verl_slurm.base.one_line import printable
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.processes import become_subreaper
from verl_slurm.config.load import load_own
from verl_slurm.config.schema import RunConfig
from verl_slurm.containers.runtimes import ranks_inside
from verl_slurm.program.programs import Moves
from verl_slurm.slurm.slurm_environment import SlurmJob
from verl_slurm.wire import messages as msg
from verl_slurm.wire.environment import STACKS_SIGNAL
from verl_slurm.wire.hang_records import request_flights
from verl_slurm.wire.lead_file import LeadAddress, read_lead_address
from verl_slurm_daemon.agent.agent_log import AgentLog
from verl_slurm_daemon.agent.last_words import last_words
from verl_slurm_daemon.agent.node_start import NodeStart, require_memory
from verl_slurm_daemon.agent.orphan import SlurmSenses, see_off, slurm_job
from verl_slurm_daemon.agent.rank_container import Lifeline
from verl_slurm_daemon.agent.rank_socket import REASONS, RankSocket, StoreSocket
from verl_slurm_daemon.decide.leaving import AgentKnowledge
from verl_slurm_daemon.descendants import (
    RELAYED,
    WARNINGS,
    bury_orphans,
    kill_tree,
    listen,
    listeners,
    spare_former_children,
)
from verl_slurm_daemon.link.channel import CONNECT_PAUSES_S, LeadLink, Refusals, reach_lead

if TYPE_CHECKING:
    from verl_slurm_daemon.agent.node_metrics import AgentMetrics


T = TypeVar("T")

_STACKS_S = 1.0
# NCCL's thread looks for a request once a second. The lead waits 5 s.
_FLIGHTS_S = 3.0
_BASELINE_S = 2.0
_STORE_PLACES = 16
"""Connections to the ranks' store for each connection that a rank may have to its agent."""
_HEARD_S = 30.0
"""Seconds to wait for the lead's answer. It takes a millisecond, or longer while the lead's disk is busy."""


class Agent:
    """The agent of one node. `restart`: of the restart that it stands by for; 0: it is wanted now."""

    def __init__(
        self, paths: RunPaths, config: RunConfig, attempt: int, node: str, node_id: int, restart: int = 0
    ) -> None:
        self._restart = restart
        self._paths, self._config, self._attempt = paths, config, attempt
        self._node, self._node_id = node, node_id
        self._log = AgentLog(paths.agent_log(attempt, node_id), f"{attempt} {node}")
        self._baselines: asyncio.Queue[tuple[tuple[str, ...], float]] = asyncio.Queue()
        self._launches: asyncio.Queue[msg.Launch] = asyncio.Queue()
        self._shutdown = asyncio.Event()
        self._lead_lost = asyncio.Event()
        self._warned = asyncio.Event()
        self._address: LeadAddress | None = None
        self._link: LeadLink | None = None
        self._start: NodeStart | None = None
        self._dumping: asyncio.Task[None] | None = None
        self._ranks: RankSocket | None = None
        self._store: StoreSocket | None = None
        self._lifeline: Lifeline | None = None
        self._tasks: list[asyncio.Task[None]] = []
        # Signals that came before the link; the lead asks Slurm for their cause, so they wait for it.
        self._early_signals: list[str] = []
        self._metrics: AgentMetrics | None = None
        self._refusals = Refusals(REASONS, self._tell_of_stranger)

    async def run(self, failed: Exception | None = None) -> ExitCode:
        """Runs until this agent may leave; errors go to the logs. `failed`: why there is nothing to start."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._note_error)
        # As a subreaper (`run_agent`) this process adopts the ranks' orphans, which stay as zombies unless it waits for
        # them.
        bury_orphans(loop)
        job = slurm_job(dict(os.environ), self._log)
        # In a Slurm job no signal ends an agent: it may be the last process that can ask for the requeue. Outside of
        # Slurm, INT and HUP come from a terminal and keep their meaning.
        heard = RELAYED if job is None else WARNINGS
        for number in heard:
            listen(loop, number, partial(self._relay, signal.Signals(number).name))
        # `__main__` blocked them, so that none was lost, or deadly, before there was somebody to hear it.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)
        self._log.say("agent", pid=os.getpid(), node_id=self._node_id)
        broken: ExitCode | None = None
        try:
            try:
                await self._work(failed)
            except Exception as error:  # noqa: BLE001 - nothing may keep it from seeing its node and its job off
                broken = error.exit_code if isinstance(error, VerlSlurmError) else ExitCode.INTERNAL
                told = self._report(error)
                if self._link is not None:  # else the lead would wait a minute for an agent that never comes
                    self._link.send(msg.NodeExited(node=self._node, exit_code=int(broken), detail=told))
            # Reached by each way out but Ctrl-C, errors included: a killed lead ends the job without a requeue.
            released = await self._leave(job)
        finally:  # by Ctrl-C, too
            self._clean_up()
        code = broken or (ExitCode.OK if released else ExitCode.WIRE)
        self._log.say("leaves", exit=code.name)
        self._log.close()
        return code

    async def _work(self, failed: Exception | None) -> None:
        self._address = read_lead_address(self._paths)
        # First of all: whatever breaks from here on, the lead is told.
        try:
            # With an error to report, one try is worth it.
            pauses = CONNECT_PAUSES_S if failed is None else ()
            self._link = link = await reach_lead(self._address, self._attempt, self._warned, pauses)
        except WireError as error:
            raise failed or error from error
        if self._restart:
            link.send(msg.StandsBy(node=self._node, restart=self._restart))
        self._tasks = [asyncio.create_task(self._listen(link))]
        if failed is not None:
            raise failed
        if self._restart:
            require_memory(self._config.distributed.ranks_per_node)
        # A node that stands by was looked at before.
        elif not await self._is_fit(link):
            return
        places = 4 * self._config.distributed.ranks_per_node
        refusals = self._refusals
        self._ranks = RankSocket(self._from_rank, places, refusals)
        self._store = StoreSocket(self._ranks.directory, link.send, _STORE_PLACES * places, refusals)
        await self._store.open()
        if ranks_inside(self._config):
            self._lifeline = await Lifeline.open(self._ranks.directory)
        self._tasks.append(asyncio.create_task(self._ranks.serve()))
        link.send(
            msg.AgentReady(
                node=self._node,
                node_id=self._node_id,
                address=link.own_host,
                # For Ray's head. torch's ranks use no port: they meet in the lead's store (`wire.store_line`).
                free_port=_free_port(link.own_host),
            )
        )
        if not self._restart:  # else the port is the other agent's as yet
            await self._open_metrics(link.own_host, refusals.counts)
        self._log.say("joined", lead=f"{self._address.host}:{self._address.port}")
        for name in self._early_signals:
            self._relay(name)
        await self._live(link, self._ranks)

    async def _is_fit(self, link: LeadLink) -> bool:
        """Returns whether ranks may start on this node; if not, the lead is told, and it ends this agent."""
        # Outside Slurm the next attempt begins on the same machine, and would find the same.
        if "SLURM_JOB_ID" not in os.environ:
            return True
        from verl_slurm_daemon.agent.node_check import look_at_node  # for the first start of each agent alone

        try:
            async with asyncio.timeout(_BASELINE_S):
                places, ahead_s = await self._baselines.get()
        # A lead outside Slurm, or of an older release: then the package was replaced under the job.
        except TimeoutError:
            return True
        checked = await self._first(look_at_node(self._config, places, ahead_s))
        if checked is None:
            return False
        told = {one.topic: f"{one.verdict}: {one.found}" for one in checked}
        self._log.say("health", found=told)
        wrong = [one for one in checked if one.verdict == "bad"]
        if wrong:
            evidence = printable("; ".join(f"{one.topic}: {one.found}" for one in wrong))[: msg.MAX_REASON]
            passing = all(one.passing for one in wrong)
            link.send(msg.NodeUnfit(node=self._node, evidence=evidence, passing=passing))
            await self._first(asyncio.sleep(_HEARD_S))
        return not wrong

    def _tell_of_stranger(self, reason: str, peer: str, total: int) -> None:
        self._log.say("stranger", loud=True, reason=reason, peer=peer, total=total)

    async def _open_metrics(self, own_host: str, refused: Mapping[str, int]) -> None:
        if self._config.observability.metrics_port is None:
            return
        from verl_slurm_daemon.agent import node_metrics as agent_metrics  # 2 MB, for a port

        self._metrics = agent_metrics.AgentMetrics(
            self._paths, self._config, self._node_id, lambda: not self._lead_lost.is_set()
        )
        self._metrics.refused = refused
        if problem := await self._metrics.open(own_host):
            self._log.say("metrics", loud=True, problem=problem)

    async def _live(self, link: LeadLink, ranks: RankSocket) -> None:
        assert self._address is not None
        start = self._start = NodeStart(
            self._paths,
            self._config,
            self._address,
            self._node_id,
            ranks.directory,
            self._log,
            self._refusals.add,
        )
        if self._restart:
            await self._first(start.stand_by(self._restart))
        # ---- wait until all agents are ready and the lead has named the checkpoint to resume from
        launch = await self._first(self._launches.get())
        if launch is None:
            return
        # Which ranks are this node's follows from `node_rank`; until here the socket refuses every message.
        ranks.ranks = self._config.speakers_on(launch.node_rank)
        if self._restart:
            await self._open_metrics(link.own_host, self._refusals.counts)
        launcher = await self._first(start.launch(launch))
        if launcher is None:
            return
        log, moves = start.log, Moves.of(self._paths)
        self._log.say("launched", restart=launch.restart, launcher=launcher.pid)
        # Not before: it uses a thread, and the launcher has to be forked by a process that has one.
        self._tasks.append(asyncio.create_task(self._watch_the_cloud(link)))
        # ---- wait for the ranks' end; after a shutdown or a lost link, `_leave` kills them
        exit_code = await self._first(launcher.wait())
        if exit_code is None:
            return
        self._log.say("exited", code=exit_code)
        # Before NodeExited: a Saved or Finished that a rank sent just before its end may still lie in the socket.
        await ranks.drain()
        detail = "" if exit_code == 0 else moves.as_submitted(last_words(log))
        link.send(msg.NodeExited(node=self._node, exit_code=exit_code, detail=detail))
        # Sent is not heard: a lead that dies late, or with its node, would take the news with it. It says Shutdown.
        await self._first(asyncio.sleep(_HEARD_S))

    async def _watch_the_cloud(self, link: LeadLink) -> None:
        """Tells the lead once if the cloud takes this node back."""
        # Outside Slurm the next attempt begins on the same machine, and would hear the same again.
        wanted = self._config.daemon.spot_notices
        if wanted == "none" or "SLURM_JOB_ID" not in os.environ:
            return
        from verl_slurm_daemon.agent import spot_notice  # HTTP, which other nodes need not load

        cloud = spot_notice.find_cloud() if wanted == "auto" else wanted
        if not cloud:
            return
        notice = await spot_notice.wait_for_notice(
            cloud, lambda problem: self._log.say("spot_notices", cloud=cloud, problem=problem)
        )
        self._log.say("spot_notices", loud=True, evidence=notice.evidence, seconds_left=notice.seconds_left)
        link.send(
            msg.SpotNoticeSeen(node=self._node, evidence=notice.evidence, seconds_left=notice.seconds_left)
        )

    async def _first(self, wanted: Coroutine[Any, Any, T]) -> T | None:
        """Returns the result of `wanted`, or None if a shutdown or the loss of the lead comes first."""
        task = asyncio.create_task(wanted)
        ends = [asyncio.create_task(self._shutdown.wait()), asyncio.create_task(self._lead_lost.wait())]
        await asyncio.wait([task, *ends], return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        # Before the ends: a result that comes in the same turn of the loop as a shutdown counts.
        if task.done():
            return task.result()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return None

    async def _leave(self, job: SlurmJob | None) -> bool:
        """Kills what runs here and stays until this agent may leave; returns whether the lead has released it."""
        # First of all: the end of this step tells the lead that no process of ours is left (`inputs.RanksEnded`),
        # and ranks that outlive it would write beside the next attempt's. A container's first: its runtime may stand
        # between this process and them.
        if self._lifeline is not None and not await self._lifeline.end():
            self._log.say("kill", loud=True, container="did not end")
        self._kill_all()
        for _ in range(4):  # turns of the loop: an end of the link that has already come is seen
            await asyncio.sleep(0)
        # Taken before the link is closed below, because `_listen` takes our own close for the loss of the lead.
        known = AgentKnowledge(
            in_slurm=job is not None,
            released=self._shutdown.is_set(),
            link_up=self._link is not None and not self._lead_lost.is_set(),
            joined=self._link is not None,
        )
        if self._link is not None:
            if known.released and known.link_up:  # else a lead would take this end for the loss of the node
                self._link.send(msg.NodeExited(node=self._node, exit_code=0, detail=""))
            await self._link.close()  # a lead that lives sees it, and knows
        # No launcher is forked any more, so a thread may write: storage that hangs must not delay the requeue.
        self._log.detach()
        senses = None
        if job is not None:
            paths, config, attempt = self._paths, self._config, self._attempt
            senses = SlurmSenses(
                job, config, paths, attempt=attempt, node_id=self._node_id, address=self._address
            )
        try:
            # One that stands by asks after all those that train.
            turn = self._node_id + (self._config.distributed.nodes if self._restart else 0)
            verdict = await see_off(known, senses, turn, self._log)
            self._log.say("done", released=known.released, link_up=known.link_up, reason=verdict.reason)
        except Exception as error:  # noqa: BLE001 - the node is still to be left clean
            self._report(error)
        return known.released

    def _clean_up(self) -> None:
        self._kill_all()
        if self._metrics is not None:
            self._metrics.close()
        for task in self._tasks:
            task.cancel()
        if self._store is not None:
            self._store.close()
        if self._lifeline is not None:
            self._lifeline.close()
        if self._ranks is not None:
            self._ranks.close()

    def _kill_all(self) -> None:
        try:
            stubborn = kill_tree()
        except Exception as error:  # noqa: BLE001 - /proc of a dying tree; the launcher dies with us anyway
            self._log.say("kill", loud=True, error=f"{type(error).__name__}: {error}")
            return
        if stubborn:
            self._log.say("kill", loud=True, do_not_die=stubborn)

    def _report(self, error: Exception) -> str:
        """Writes the error to this agent's log and to its standard output; returns the line that states it."""
        told = error.one_line() if isinstance(error, VerlSlurmError) else f"{type(error).__name__}: {error}"
        places = traceback.extract_tb(error.__traceback__)
        self._log.say("failed", loud=True, error=told, where=f"{places[-1].filename}:{places[-1].lineno}")
        # An error of ours has all that people need in one line; of any other, developers need the stack.
        printed = told
        if not isinstance(error, VerlSlurmError):
            printed = "".join(traceback.format_exception(error)).rstrip()
        # What is printed goes by srun to the lead's node, and is no reason to end: that may be gone, or the stream
        # closed.
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"verl-slurmd: {printed}\n")
        return told

    def _note_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Records an error in a callback or a separate task; it ends nothing."""
        error = context.get("exception")
        what = f"{type(error).__name__}: {error}" if error is not None else ""
        self._log.say("internal", loud=True, what=context.get("message"), error=what)

    async def _listen(self, link: LeadLink) -> None:
        try:
            await link.messages(self._from_lead)
            self._log.say("link", ended="by the other side")
        except (OSError, VerlSlurmError) as error:
            self._log.say("link", ended=f"{type(error).__name__}: {error}")
        finally:
            # However the link ended: `leaving.decide` finds out whether the lead lives.
            self._lead_lost.set()

    def _from_lead(self, message: msg.ToAgent) -> None:
        match message:
            case msg.Baseline():
                self._baselines.put_nowait((message.places, time.time() - message.time))
            case msg.Launch():
                self._launches.put_nowait(message)
            case msg.SaveRequest():
                assert self._ranks is not None
                # By the page and not by a socket: ranks look at each safe point, which has to cost one read of memory.
                self._ranks.page.post(message)
            case msg.StoreAnswer():
                assert self._store is not None
                self._store.answer(message)
            case msg.DumpStacks():
                self._dumping = asyncio.create_task(self._dump_stacks())
            case msg.Shutdown():
                self._log.say("shutdown")
                self._shutdown.set()
            case _:
                assert_never(message)

    async def _dump_stacks(self) -> None:
        assert self._link is not None
        log = Path() if self._start is None else self._start.log
        await write_stacks(log)
        asked = request_flights(self._ranks.directory) if self._ranks is not None else 0
        # Nothing tells when a process has written its last line.
        await asyncio.sleep(_FLIGHTS_S if asked else _STACKS_S)
        self._link.send(msg.StacksWritten(node=self._node, log=str(log)))

    def _from_rank(self, message: msg.FromRank) -> None:
        assert self._link is not None
        self._link.send(message)
        if self._metrics is not None:
            self._metrics.heard(message)

    def _relay(self, name: str) -> None:
        self._log.say("signal", name=name)
        if self._link is None:
            self._early_signals.append(name)
            # It ends the pauses between the tries to connect (`reach_lead`).
            if name == "SIGTERM":
                self._warned.set()
        else:
            self._link.send(msg.SignalSeen(node=self._node, signal=signal.Signals[name].value))


# For all processes one after the other: the lead waits five seconds for the agents of all nodes.
_STACKS_OF_ALL_S = 2.0
# Two that write at once would mix their lines.
_STACKS_OF_EACH_S = 0.05
_MOST_SHOWN = 160


async def write_stacks(log: Path) -> None:
    """Has each process below this one that answers (`wire.hang_records`) add its stacks to the ranks' log."""
    # In a thread: it reads /proc for each process below.
    found = await asyncio.to_thread(listeners, STACKS_SIGNAL)
    pause_s = min(_STACKS_OF_EACH_S, _STACKS_OF_ALL_S / max(len(found), 1))
    with contextlib.suppress(OSError):
        fd = open_log(log)
        try:
            for process, name in found:
                os.write(
                    fd, f"\n---- stacks of {printable(name)[:_MOST_SHOWN]} (pid {process.pid})\n".encode()
                )
                with contextlib.suppress(OSError):
                    process.send_signal(STACKS_SIGNAL)
                await asyncio.sleep(pause_s)  # nothing tells that a process has written its last line
        finally:
            os.close(fd)


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def run_agent(root: Path, attempt: int, restart: int = 0) -> ExitCode:
    """Runs the agent of this node from start to end. `restart`: as in `Agent`."""
    # Before the first child: an orphan goes to the nearest subreaper that there is when its parent dies.
    become_subreaper()
    spare_former_children()
    # `kill_tree` reaps children that asyncio also waits for; its warning about that says nothing to anybody.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    paths = RunPaths(root)
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    # It counts over all components of a heterogeneous job, too (22.05.8).
    node_id = int(os.environ.get("SLURM_NODEID") or 0)
    return asyncio.run(_run(paths, attempt, node, node_id, restart))


async def _run(paths: RunPaths, attempt: int, node: str, node_id: int, restart: int) -> ExitCode:
    try:
        config, failed = load_own(paths.run_yaml), None
    except (OSError, VerlSlurmError) as error:
        # The defaults suffice for the link by which the lead is told; else it would wait a minute for this agent.
        config, failed = RunConfig(), error
    return await Agent(paths, config, attempt, node, node_id, restart).run(failed)
