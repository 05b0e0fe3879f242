"""Starts the ranks of an attempt, again and again: chooses their checkpoint and nodes, hears their agents, and ends
them."""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial

import msgspec

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.checkpoint.store.lost import parts_since
from verl_slurm.checkpoint.store.run_config import note_trained_with, trained_with
from verl_slurm.config.changes import refuse_changes
from verl_slurm.config.elastic import on_nodes
from verl_slurm.config.load import load_own
from verl_slurm.journal import events as ev
from verl_slurm.journal.files import read_history
from verl_slurm.journal.status import Status
from verl_slurm.wire import messages as msg
from verl_slurm.wire.connection_limits import REASONS
from verl_slurm.wire.lead_file import LeadAddress, write_lead_address
from verl_slurm_daemon.allocation.contract import TooFewNodes
from verl_slurm_daemon.allocation.launcher import daemon_argv
from verl_slurm_daemon.decide import inputs
from verl_slurm_daemon.lead.agents_step import Step
from verl_slurm_daemon.lead.attempt import Attempt
from verl_slurm_daemon.lead.attempt_start import ENVIRONMENT, failed_code, require_mounted, spoken
from verl_slurm_daemon.lead.nodes_copies import bring_home, left_behind
from verl_slurm_daemon.lead.pace_watch import PaceWatch
from verl_slurm_daemon.lead.requeueing import places_seen, write_down
from verl_slurm_daemon.lead.resume import (
    ResumePoint,
    Verdicts,
    find_resume_point,
    fit_ranks,
    nothing_left,
    wait_for_checkpoints,
)
from verl_slurm_daemon.lead.service_hosts import Services
from verl_slurm_daemon.lead.standby_agents import AGENTS_READY_S, Standby, watch_growth
from verl_slurm_daemon.link.channel import AgentLink, Refusals, serve


@dataclass
class _Agent:
    """An agent at the other end of a link, which `task` reads. It lives for one restart, `step`."""

    link: AgentLink
    task: asyncio.Task[None]
    step: Step
    node: str = ""
    """Empty until it has said it."""
    said_goodbye: bool = False
    """It ends by itself, and its link with it."""


