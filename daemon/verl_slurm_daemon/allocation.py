"""What a lead runs in: a Slurm job, or (without Slurm) this machine. One contract, two kinds.

Obligations of an `Allocation`: every method is bounded in time and never raises for a scheduler that does not
answer: it says so in its result, because a lead must go on saving while slurmctld is away.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal, Protocol

import msgspec
import psutil

from verl_slurm.config.schema import RunConfig
from verl_slurm.errors import NotFound, SlurmMissing, VerlSlurmError
from verl_slurm.events import read_events
from verl_slurm.exit_codes import ExitCode
from verl_slurm.fence import Epoch
from verl_slurm.paths import RunPaths
from verl_slurm.process_birth import birth_of
from verl_slurm.slurm.cause import Trigger, decide_cause
from verl_slurm.slurm.client import SlurmClient
from verl_slurm.slurm.commands import NODE_LIST
from verl_slurm.slurm.environment import SlurmJob
from verl_slurm.slurm.parse import JobFacts
from verl_slurm_daemon.events import CauseKnown, RequeueAnswered
from verl_slurm_daemon.launcher import step_argv
from verl_slurm_daemon.slurm_clock import SlurmClock
from verl_slurm_daemon.successor import predecessor, queue_successor

__all__ = [
    "Allocation",
    "HostfileAllocation",
    "LocalAllocation",
    "Outlook",
    "SlurmAllocation",
    "find_allocation",
]


_ASK_AGAIN_S = (2.0, 5.0, 10.0)
# A job that is COMPLETING is gone after KillWait (30 s by default), and a little.
_LEAVING_S = (0.2, 0.3, 0.5) + (1.0,) * 60
_TRIGGERS: dict[str, Trigger] = {
    "SIGUSR1": "warning",
    "SIGUSR2": "warning",
    "TIMER": "warning",
    "SIGTERM": "term",
    "SIGINT": "term",
}
"""SIGCONT is left out: it also follows every `scontrol resume`, and is then no reason to save."""


class Outlook(msgspec.Struct, frozen=True):
    """What the scheduler says of the allocation's future."""

    answered: bool
    seconds_left: float | None = None
    """Until the allocation's end; None: no limit."""
    preempted: bool = False
    """A preemption has begun; its warning may have come before anybody listened."""


class Allocation(Protocol):
    """See the module. Called by: `lead`, `effects`."""

    cluster: Literal["slurm", "local"]
    job_id: str
    restart: int

    async def address(self) -> str:
        """Where the agents reach this process."""

    async def cause(self, trigger: str) -> CauseKnown:
        """Why `trigger` happened."""

    async def outlook(self) -> Outlook:
        """How long the allocation lasts, as the scheduler has it now."""

    async def requeue(self) -> RequeueAnswered | str:
        """Ask for another life of this run. A text: no answer that counts; ask again while there is time."""

    async def cancelled_before(self) -> str:
        """Why this job must not go on with the run: its user has ended the one it follows. Empty: it may."""

    async def avoid(self, nodes: Sequence[str]) -> str:
        """Keep the next life of this run away from these nodes, and from no others of ours; what came of it."""

    async def still_alive(self, owner: Epoch) -> str:
        """Why `owner`, another incarnation, may still be at work; empty: it is not."""

    async def start_step(self, argv: list[str]) -> list[asyncio.subprocess.Process]:
        """Start `argv` on every node; the step is over when all these processes are."""

    def keep_step(self, step: list[asyncio.subprocess.Process]) -> None:
        """The step has started: see to it that its agents outlive this node's processes, however those die."""


