"""Carries out the policy's actions: starts steps, talks to agents, asks Slurm, reads checkpoints back.

Every effect runs as a task of its own and reports by an event. The loop waits for none of them, so a hanging
`scontrol` or a slow disk never delays the next decision.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_never

import msgspec

from verl_slurm.base.bounded import TooMuch
from verl_slurm.base.errors import KeyRefused, VerlSlurmError, is_transient_storage_error
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.keys import Keyring, load_keys
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.run_config import note_trained_with, trained_with
from verl_slurm.config.changes import refuse_changes
from verl_slurm.config.elastic import on_nodes
from verl_slurm.config.load import load_own
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal import events as ev
from verl_slurm.journal.files import read_history
from verl_slurm.journal.status import Status
from verl_slurm.wire.connection_limits import REASONS
from verl_slurm.wire.lead_file import LeadAddress, remove_lead_address, write_lead_address
from verl_slurm.wire.messages import (
    AgentReady,
    Baseline,
    FromAgent,
    FromRank,
    Launch,
    NodeExited,
    NodeUnfit,
    Progress,
    RankUnfit,
    ServiceSaid,
    Shutdown,
    SignalSeen,
    SpotNoticeSeen,
    StacksWritten,
    StandsBy,
    StoreAnswer,
    StoreCall,
    StrangerMet,
)
from verl_slurm_daemon.allocation.contract import Allocation, TooFewNodes
from verl_slurm_daemon.allocation.launcher import agent_argv, service_host_argv
from verl_slurm_daemon.decide import actions as act, inputs
from verl_slurm_daemon.decide.completion import nothing_left
from verl_slurm_daemon.journal import Journal
from verl_slurm_daemon.lead.agents_step import Step
from verl_slurm_daemon.lead.attempt_start import (
    ENVIRONMENT,
    answered,
    failed_code,
    patiently,
    require_mounted,
    spoken,
)
from verl_slurm_daemon.lead.nodes_copies import bring_home, left_behind, parts_since
from verl_slurm_daemon.lead.pace_watch import PaceWatch
from verl_slurm_daemon.lead.requeueing import places_seen, requeue, write_down
from verl_slurm_daemon.lead.resume import (
    ReadBack,
    ResumePoint,
    Verdicts,
    find_resume_point,
    fit_ranks,
    read_back,
    wait_for_checkpoints,
)
from verl_slurm_daemon.lead.scrubbing import scrub_forever
from verl_slurm_daemon.lead.service_hosts import Services
from verl_slurm_daemon.lead.stack_requests import write_stacks
from verl_slurm_daemon.lead.standby_agents import AGENTS_READY_S, Standby, watch_growth
from verl_slurm_daemon.lead.tier_child import TierMover
from verl_slurm_daemon.link.channel import AgentLink, Refusals, serve

_SRUN_TRIES_S = 5.0
"""For so long srun tries to reach slurmctld before it gives up; a refusal comes at once."""


@dataclass
class _Agent:
    """An agent at the other end of a link.

    Attributes:
        task: that listens to it.
        step: the restart that it belongs to. It lives for one, and so do the keys of its ranks.
        node: its name; empty until it has said it.
        said_goodbye: it ends by itself, and its link with it.
    """

    link: AgentLink
    task: asyncio.Task[None]
    step: Step
    node: str = ""
    said_goodbye: bool = False


class Effects:
    """Carries out the actions of one lead.

    Args:
        post: takes the resulting events.
    """

    def __init__(
        self,
        paths: RunPaths,
        config: RunConfig,
        allocation: Allocation,
        journal: Journal,
        epoch: int,
        post: Callable[[inputs.Input], None],
    ) -> None:
        self._paths, self._config, self._allocation = paths, config, allocation
        self._journal, self._epoch, self._post = journal, epoch, post
        self._keys: Keyring | None = None
        self._step = Step(0, config.distributed.nodes)
        self._verdicts = Verdicts()
        self._standby = Standby(paths, config, allocation, journal, epoch)
        self._pace = PaceWatch.of(config)  # each restart has its own
        self._stacks: asyncio.Queue[StacksWritten] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._places, self._lost = tuple[str, ...](), tuple[str, ...]()
        self._server: asyncio.Server | None = None
        self._is_open = False
        self._address: LeadAddress | None = None
        self._mover = TierMover(paths, config, journal)
        host_argv = partial(service_host_argv, sys.executable, paths, epoch)
        self._services = Services(config, allocation, journal, host_argv, post)
        self.refusals = Refusals(REASONS, lambda *told: journal.write(ev.Stranger(*told)))
        self.exit: tuple[ExitCode, str] | None = None
        self.left_clean = True
        """Whether the newest step ended by itself. If not, a node that hangs may keep the job for a while."""

    async def open(self) -> None:
        """Reads the key, if one is configured; listens for agents; starts moving checkpoints to their tiers. May be
        called again after an error.

        Raises:
            KeyRefused, PermissionRefused: `keys.load_keys`.
            OSError, SlurmMissing: storage or Slurm does not answer.
        """
        try:
            self._keys = load_keys(self._config.checkpoint.encryption)
        except KeyRefused as error:
            if isinstance(error.__cause__, OSError) and is_transient_storage_error(error):
                raise error.__cause__ from None
            raise
        self._places = await asyncio.to_thread(places_seen, self._config, self._paths)
        token = secrets.token_bytes(32)
        # Twice the agents, those that stand by, too: each may ask over a second connection whether the lead lives.
        links = 4 * self._config.distributed.nodes + self._services.num_hosts + 4
        if self._address is None:
            host = await self._allocation.address()
            self._server, port = await serve(
                host, token, self._epoch, links, self._on_link, self.refusals.add
            )
            self._address = LeadAddress(
                epoch=self._epoch, generation=0, host=host, port=port, token=token.hex()
            )
        # Again at each try: storage may not have taken it.
        await asyncio.to_thread(write_lead_address, self._paths, self._address)
        if not self._is_open:
            self._is_open = True
            self._spawn(self._mover.run(), aside="the mover of checkpoints")
            given = self._paths, self._config.checkpoint, self._journal, self._epoch, self._bring_home
            self._spawn(scrub_forever(*given, self._keys), aside="the scrub")

    async def _announce(self, generation: int) -> None:
        """Announces that agents may join. Those of srun need no announcement; those of a hostfile wait for it."""
        if self._address is not None:
            self._address = msgspec.structs.replace(self._address, generation=generation)
            await asyncio.to_thread(write_lead_address, self._paths, self._address)

    async def close(self) -> None:
        # First: they hear it over the port that is closed below.
        services_ended, _ = await asyncio.gather(self._services.close(), self._standby.drop())
        self.left_clean = services_ended and self._standby.clean and self.left_clean
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()
        # The epoch is checked there: a newer attempt's address stays.
        with contextlib.suppress(TimeoutError):
            await answered(lambda: remove_lead_address(self._paths, self._epoch))

    def perform(self, action: act.Action) -> None:
        # Whatever takes time runs as a task and comes back as an event: the loop decides about the next one meanwhile.
        match action:
            case act.Note(event):
                self._journal.write(event)
            case act.StartGeneration(generation, avoid):
                self._spawn(self._run_generation(generation, avoid))
            case act.AskCause(trigger):
                self._spawn(self._ask_cause(trigger))
            case act.SaveRequest():
                self._request_save(action)
            case act.ArmDeadline(seconds_left):
                self._arm(seconds_left)
            case act.Verify(name):
                self._spawn(self._verify(name))
            case act.TakeDown(stacks):
                self._spawn(self._take_down(stacks=stacks))
            case act.Pause(seconds):
                self._spawn(self._pause(seconds))
            case act.AskRequeue():
                self._spawn(self._requeue(action))
            case act.Exit(code, reason):
                self.exit = (code, reason)
            case _:
                assert_never(action)

    def _spawn(self, work: Coroutine[Any, Any, None], aside: str = "") -> None:
        """Runs `work` beside the loop.

        Args:
            aside: the name of what the run can do without, if the environment fails it.
        """
        task = asyncio.create_task(self._beside(work, aside) if aside else work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    async def _beside(self, work: Coroutine[Any, Any, None], what: str) -> None:
        try:
            await work
        except ENVIRONMENT as error:
            self._journal.write(ev.Warned(what, f"stopped until the next start: {error}"))

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # An effect that breaks must not leave the lead waiting for its event.
            self._journal.write(ev.Internal(f"{type(error).__name__}: {error}"))
            if self.exit is None:
                code = error.exit_code if isinstance(error, VerlSlurmError) else ExitCode.INTERNAL
                self.exit = (code, str(error))
                # The loop waits for an event before it looks at `exit`; any event wakes it.
                self._post(inputs.SignalArrived("internal", "effects"))

    # ---- a restart, from start to end

    async def _run_generation(self, generation: int, avoid: tuple[str, ...] = ()) -> None:
        # New for each restart: what an agent of the former step still sends changes nothing of this one.
        self._step = Step(generation, self._config.distributed.nodes)
        self.left_clean, self._lost = True, avoid
        self._stacks = asyncio.Queue()
        point: ResumePoint | inputs.Input
        try:
            point = await self._begin(generation)
        except ENVIRONMENT as error:  # storage, Slurm, no processes left: no fault of the program's
            point = inputs.StartHindered(f"the step was not started: {error}", exit_code=failed_code(error))
        except TooFewNodes as error:  # with --no-kill, Slurm leaves the end of such a job to us
            self._post(inputs.CauseKnown("failed", str(error), None))
            point = inputs.GenerationEnded(1)
        except VerlSlurmError as error:
            point = inputs.Over(error.exit_code, str(error))
        if not isinstance(point, ResumePoint):
            self._post(point)
            return
        step, began = self._step, time.monotonic()
        # A take-down that came during `_begin` found no step to end.
        if step.leaving.is_set():
            self._spawn(self._take_down())
        self._spawn(self._launch_when_ready(step, point))
        self._spawn(self._standby.start_after(step, avoid), aside="standby")
        growth = watch_growth(self._paths, self._config, self._allocation, step, self._post)
        self._spawn(growth, aside="growth")
        watch = asyncio.create_task(self._watch_pace(generation))
        code = await step.wait()
        watch.cancel()
        if code and not step.ready and not step.leaving.is_set() and await self._is_slurms_fault(began):
            detail = f"the step ended with {code} before any agent came: Slurm was away"
            self._post(inputs.NodeFailed("", detail, environment=True))
        # srun may have died alone: no rank may survive into the next restart
        step.shut_down()
        await step.last_words()
        # Last: `Finished` and `RankSaved` of these messages come before it, or a run that is done would count as a
        # crash.
        self._post(inputs.GenerationEnded(code))

    async def _is_slurms_fault(self, began: float) -> bool:
        """Returns whether slurmctld was away, judged by srun, which ended or waits and has started no agent."""
        if self._allocation.cluster != "slurm":
            return False
        # It tries for some seconds to reach slurmctld, which may answer again by now.
        return time.monotonic() - began > _SRUN_TRIES_S or not (await self._allocation.outlook()).answered

    async def _begin(self, generation: int) -> ResumePoint | inputs.GenerationEnded | inputs.AllDone:
        """Chooses the resume point and starts the step with the agents; otherwise returns why it was not started.

        Raises:
            OSError, VerlSlurmError: nothing was started.
        """
        point = await spoken(self._resume_point(), "the choice of the checkpoint", self._journal)
        # run.yaml may have been edited while the job waited, or since; and the ranks read the file themselves.
        await asyncio.to_thread(self._require_unchanged, point)
        job = self._allocation.job_id, os.environ.get("SLURM_ARRAY_JOB_ID")
        history = await asyncio.to_thread(read_history, self._paths)
        # At a restart in place, too: ranks would take what is not mounted for what is wrong.
        await asyncio.to_thread(require_mounted, self._config, history)
        if done := nothing_left(self._config, point.manifest, history, *job):
            self._paths.resume_once.unlink(missing_ok=True)
            return inputs.AllDone(point.name, done)
        places = await self._allocation.places(self._lost)
        now = on_nodes(self._config, len(places.chosen) or self._config.distributed.nodes)
        if not await fit_ranks(now, point, self._step.leaving, self._journal):
            return inputs.GenerationEnded(0)
        ahead = self._standby.stands
        self._journal.write(ev.Restart(generation, point.name or None, point.progress, ahead))
        # After the journal has the restart: a lead that is killed before this takes the named checkpoint again.
        self._paths.resume_once.unlink(missing_ok=True)
        await self._services.start(leaving := self._step.leaving)
        if self._config.may_lose_nodes:
            self._post(inputs.Shaped(now.speakers))
        self._pace = PaceWatch.of(now)
        standby = await self._standby.take(generation, now.distributed.nodes, self._lost)
        if leaving.is_set():  # a cancel came meanwhile, or a service cannot be started
            if standby is not None:
                await standby.end()
            return inputs.GenerationEnded(0)
        await self._announce(generation)
        if standby is not None:
            self._step = standby
            return point
        self._step.expect(places)
        argv = agent_argv(sys.executable, self._paths, self._epoch)
        self._step.processes = await self._allocation.start_step(argv, names=places.chosen)
        return point

    def _require_unchanged(self, point: ResumePoint) -> None:
        """Checks that the configuration for the ranks is the one the run has trained with, in all keys that matter.

        Raises:
            ConfigError: it is not; names the keys and their values.
        """
        now = load_own(self._paths.run_yaml)
        newest = self._paths.checkpoints / point.name if point.name else None
        former = trained_with(self._paths, now, newest, self._keys) if point.begun else None
        if former is not None:
            refuse_changes(former, now, self._paths.root, steps_done=point.steps_done)
        note_trained_with(self._paths, now)

    async def _watch_pace(self, generation: int) -> None:
        self._post(inputs.Hung(generation, *await self._pace.hang()))

    async def _resume_point(self) -> ResumePoint:
        checkpoint = self._config.checkpoint
        verifier = self._verdicts.read if self._config.trainer.is_guest else self._verdicts.recall
        given = self._paths, checkpoint.resume_from, self._epoch, self._keys, verifier
        find = partial(find_resume_point, *given)
        told: list[str] = []
        if checkpoint.local_dir and not self._paths.resume_once.exists():
            # The nodes hold something newer than a tier does, so that comes home first.
            point = await asyncio.to_thread(find)
            told += point.reasons
            await self._bring_home(point.name)
        last = partial(find, bool(self._config.tiers))
        point = await wait_for_checkpoints(last, self._config, self._journal, self._step.leaving)
        if checkpoint.local_dir:
            present = os.listdir(self._paths.checkpoints)
            history = read_history(self._paths)
            alone = history.on_nodes_alone(present, parts_since(self._paths))
            told += [left_behind(name, nodes) for name, nodes in alone.items()]
        for line in dict.fromkeys([*told, *point.reasons]):
            self._journal.write(ev.Resume(line))
        return point

    async def _launch_when_ready(self, step: Step, point: ResumePoint) -> None:
        generation, began = step.generation, time.monotonic()
        while not step.all_ready.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGENTS_READY_S):
                    await step.all_ready.wait()
            if step is not self._step:
                return
            if step.all_ready.is_set():
                break
            if step.ready or not await self._is_slurms_fault(began):
                self._post(inputs.StartTimedOut(generation))
                return
            if (await self._allocation.outlook()).answered:
                detail = f"no agent came in {time.monotonic() - began:.0f} s: Slurm was away"
                self._post(inputs.NodeFailed("", detail, environment=True))
                return
            self._journal.write(
                ev.Warned("start", "Slurm does not answer: the start of the agents waits for it")
            )
        self._allocation.keep_step(step.processes)
        if step.leaving.is_set():
            return
        nodes = step.settle()
        if step.places.chosen:
            self._journal.write(ev.NodesChosen([one.node for one in nodes], list(step.places.idle)))
        services = self._services.addresses()
        for node_rank, ready in enumerate(nodes):
            step.links[ready.node].send(
                Launch(
                    generation=generation,
                    epoch=self._epoch,
                    node_rank=node_rank,
                    nodes=len(nodes),
                    master_addr=nodes[0].address,
                    master_port=nodes[0].free_port,
                    resume=point.name,
                    services=services,
                    hosts=tuple(one.address for one in nodes),
                )
            )
        await asyncio.sleep(self._config.daemon.start_timeout_s)  # a due time, not a poll: see StartTimedOut
        if step is self._step:
            # A user's loop does not say when each of its ranks speaks.
            self._post(inputs.StartTimedOut(generation, all_ranks=not self._config.trainer.is_guest))

    async def _on_link(self, link: AgentLink) -> None:
        task = asyncio.current_task()
        assert task is not None
        agent = _Agent(link, task, self._step)
        agent.step.listeners.add(task)
        if self._allocation.cluster == "slurm":  # elsewhere the next attempt begins on the same machines
            link.send(Baseline(time=self._allocation.now(), places=self._places))
        try:
            await link.messages(partial(self._hear, agent))
        except (OSError, VerlSlurmError) as error:
            if not agent.step.leaving.is_set():  # the end of a step that was told to end may be a reset, too
                self._journal.write(ev.Link(agent.node, str(error)))
        if self._services.gone(link):
            return
        step, node = agent.step, agent.node
        step.part(link)
        if step is not self._step:  # one that stands by, or did; those that train know nothing of it
            if self._standby.is_of(step):
                self._spawn(self._standby.lose(node, f"node {node}: its agent is gone"))
            return
        # A link that ends before `AgentReady` names no node; `StartTimedOut` then reports what is missing. A node that
        # was left out is not counted on.
        if node and not agent.said_goodbye and step.links.get(node) is link:
            self._post(await step.why_lost(node, self._lost))

    def _hear(self, agent: _Agent, message: FromAgent) -> None:
        link, step = agent.link, agent.step
        match message:
            case StandsBy():
                step.listeners.discard(agent.task)
                agent.step = self._standby.joined_by(message.generation)
                agent.step.listeners.add(agent.task)
            case AgentReady():
                agent.node = message.node
                step.join(link, message)
                if step.leaving.is_set():
                    link.send(Shutdown())
            case SignalSeen():
                name = signal.Signals(message.signal).name
                self._post(inputs.SignalArrived(name, f"node {message.node}"))
            case NodeExited() if step is not self._step:
                if not step.leaving.is_set():  # else it was told to leave, and hears nothing more
                    link.send(Shutdown())
                    if self._standby.is_of(step):
                        self._spawn(self._standby.drop(f"node {message.node}: {message.detail}"))
            case NodeExited():
                # It waits for this, in case the lead is gone. Without its driver, all of Ray waits in vain. One that
                # was told already says its last word, and hears nothing more.
                if not (agent.said_goodbye or (agent.node and step.leaving.is_set())):
                    for waiting in step.links.values() if self._config.trainer.on_ray else (link,):
                        waiting.send(Shutdown())
                agent.said_goodbye = True
                if message.exit_code != 0:
                    detail = message.detail or f"exit {message.exit_code}"
                    self._post(inputs.NodeFailed(message.node, detail))
            case StoreCall():
                step.store.call(message, link.send)
            case StrangerMet():
                self._journal.write(ev.Stranger("ranks", message.peers, node=agent.node, rank=message.rank))
                # Posted before the answer that the rank waits for: its end, and its peers' reports of it, come after.
                self._post(inputs.StrangerFound(agent.node, f"rank {message.rank}: {message.peers}"))
                link.send(StoreAnswer(call=message.call, outcome="ok"))
            case ServiceSaid():
                step.listeners.discard(agent.task)  # a service outlives this restart
                self._services.hear(message, link)
            case SpotNoticeSeen():
                self._post(inputs.LeaveNode(agent.node, "reclaimed", message.evidence, message.seconds_left))
            case NodeUnfit():
                agent.node, agent.said_goodbye = message.node, True
                step.links[agent.node] = link  # it waits for Shutdown
                self._leave_bad_node(agent.node, message.evidence, passing=message.passing)
            case RankUnfit():
                self._leave_bad_node(agent.node, f"rank {message.rank}: {message.evidence}")
            case StacksWritten():
                self._stacks.put_nowait(message)
            case _:
                self._hear_rank(agent, message)

    def _hear_rank(self, agent: _Agent, message: FromRank) -> None:
        if isinstance(message, Progress):
            agent.step.training.set()
        for event in self._pace.hear(agent.node, message):
            self._journal.write(event)
        self._post(inputs.RankSaid(message))

    def describe(self, status: Status) -> None:
        """Puts the nodes of the ranks into the snapshot, and the ranks that are slow now."""
        status.train_nodes, status.stragglers = self._step.train_nodes, self._pace.stragglers

    def _leave_bad_node(self, node: str, evidence: str, *, passing: bool = False) -> None:
        self._spawn(write_down(self._config, self._paths, self._journal, node, evidence, passing=passing))
        self._post(inputs.LeaveNode(node, "bad_node", evidence))

    async def _take_down(self, *, stacks: bool = False) -> None:
        step = self._step
        if stacks:
            await write_stacks(step.links.values(), self._stacks, self._journal)
            if step is not self._step:
                return  # it ended by itself in between: the running one is the next
        # `leaving` is set before anything is awaited: `_begin` looks at it just before a step starts.
        if not await step.end():
            self.left_clean = False

    # ---- saves

    def _request_save(self, request: act.SaveRequest) -> None:
        left = request.seconds_left
        for link in self._step.links.values():
            link.send(request)
        if left is not None:
            self._arm(left)
            self._mover.interrupt()
        seconds_left = left and round(left, 1)  # recorded last: a disk may be slow, and the time runs
        self._journal.write(ev.Save(request.stop, request.request_id, seconds_left))

    def _arm(self, seconds_left: float) -> None:
        seconds = max(0.0, seconds_left - self._config.daemon.save_margin_s)
        # No timer is cancelled: the earliest one counts, and the policy ignores `SaveDeadline` outside of a save.
        asyncio.get_running_loop().call_later(seconds, self._post, inputs.SaveDeadline())

    async def _verify(self, name: str) -> None:
        read = partial(read_back, self._paths, name, self._epoch, self._keys, self._verdicts.read)

        async def readable() -> ReadBack:
            found = await asyncio.to_thread(read)
            if found.unreadable:
                raise OSError(found.detail)
            return found

        def say(error: Exception, pause_s: float) -> None:
            self._journal.write(ev.Warned("storage", f"{error}: read again in {pause_s:.0f} s"))

        try:
            found = await patiently(readable, lambda: self.exit is not None, say)
        except OSError as error:
            found = ReadBack(False, str(error), unreadable=True)
        # The nodes may hold a whole second copy: it is fetched before the policy hears that the save is lost.
        if not (found.good or found.pruned or found.unreadable) and self._config.checkpoint.local_dir:
            self._journal.write(ev.Corrupt(name, found.detail))
            if await self._bring_home(""):
                found = await asyncio.to_thread(read)
        self._post(inputs.SaveReadBack(name, found.good, found.detail, found.pruned, found.unreadable))
        if found.good:
            self._mover.wake()

    async def _bring_home(self, after: str) -> bool:
        """Makes every node send what shared storage lacks; returns whether anything came of it."""
        given = self._paths, self._epoch, self._keys
        return await bring_home(self._allocation, self._journal, *given, after=after, avoid=self._lost)

    # ---- the scheduler

    async def _ask_cause(self, trigger: str) -> None:
        self._post(await self._allocation.cause(trigger))

    async def _requeue(self, action: act.AskRequeue) -> None:
        self._spawn(self._standby.drop())
        self._post(await requeue(self._allocation, self._config, self._paths, self._journal, action))

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)  # the back-off itself
        stuck, reason = 0, ""
        # Storage may work by now; if not, this code runs again soon.
        with contextlib.suppress(OSError, TooMuch):
            history = await answered(lambda: read_history(self._paths))
            stuck = history.stuck
            reason = history.no_progress(f"verl-slurm logs {shell_word(self._paths.root)}")
        self._post(inputs.BackoffOver(stuck, reason))
