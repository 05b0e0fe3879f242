"""The Slurm job that a lead is the batch process of: an `Allocation`."""

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Literal

import psutil

from verl_slurm.base.errors import NotFound, SlurmMissing, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.fence import Epoch
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.files import read_events
from verl_slurm.journal.folds.jobs import cancelled_task, ended_cancelled, predecessor_of
from verl_slurm.slurm.cause import Trigger, decide_cause
from verl_slurm.slurm.client import SlurmClient
from verl_slurm.slurm.commands import NODE_LIST
from verl_slurm.slurm.environment import SlurmJob
from verl_slurm.slurm.facts import JobFacts
from verl_slurm_daemon.allocation.contract import Outlook
from verl_slurm_daemon.allocation.launcher import step_argv
from verl_slurm_daemon.allocation.slurm_clock import SlurmClock
from verl_slurm_daemon.allocation.successor import queue_successor
from verl_slurm_daemon.decide.inputs import CauseKnown, RequeueAnswered

__all__ = ["SlurmAllocation"]

_LAST_WORD_S = 3.0
"""Before Slurm's KILL: to write down how it ended, and to leave with an exit code."""
_AWAY = ("unable to contact", "no end within")
"""Of a slurmctld that does not run, or hangs: Slurm's words, and ours (`slurm.runner`)."""
_ASK_AGAIN_S = (2.0, 5.0, 10.0)
_WITHDRAW_S = 10.0
_LEAVES_S = 3.0
"""From KILL to the end of the job: processes that are killed may take a moment to go."""
_LEAST_DELAY_S = 2.0
"""From the lead's end to the end of COMPLETING: 0.2 s on an idle cluster without an epilog."""
_EPILOG_S = 15.0
"""The same where the cluster has an epilog. Slurm does not say how long one takes."""
# A job that is COMPLETING is gone after KillWait (30 s by default), and a little.
_LEAVING_S = (0.2, 0.3, 0.5) + (1.0,) * 60
_TRIGGERS: dict[str, Trigger] = {
    "SIGUSR1": "warning",
    "SIGUSR2": "requeue_wish",
    "TIMER": "warning",
    "SIGTERM": "term",
    "SIGINT": "term",
}
"""SIGCONT is left out: it also follows every `scontrol resume`, and is then no reason to save."""