class SlurmAllocation:
    """The job that this process is the batch process of."""

    cluster: Literal["slurm", "local"] = "slurm"

    def __init__(self, job: SlurmJob, config: RunConfig, paths: RunPaths) -> None:
        self.job_id, self.restart = str(job.job_id), job.restart_count
        self._job, self._config, self._paths = job, config, paths
        self._client = SlurmClient()
        self._clock = SlurmClock()
        self._kill_wait_s = 30.0  # Slurm's default, until it has said otherwise

    async def address(self) -> str:
        with contextlib.suppress(VerlSlurmError, ValueError):
            conf, date = await self._client.config_and_time()
            self._clock.hear(date)
            self._kill_wait_s = float(conf["KillWait"].split()[0])
        # Slurm's own address of this node: names of virtual or multi-homed nodes need not resolve.
        return await self._client.node_addr(self._job.node_name)

    async def cause(self, trigger: str) -> CauseKnown:
        try:
            facts = await self._client.job(self._job.job_id)
        except VerlSlurmError as error:
            return CauseKnown("unknown", f"{trigger}; Slurm did not say: {error}", None)
        cause = decide_cause(
            _TRIGGERS.get(trigger.split(" ", 1)[0], "poll"),
            facts,
            own_restarts=self.restart,
            signal_lead_s=self._config.slurm.signal_lead_s,
            now=self._clock.now(),
            lost_nodes=await self._lost_nodes(facts),
        )
        left = None if cause.deadline is None else (cause.deadline - self._clock.now()).total_seconds()
        if left is None and cause.ends_job:
            left = self._kill_wait_s  # it is being ended now: TERM has come, KILL follows
        return CauseKnown(cause.kind, f"{trigger}; {cause.evidence}", left)

    async def _lost_nodes(self, facts: JobFacts) -> tuple[str, ...]:
        """Why the job was requeued. Asked only then: of a large job this is a large answer."""
        if facts.restarts <= self.restart:
            return ()
        try:
            return await self._client.lost_nodes(self._job.node_list)
        except VerlSlurmError:
            return ()

    async def outlook(self) -> Outlook:
        try:
            facts = await self._client.job(self._job.job_id)
        except VerlSlurmError:
            return Outlook(answered=False)
        left = (facts.end_time - self._clock.now()).total_seconds() if facts.end_time else None
        return Outlook(True, left, facts.preempt_time is not None)

    async def requeue(self) -> RequeueAnswered | str:
        try:
            outcome = await self._client.requeue(
                self._job.job_id, self._config.daemon.requeue_delay_s, own_restarts=self.restart
            )
        except VerlSlurmError as error:
            return str(error)
        said = f"{outcome.kind}: {outcome.detail}"
        if outcome.kind == "unconfirmed":
            return said
        if outcome.kind == "cancelled":
            return RequeueAnswered(ExitCode.CANCELLED, said)
        alone = self._job.array_job_id is None and self._job.het_size == 1
        if outcome.kind == "forbidden" and self._config.slurm.successor and alone:
            return await self._follow(said)
        code = ExitCode.REQUEUED if outcome.will_run_again else ExitCode.REQUEUE_FAILED
        return RequeueAnswered(code, said)

    async def _follow(self, why: str) -> RequeueAnswered | str:
        try:
            number = await queue_successor(self._paths, self._config, self.job_id)
        except SlurmMissing as error:
            return f"{why}; {error}"
        except (VerlSlurmError, OSError) as error:
            return RequeueAnswered(ExitCode.REQUEUE_FAILED, f"{why}; {error}")
        return RequeueAnswered(ExitCode.REQUEUED, f"job {number} follows this one: {why}")

    async def cancelled_before(self) -> str:
        former = predecessor(read_events(self._paths), self.job_id)
        if not former.isdigit():
            return ""
        try:
            state = (await self._client.job(int(former))).state
        except VerlSlurmError:
            return ""  # forgotten, or no answer: then the journal's word counts, and it says to go on
        return f"job {former}, which this one follows, is {state}" if state.startswith("CANCELLED") else ""

    async def avoid(self, nodes: Sequence[str]) -> str:
        own = str(self._config.slurm.extra.get("exclude") or "")
        if own and NODE_LIST.fullmatch(own) is None:
            return (
                f"nothing is avoided: slurm.extra.exclude is {own}, which is no list of nodes"
                if nodes
                else ""
            )
        try:
            facts = await self._client.job(self._job.job_id)
            if not nodes and (facts.excluded or "") == own:
                return ""
            if nodes and not await self._can_spare(nodes, own, facts.partition.split(",")[0]):
                return f"nothing is avoided: partition {facts.partition} has too few other nodes like that"
            wanted = ",".join(([own] if own else []) + list(nodes))
            await self._client.exclude(self._job.job_id, wanted)
        except VerlSlurmError as error:
            return f"nothing is avoided: {error}"
        return f"the next start avoids {wanted}" if wanted else "the next start avoids no node any more"

    async def _can_spare(self, nodes: Sequence[str], own: str, partition: str) -> bool:
        """Whether the run has enough nodes without these. Nobody takes the exclusion back while the job waits, so only
        nodes count that are up and of the same kind: what a constraint or a GPU asks for, the others may not have."""
        usable = await self._client.usable_nodes(partition)
        bad = {*nodes, *(await self._client.expand(own) if own else ())}
        kinds = {usable.get(node) for node in nodes}
        if kinds == {None}:  # down already: Slurm keeps off them by itself
            return False
        left = sum(1 for node, kind in usable.items() if node not in bad and kind in kinds)
        return left >= self._config.distributed.nodes

    async def is_running(self) -> bool:
        """Whether Slurm has the job as running. Raises as `SlurmClient.job`. Called by: `orphan`."""
        return (await self._client.job(self._job.job_id)).is_running

    async def still_alive(self, owner: Epoch) -> str:
        if owner.cluster != self.cluster or owner.job_id == self.job_id:
            return ""  # our own former life; what may still run of it is fenced out by the epoch
        silent, leaving = iter(_ASK_AGAIN_S), iter(_LEAVING_S)
        while True:
            try:
                facts = await self._client.job(int(owner.job_id))
            except NotFound:
                return ""  # Slurm has forgotten the job: it ended long ago
            except VerlSlurmError:
                pause = next(silent, None)
                if pause is None:
                    return ""  # nobody can say; the epoch keeps the two apart
            else:
                if facts.is_over:
                    return ""
                # A job that was cancelled a moment ago: on the nodes that it has left, we started already.
                pause = next(leaving, None) if facts.state == "COMPLETING" else None
                if pause is None:
                    return f"job {owner.job_id} is {facts.state}"
            await asyncio.sleep(pause)

    async def start_step(self, argv: list[str]) -> list[asyncio.subprocess.Process]:
        step = step_argv("srun", self._config, argv, het_size=self._job.het_size)
        return [await asyncio.create_subprocess_exec(*step, stdin=asyncio.subprocess.DEVNULL)]

    def keep_step(self, step: list[asyncio.subprocess.Process]) -> None:
        # srun forks a shepherd, which has Slurm KILL the whole step, on all nodes, once srun has died without a word
        # (_shepherd_spawn in Slurm's srun_job.c). Where somebody kills all that runs here, srun a moment before its
        # shepherd, that ends the other nodes' agents before any of them can ask for the requeue. Without it srun says
        # "write(shepherd): Broken pipe" at the step's end, and nothing else: agents end by themselves.
        for process in step:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(process.pid).children(recursive=True):
                    parent = child.parent()
                    if child.name() == "srun" and parent is not None and parent.name() == "srun":
                        child.kill()