class Restarts:
    """The restarts of one attempt, one after the other. `step` is the newest; `services` outlive them.

    Attributes:
        left_clean: the newest step ended by itself. If not, a node that hangs may keep the job for a while.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt, self._config = attempt, attempt.config
        self.step = Step(0, attempt.config.distributed.nodes)
        self.standby = Standby(attempt)
        self.services = Services(attempt)
        self.verdicts = Verdicts()
        self.refusals = Refusals(REASONS, lambda *told: attempt.journal.write(ev.Stranger(*told)))
        self.left_clean = True
        self._pace = PaceWatch.of(attempt.config)  # each restart has its own
        self._places, self._lost = tuple[str, ...](), tuple[str, ...]()
        self._port: tuple[asyncio.Server, LeadAddress] | None = None

    async def open(self) -> None:
        """Listens for agents, and says where. May be called again after an error (OSError, SlurmMissing)."""
        attempt, config = self._attempt, self._config
        self._places = await asyncio.to_thread(places_seen, config, attempt.paths)
        if self._port is None:
            token = secrets.token_bytes(32)
            # Twice the agents, those that stand by, too: each may ask over a second connection whether the lead lives.
            links = 4 * config.distributed.nodes + self.services.num_hosts + 4
            host = await attempt.allocation.address()
            server, port = await serve(host, token, attempt.number, links, self._on_link, self.refusals.add)
            address = LeadAddress(attempt=attempt.number, restart=0, host=host, port=port, token=token.hex())
            self._port = server, address
        # Again at each try: storage may not have taken it.
        await self._announce(0)

    async def _announce(self, number: int) -> None:
        """Announces that agents may join. Those of srun need no announcement; those of a hostfile wait for it."""
        if self._port is not None:
            server, address = self._port
            self._port = server, msgspec.structs.replace(address, restart=number)
            await asyncio.to_thread(write_lead_address, self._attempt.paths, self._port[1])

    async def end_all(self) -> None:
        """Ends what outlives the restarts."""
        services_ended, _ = await asyncio.gather(self.services.close(), self.standby.drop())
        self.left_clean = services_ended and self.standby.clean and self.left_clean

    def close_port(self) -> None:
        if self._port is not None:
            self._port[0].close()

    def send(self, message: msg.ToAgent) -> None:
        """Sends a message to all agents whose ranks train."""
        for link in self.step.links.values():
            link.send(message)

    def describe(self, status: Status) -> None:
        """Puts the nodes of the ranks into the snapshot, and the ranks that are slow now."""
        status.train_nodes, status.stragglers = self.step.train_nodes, self._pace.stragglers

    async def bring_home(self, after: str) -> bool:
        """Makes every node send what shared storage lacks; returns whether anything came of it."""
        return await bring_home(self._attempt, after=after, avoid=self._lost)

    # ---- a restart, from start to end

    async def run(self, number: int, avoid: tuple[str, ...] = ()) -> None:
        """Starts ranks, and posts what came of them."""
        attempt = self._attempt
        # New for each restart: what an agent of the former step still sends changes nothing of this one.
        self.step = Step(number, self._config.distributed.nodes)
        self.left_clean, self._lost = True, avoid
        point: ResumePoint | inputs.Input
        try:
            point = await self._begin(number)
        except ENVIRONMENT as error:  # storage, Slurm, no processes left: no fault of the program's
            point = inputs.StartHindered(f"the step was not started: {error}", exit_code=failed_code(error))
        except TooFewNodes as error:  # with --no-kill, Slurm leaves the end of such a job to us
            attempt.post(inputs.CauseKnown("failed", str(error), None))
            point = inputs.RanksEnded(1)
        except VerlSlurmError as error:
            point = inputs.Over(error.exit_code, str(error))
        if not isinstance(point, ResumePoint):
            attempt.post(point)
            return
        step = self.step
        # A take-down that came during `_begin` found no step to end.
        if step.leaving.is_set():
            attempt.spawn(self.take_down())
        attempt.spawn(self._launch_when_ready(step, point))
        attempt.spawn(self.standby.start_after(step, avoid), aside="standby")
        attempt.spawn(watch_growth(attempt, step), aside="growth")
        watch = asyncio.create_task(self._watch_pace(number))
        code = await step.wait()
        watch.cancel()
        # Without Slurm, an agent that ends has failed by itself.
        if code and not (step.ready or step.leaving.is_set()) and attempt.allocation.cluster == "slurm":
            attempt.post(await step.why_absent(f"the step ended with {code} before any agent came"))
        # srun may have died alone: no rank may survive into the next restart
        step.shut_down()
        await step.last_words()
        # Last: `Finished` and `RankSaved` of these messages come before it, or a run that is done would count as a
        # crash.
        attempt.post(inputs.RanksEnded(code))

    async def _begin(self, number: int) -> ResumePoint | inputs.RanksEnded | inputs.AllDone:
        """Chooses the resume point and starts the step with the agents, or returns why it was not started."""
        attempt = self._attempt
        point = await spoken(self._resume_point(), "the choice of the checkpoint", attempt.journal)
        # run.yaml may have been edited while the job waited, or since; and the ranks read the file themselves.
        await asyncio.to_thread(self._require_unchanged, point)
        job = attempt.allocation.job_id, os.environ.get("SLURM_ARRAY_JOB_ID")
        history = await asyncio.to_thread(read_history, attempt.paths)
        # At a restart in place, too: ranks would take what is not mounted for what is wrong.
        await asyncio.to_thread(require_mounted, self._config, history)
        if done := nothing_left(self._config, point.manifest, history, *job):
            attempt.paths.resume_once.unlink(missing_ok=True)
            return inputs.AllDone(point.name, done)
        places = await attempt.allocation.places(self._lost)
        now = on_nodes(self._config, len(places.chosen) or self._config.distributed.nodes)
        if not await fit_ranks(now, point, self.step.leaving, attempt.journal):
            return inputs.RanksEnded(0)
        ahead = self.standby.stands
        attempt.journal.write(ev.Restart(number, point.name or None, point.progress, ahead))
        # After the journal has the restart: a lead that is killed before this takes the named checkpoint again.
        attempt.paths.resume_once.unlink(missing_ok=True)
        await self.services.start(leaving := self.step.leaving)
        if self._config.may_lose_nodes:
            attempt.post(inputs.Shaped(now.speakers))
        self._pace = PaceWatch.of(now)
        standby = await self.standby.take(number, now.distributed.nodes, self._lost)
        if leaving.is_set():  # a cancel came meanwhile, or a service cannot be started
            if standby is not None:
                await standby.end()
            return inputs.RanksEnded(0)
        await self._announce(number)
        if standby is not None:
            self.step = standby
            return point
        self.step.expect(places)
        argv = daemon_argv(sys.executable, "agent", attempt.paths, attempt.number)
        self.step.processes = await attempt.allocation.start_step(argv, names=places.chosen)
        return point

    def _require_unchanged(self, point: ResumePoint) -> None:
        """Raises ConfigError: the ranks' configuration differs from the run's former one in keys that matter."""
        attempt = self._attempt
        now = load_own(attempt.paths.run_yaml)
        newest = attempt.paths.checkpoints / point.name if point.name else None
        former = trained_with(attempt.paths, now, newest, attempt.keys) if point.begun else None
        if former is not None:
            refuse_changes(former, now, attempt.paths.root, steps_done=point.steps_done)
        note_trained_with(attempt.paths, now)

    async def _watch_pace(self, number: int) -> None:
        self._attempt.post(inputs.Hung(number, *await self._pace.hang()))

    async def _resume_point(self) -> ResumePoint:
        attempt = self._attempt
        checkpoint = self._config.checkpoint
        verifier = self.verdicts.read if self._config.trainer.is_guest else self.verdicts.recall
        given = attempt.paths, checkpoint.resume_from, attempt.number, attempt.keys, verifier
        find = partial(find_resume_point, *given)
        told: list[str] = []
        if checkpoint.local_dir and not attempt.paths.resume_once.exists():
            # The nodes hold something newer than a tier does, so that comes home first.
            point = await asyncio.to_thread(find)
            told += point.reasons
            self._warn_of_strays(point)
            await self.bring_home(point.name)
        last = partial(find, bool(self._config.tiers))
        point = await wait_for_checkpoints(last, self._config, attempt.journal, self.step.leaving)
        if checkpoint.local_dir:
            present = os.listdir(attempt.paths.checkpoints)
            history = read_history(attempt.paths)
            alone = history.on_nodes_alone(present, parts_since(attempt.paths))
            told += [left_behind(name, nodes) for name, nodes in alone.items()]
        for line in dict.fromkeys([*told, *point.reasons]):
            attempt.journal.write(ev.Resume(line))
        self._warn_of_strays(point)
        return point

    def _warn_of_strays(self, point: ResumePoint) -> None:
        if point.strays:
            self._attempt.journal.write(ev.Warned("checkpoint", point.strays))

    async def _launch_when_ready(self, step: Step, point: ResumePoint) -> None:
        attempt = self._attempt
        restart, began = step.restart, time.monotonic()
        while not step.all_ready.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGENTS_READY_S):
                    await step.all_ready.wait()
            if step is not self.step:
                return
            if step.all_ready.is_set():
                break
            if step.ready or (await attempt.allocation.outlook()).answered:
                how = f"{step.missing} after {time.monotonic() - began:.0f} s"
                attempt.post(await step.why_absent(how))
                return
            attempt.journal.write(
                ev.Warned("start", "Slurm does not answer: the start of the agents waits for it")
            )
        attempt.allocation.keep_step(step.processes)
        if step.leaving.is_set():
            return
        nodes = step.settle()
        if step.places.chosen:
            attempt.journal.write(ev.NodesChosen([one.node for one in nodes], list(step.places.idle)))
        services = self.services.addresses()
        for node_rank, ready in enumerate(nodes):
            step.links[ready.node].send(
                msg.Launch(
                    restart=restart,
                    attempt=attempt.number,
                    node_rank=node_rank,
                    nodes=len(nodes),
                    master_addr=nodes[0].address,
                    master_port=nodes[0].free_port,
                    resume=point.name,
                    services=services,
                    hosts=tuple(one.address for one in nodes),
                )
            )
        limit_s = self._config.daemon.start_timeout_s
        await asyncio.sleep(limit_s)  # a due time, not a poll: see StartTimedOut
        if step is self.step:
            # A user's loop does not say when each of its ranks speaks.
            attempt.post(inputs.StartTimedOut(restart, limit_s, all_ranks=not self._config.trainer.is_guest))

    async def _on_link(self, link: AgentLink) -> None:
        attempt = self._attempt
        task = asyncio.current_task()
        assert task is not None
        agent = _Agent(link, task, self.step)
        agent.step.listeners.add(task)
        if attempt.allocation.cluster == "slurm":  # elsewhere the next attempt begins on the same machines
            link.send(msg.Baseline(time=attempt.allocation.now(), places=self._places))
        try:
            await link.messages(partial(self._hear, agent))
        except (OSError, VerlSlurmError) as error:
            if not agent.step.leaving.is_set():  # the end of a step that was told to end may be a reset, too
                attempt.journal.write(ev.Link(agent.node, str(error)))
        if self.services.gone(link):
            return
        step, node = agent.step, agent.node
        step.part(link)
        if step is not self.step:  # one that stands by, or did; those that train know nothing of it
            if self.standby.is_of(step):
                attempt.spawn(self.standby.lose(node, f"node {node}: its agent is gone"))
            return
        # A link that ends before `AgentReady` names no node; `why_absent` then reports what is missing. A node that
        # was left out is not counted on.
        if node and not agent.said_goodbye and step.links.get(node) is link:
            attempt.post(await step.why_lost(node, self._lost))

    def _hear(self, agent: _Agent, message: msg.FromAgent) -> None:
        attempt = self._attempt
        link, step = agent.link, agent.step
        match message:
            case msg.StandsBy():
                step.listeners.discard(agent.task)
                agent.step = self.standby.joined_by(message.restart)
                agent.step.listeners.add(agent.task)
            case msg.AgentReady():
                agent.node = message.node
                step.join(link, message)
                if step.leaving.is_set():
                    link.send(msg.Shutdown())
            case msg.SignalSeen():
                name = signal.Signals(message.signal).name
                attempt.post(inputs.SignalArrived(name, f"node {message.node}"))
            case msg.NodeExited() if step is not self.step:
                if not step.leaving.is_set():  # else it was told to leave, and hears nothing more
                    link.send(msg.Shutdown())
                    if self.standby.is_of(step):
                        attempt.spawn(self.standby.drop(f"node {message.node}: {message.detail}"))
            case msg.NodeExited():
                # It waits for this, in case the lead is gone. Without its driver, all of Ray waits in vain. One that
                # was told already says its last word, and hears nothing more.
                if not (agent.said_goodbye or (agent.node and step.leaving.is_set())):
                    for waiting in step.links.values() if self._config.trainer.on_ray else (link,):
                        waiting.send(msg.Shutdown())
                agent.said_goodbye = True
                if message.exit_code != 0:
                    detail = message.detail or f"exit {message.exit_code}"
                    attempt.post(inputs.NodeFailed(message.node, detail))
            case msg.StoreCall():
                step.store.call(message, link.send)
            case msg.StrangerMet():
                attempt.journal.write(ev.Stranger("ranks", message.peers, node=agent.node, rank=message.rank))
                # Posted before the answer that the rank waits for: its end, and its peers' reports of it, come after.
                attempt.post(inputs.StrangerFound(agent.node, f"rank {message.rank}: {message.peers}"))
                link.send(msg.StoreAnswer(call=message.call, outcome="ok"))
            case msg.ServiceSaid():
                step.listeners.discard(agent.task)  # a service outlives this restart
                self.services.hear(message, link)
            case msg.SpotNoticeSeen():
                attempt.post(
                    inputs.LeaveNode(agent.node, "reclaimed", message.evidence, message.seconds_left)
                )
            case msg.NodeUnfit():
                agent.node, agent.said_goodbye = message.node, True
                step.links[agent.node] = link  # it waits for Shutdown
                self._leave_bad_node(agent.node, message.evidence, passing=message.passing)
            case msg.RankUnfit():
                self._leave_bad_node(agent.node, f"rank {message.rank}: {message.evidence}")
            case msg.StacksWritten():
                step.stacks.put_nowait(message)
            case _:
                self._hear_rank(agent, message)

    def _hear_rank(self, agent: _Agent, message: msg.FromRank) -> None:
        if isinstance(message, msg.Progress):
            agent.step.training.set()
        for event in self._pace.hear(agent.node, message):
            self._attempt.journal.write(event)
        self._attempt.post(inputs.RankSaid(message))

    def _leave_bad_node(self, node: str, evidence: str, *, passing: bool = False) -> None:
        self._attempt.spawn(write_down(self._attempt, node, evidence, passing=passing))
        self._attempt.post(inputs.LeaveNode(node, "bad_node", evidence))

    async def take_down(self, *, stacks: bool = False) -> None:
        """Ends the newest restart. With `stacks`, all ranks dump the stacks of their threads before."""
        step = self.step
        if stacks:
            await step.write_stacks(self._attempt.journal)
            if step is not self.step:
                return  # it ended by itself in between: the running one is the next
        # `leaving` is set before anything is awaited: `_begin` looks at it just before a step starts.
        if not await step.end():
            self.left_clean = False