class SlurmAllocation:
    """The job that this process is the batch process of, or an agent of.

    Args:
        leaves_at_once: who asks for a requeue here does nothing after it (an agent whose lead is dead).
    """

    cluster: Literal["slurm", "local"] = "slurm"

    def __init__(
        self, job: SlurmJob, config: RunConfig, paths: RunPaths, *, leaves_at_once: bool = False
    ) -> None:
        self.job_id, self.restart = str(job.job_id), job.restart_count
        self._job, self._config, self._paths = job, config, paths
        self._client = SlurmClient()
        self._clock = SlurmClock()
        self._kill_wait_s = 30.0  # Slurm's default, until it has said otherwise
        self._epilog_s = 0.0
        self._heard, self._leaves_at_once = False, leaves_at_once
        self._ends_at, self._last_try = math.inf, math.inf
        self._delay_s = config.daemon.requeue_delay_s
        self._start: datetime | None = None

    async def address(self) -> str:
        await self._hear()
        # Slurm's own address of this node: names of virtual or multi-homed nodes need not resolve.
        return await self._client.node_addr(self._job.node_name)

    async def _hear(self) -> None:
        """Slurm's time, and how long it takes a job to leave its nodes."""
        with contextlib.suppress(VerlSlurmError, ValueError, LookupError):
            conf, date = await self._client.config_and_time()
            self._clock.hear(date)
            self._heard = date is not None
            self._epilog_s = 0.0 if conf.get("Epilog", "(null)") == "(null)" else _EPILOG_S
            self._kill_wait_s = float(conf["KillWait"].split()[0])

    async def cause(self, trigger: str) -> CauseKnown:
        asked = time.monotonic()
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
        if cause.kind == "time_limit" and left is not None:
            self._last_try = time.monotonic() + left + self._kill_wait_s - _LAST_WORD_S
        if left is None and cause.ends_job:
            # It is being ended now: TERM has come, KILL follows; a slow slurmctld's answers are part of that time.
            left = max(self._kill_wait_s - (time.monotonic() - asked), 0.0)
            self._ends_at = time.monotonic() + left
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

    async def requeue(self, delay_s: int | None = None) -> RequeueAnswered | str:
        self._delay_s = self._config.daemon.requeue_delay_s if delay_s is None else delay_s
        if not self._heard:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORD_S):
                    await self._hear()
        try:
            outcome = await self._client.requeue(
                self._job.job_id,
                self._delay_from_now(left=self._leaves_at_once),
                own_restarts=self.restart,
                now=self._clock.now,
            )
        except VerlSlurmError as error:
            return self._unanswered(str(error))
        self._start = outcome.start_time if outcome.delay_kept else None
        said = f"{outcome.kind}: {outcome.detail}"
        if outcome.kind == "unconfirmed":
            return self._unanswered(said)
        if outcome.kind == "cancelled":
            return RequeueAnswered(ExitCode.CANCELLED, said)
        alone = self._job.array_job_id is None and self._job.het_size == 1
        if outcome.kind == "forbidden" and self._config.slurm.successor and alone:
            return await self._follow(outcome.detail)
        if not outcome.will_run_again:
            said = f"{said}; `verl-slurm submit {self._paths.root}` goes on"
        code = ExitCode.REQUEUED if outcome.will_run_again else ExitCode.REQUEUE_FAILED
        return RequeueAnswered(code, said)

    def _delay_from_now(self, *, left: bool) -> int:
        """Seconds until the next start, beyond the job's COMPLETING: a start time that is past by its end is worth
        nothing to Slurm, which then waits its own 120 s (22.05.8).

        Args:
            left: all that runs here is about to end. If not, it ends with KillWait at the latest.
        """
        ends_s = 0.0 if left else self._kill_wait_s + _LEAVES_S
        least_s = ends_s + max(_LEAST_DELAY_S, self._epilog_s)
        return max(self._delay_s, math.ceil(least_s))

    async def hasten(self, clean: bool) -> None:
        with contextlib.suppress(VerlSlurmError, TimeoutError):
            async with asyncio.timeout(_LAST_WORD_S):
                facts = await self._client.job(self._job.job_id)
                held = "held" in (facts.reason or "").lower()
                if facts.state != "COMPLETING" or facts.restarts <= self.restart or held:
                    return
                eligible = facts.eligible_time
                if eligible is not None and eligible > self._clock.now() and eligible != self._start:
                    return  # somebody chose another time
                await self._client.set_start(facts, self._delay_from_now(left=clean), self._clock.now)

    def _unanswered(self, said: str) -> RequeueAnswered | str:
        """To be asked again, while it can matter. A job that is preempted, or whose node is lost, is requeued by Slurm
        itself in the end; one that has run into its time limit is not, and then our exit code says why. But the limit
        is slurmctld's to enforce: while that is away nobody ends the job, and once it is back it ends it with TERM and
        KillWait, in which the request gets through."""
        if any(words in said.lower() for words in _AWAY):
            still = time.monotonic() + self._kill_wait_s - _LAST_WORD_S
            self._last_try = max(self._last_try, still)
        return said if time.monotonic() < self._last_try else RequeueAnswered(ExitCode.REQUEUE_FAILED, said)

    async def _follow(self, why: str) -> RequeueAnswered | str:
        try:
            number = await queue_successor(self._paths, self._config, self.job_id)
        except SlurmMissing as error:
            return self._unanswered(f"{why}; {error}")
        except (VerlSlurmError, OSError) as error:
            return RequeueAnswered(ExitCode.REQUEUE_FAILED, f"{why}; {error}")
        return RequeueAnswered(ExitCode.REQUEUED, f"job {number} is queued and follows this one: {why}")

    async def withdraw(self) -> str:
        if self._ends_at < math.inf:
            return ""  # Slurm ends it already, and takes no such change any more (22.05.8)
        said = "no answer"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WITHDRAW_S):
                while True:
                    try:
                        return await self._withdraw()
                    except VerlSlurmError as error:
                        said = str(error)
                    await asyncio.sleep(_ASK_AGAIN_S[0])
        return f"Slurm may start, or hold, the ended job again (scancel {self.job_id}): {said}"

    async def _withdraw(self) -> str:
        facts = await self._client.job(self._job.job_id)
        own_life = facts.restarts == self.restart  # what runs may be the next one already
        if not (facts.requeue and facts.is_running and own_life):
            return ""
        if refused := await self._client.forbid_requeue(facts):
            raise SlurmMissing("Slurm did not take Requeue=0", found=refused)
        return "Requeue=0 is set: Slurm does not start this job again"

    async def cancelled_before(self) -> str:
        events, array = read_events(self._paths), self._job.array_job_id
        former = predecessor_of(events, self.job_id) if array is None else cancelled_task(events, self.job_id)
        if not former.isdigit():
            return ""
        try:
            facts = await self._client.job(int(former))
        except VerlSlurmError:
            # Forgotten (a chain may wait for hours), or no answer: then the journal's word counts.
            if array is not None and ended_cancelled(events, former, array):
                return f"job {former}, which this one follows, was cancelled"
            return ""
        if array is not None and not (facts.array_task or "").startswith(f"{array}_"):
            return ""  # of an earlier chain
        ended = facts.state.startswith("CANCELLED")
        return f"job {former}, which this one follows, is {facts.state}" if ended else ""

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
            await self._client.exclude(facts, wanted)
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
        """Whether Slurm has the job as running. Raises as `SlurmClient.job`."""
        return (await self._client.job(self._job.job_id)).is_running

    async def still_alive(self, owner: Epoch) -> str:
        if owner.cluster != self.cluster or owner.job_id == self.job_id:
            return ""  # our own former attempt; what may still run of it is fenced out by the epoch
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