class LocalAllocation:
    """No Slurm: the "nodes" are agents on this machine, and a requeue is a new life of this very process.

    Signals stand for Slurm's events, so that the same path can be tried on a laptop: SIGUSR2 is a preemption with
    `PREEMPTION_GRACE_S` to live, SIGTERM and SIGINT are the user's cancel, SIGUSR1 asks for a save.
    """

    PREEMPTION_GRACE_S = 30.0
    CANCEL_GRACE_S = 10.0
    cluster: Literal["slurm", "local"] = "local"

    def __init__(self, config: RunConfig, paths: RunPaths) -> None:
        self.job_id = os.environ.get("SUBMITIT_LOCAL_JOB_ID") or f"local-{os.getpid()}"
        self.restart = int(os.environ.get("VERL_SLURM_LOCAL_RESTART") or 0)
        self._config, self._paths = config, paths

    async def address(self) -> str:
        return "127.0.0.1"

    async def cause(self, trigger: str) -> CauseKnown:
        signal = trigger.split(" ", 1)[0]
        if signal == "SIGUSR2":
            return CauseKnown("preemption", f"{trigger}; no Slurm", self.PREEMPTION_GRACE_S)
        if signal in ("SIGTERM", "SIGINT"):
            return CauseKnown("cancel", f"{trigger}; no Slurm", self.CANCEL_GRACE_S)
        if signal == "SIGUSR1":
            return CauseKnown("operator", f"{trigger}; no Slurm", None)
        return CauseKnown("unknown", f"{trigger}; no Slurm", None)

    async def outlook(self) -> Outlook:
        return Outlook(answered=True)

    async def requeue(self) -> RequeueAnswered | str:
        return RequeueAnswered(
            ExitCode.REQUEUED, "no Slurm: the next incarnation starts in place of this one"
        )

    async def cancelled_before(self) -> str:
        return ""

    async def avoid(self, nodes: Sequence[str]) -> str:
        return ""  # there are no others

    async def still_alive(self, owner: Epoch) -> str:
        if owner.host != socket.gethostname() or owner.pid == os.getpid():
            return ""
        if owner.born:
            same = birth_of(owner.pid) == owner.born
            return f"process {owner.pid} of job {owner.job_id} lives" if same else ""
        try:  # taken by a version that did not note its birth
            process = psutil.Process(owner.pid)
            started = datetime.fromtimestamp(process.create_time(), UTC)
        except psutil.NoSuchProcess:
            return ""
        # A process that is younger than the claim only has the same number.
        same = started <= datetime.fromisoformat(owner.taken) + timedelta(seconds=1)
        return f"process {owner.pid} of job {owner.job_id} lives" if same else ""

    async def start_step(self, argv: list[str]) -> list[asyncio.subprocess.Process]:
        nodes = range(self._config.distributed.nodes)
        return [await self._start(argv, node, f"local{node}") for node in nodes]

    def keep_step(self, step: list[asyncio.subprocess.Process]) -> None:
        """Nothing to do: there is no requeue to ask for."""

    async def _start(self, argv: list[str], node: int, name: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, "SLURM_NODEID": str(node), "SLURMD_NODENAME": name},
            start_new_session=True,
        )


class HostfileAllocation(LocalAllocation):
    """Several machines without Slurm: as `LocalAllocation`, but the other hosts' agents come by themselves."""

    def __init__(self, config: RunConfig, paths: RunPaths, host: str) -> None:
        super().__init__(config, paths)
        self._host = host

    async def address(self) -> str:
        return self._host

    async def start_step(self, argv: list[str]) -> list[asyncio.subprocess.Process]:
        return [await self._start(argv, 0, self._host)]


def find_allocation(config: RunConfig, paths: RunPaths, host: str | None = None) -> Allocation:
    """The Slurm job of this process, the hosts that `host` leads, or this machine."""
    if host is not None:
        return HostfileAllocation(config, paths, host)
    job = SlurmJob.from_environ(dict(os.environ))
    return LocalAllocation(config, paths) if job is None else SlurmAllocation(job, config, paths)
