"""The `Allocation` of a lead that is the batch process of a Slurm job.

Slurm gives the ends of jobs by its own clock; a node's clock may be minutes off, or be set. `SlurmClock` estimates
slurmctld's time. Slurm is asked once, at the start. From then on the machine's steady clock counts, which also runs
while a virtual machine sleeps. Slurm gives whole seconds, so nodes that agree with it that closely keep their own time.
"""

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal

import psutil

from verl_slurm.base.errors import NotFound, SlurmMissing, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.fence import RunOwner
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.elastic import allowed_nodes
from verl_slurm.config.schema import RunConfig, nodes_of_components
from verl_slurm.containers.runtimes import in_image
from verl_slurm.journal.causes import meaning_of
from verl_slurm.journal.events import StartOverruled
from verl_slurm.journal.files import read_events, read_history
from verl_slurm.journal.history import History, cancelled_task
from verl_slurm.runs.liveness import may_be_of
from verl_slurm.slurm.cause import WARNING_SLACK_S, Trigger, decide_cause
from verl_slurm.slurm.facts import JobFacts
from verl_slurm.slurm.requeue_rules import lasting_exit, sparable
from verl_slurm.slurm.slurm_client import SlurmClient
from verl_slurm.slurm.slurm_environment import SlurmJob
from verl_slurm_daemon.allocation.contract import Allocation, Avoided, Outlook, StepPlacement
from verl_slurm_daemon.allocation.launcher import choose_places, nodes_of_step, step_argv
from verl_slurm_daemon.allocation.successor import queue_successor
from verl_slurm_daemon.decide.inputs import CauseKnown, RequeueAnswered

_NO_SKEW_S = 2.0


def _today() -> datetime:
    return datetime.now(UTC)


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SlurmClock:
    """Slurm's clock as this machine estimates it. `steady`: seconds of a clock that is never set."""

    def __init__(
        self, today: Callable[[], datetime] = _today, steady: Callable[[], float] = _since_boot
    ) -> None:
        self._today, self._steady = today, steady
        self._date, self._at = today(), steady()

    def hear(self, date: datetime | None) -> float:
        """Takes Slurm's time, given just now. Returns how many seconds this machine is ahead; 0: no matter."""
        self._date, self._at = self._today(), self._steady()
        if date is None or abs(ahead_s := (self._date - date).total_seconds()) <= _NO_SKEW_S:
            return 0.0
        # The fraction of a second was cut off; a deadline that is too early is safer.
        self._date = date + timedelta(seconds=1)
        return ahead_s

    def now(self) -> datetime:
        return self._date + timedelta(seconds=self._steady() - self._at)


_LAST_WORD_S = 3.0
"""Seconds kept free before Slurm's KILL, to record the end and to leave with an exit code."""
_AWAY = ("unable to contact", "no end within")
"""Signs of a slurmctld that is down or hangs: Slurm's own words, and ours (`slurm.runner`)."""
_ASK_AGAIN_S = (2.0, 5.0, 10.0)
_WITHDRAW_S = 10.0
# From KILL to the end of the job: killed processes may take a moment to go.
_LEAVES_S = 3.0
_LEAST_DELAY_S = 2.0
"""From the lead's end to the end of COMPLETING: 0.2 s on an idle cluster without an epilog."""
_MOST_LEAST_DELAY_S = 60.0
"""The same where it was longer before: 2, 8, 32, 60 s."""
# A start so much later than asked for is Slurm's own delay, which is 120 s and more.
_OVERRULED_S = 60.0
ASK_EVERY_S = 1.0
"""Between two questions for the cause of a signal, at least."""
_EPILOG_S = 15.0
"""As `_LEAST_DELAY_S`, on a cluster with an epilog. Slurm does not say how long an epilog takes."""
# A job that is COMPLETING is gone shortly after KillWait (30 s by default).
_LEAVING_S = (0.2, 0.3, 0.5) + (1.0,) * 60
# SIGCONT is left out: it also follows every `scontrol resume`, which is no reason to save.
_TRIGGERS: dict[str, Trigger] = {
    "SIGUSR1": "warning",
    "SIGUSR2": "requeue_wish",
    "TIMER": "warning",
    "SIGTERM": "term",
    "SIGINT": "term",
}


def _limit_s(facts: JobFacts) -> float | None:
    # A preemption moves the end.
    if facts.start_time is None or facts.end_time is None or facts.preempt_time is not None:
        return None
    return (facts.end_time - facts.start_time).total_seconds()


class SlurmAllocation(Allocation):
    """The job whose batch process, or one of whose agents, this process is.

    Args:
        leaves_at_once: the process does nothing after it asked for a requeue (an agent whose lead is dead).
    """

    cluster: Literal["slurm", "local"] = "slurm"
    starts_all_agents = True

    def __init__(
        self, job: SlurmJob, config: RunConfig, paths: RunPaths, *, leaves_at_once: bool = False
    ) -> None:
        self.job_id, self.restart = str(job.job_id), job.restart_count
        self._job, self._config, self._paths = job, config, paths
        self._client = SlurmClient()
        self._clock = SlurmClock()
        self._conf, self._conf_asked = dict[str, str](), False
        self._kill_wait_s = 30.0  # Slurm's default, until slurmctld has given its value
        self._epilog_s = 0.0
        self._heard, self._leaves_at_once = False, leaves_at_once
        self._ends_at, self._last_try = math.inf, math.inf
        self._asked = -math.inf
        self._delay_s = config.daemon.requeue_delay_s
        self._start: datetime | None = None
        self._overruled = 0
        self._address = ""
        self._save_s = 0.0

    async def address(self) -> str:
        if not self._address:
            await self._hear()
            # Slurm's own address of this node: names of virtual or multi-homed nodes need not resolve.
            try:
                self._address = await self._client.node_addr(self._job.node_name)
            except NotFound:  # it runs this process: it is no reason to end the run
                self._address = self._job.node_name
        return self._address

    async def _hear(self) -> None:
        """Asks for Slurm's time, and for how long a job takes to leave its nodes."""
        with contextlib.suppress(VerlSlurmError, ValueError, LookupError):
            self._conf, date = await self._client.config_and_time()
            self._conf_asked = True
            self._clock.hear(date)
            self._heard = date is not None
            # `(null)`: none is configured.
            self._epilog_s = 0.0 if self._conf.get("Epilog", "(null)") == "(null)" else _EPILOG_S
            self._kill_wait_s = float(self._conf["KillWait"].split()[0])

    async def _hear_in_time(self) -> None:
        # Bounded, because TERM may have come.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD_S):
                await self._hear()

    def now(self) -> float:
        return self._clock.now().timestamp()

    async def cause(self, trigger: str) -> CauseKnown:
        # KillWait began before slurmctld answered, so it is counted from the question.
        asked = time.monotonic()
        # Somebody may send signals without end, and slurmctld serves the whole cluster.
        if (wait := self._asked + ASK_EVERY_S - asked) > 0:
            await asyncio.sleep(wait)
        self._asked = time.monotonic()
        try:
            facts = await self._client.job(self._job.job_id)
        except VerlSlurmError as error:
            # A wish is the user's word, and Slurm's is heard before the requeue is asked for.
            wished = _TRIGGERS.get(trigger.split(" ", 1)[0]) == "requeue_wish"
            kind: Literal["operator_requeue", "unknown"] = "operator_requeue" if wished else "unknown"
            return CauseKnown(kind, f"{trigger}; Slurm did not say: {error}", None)
        short_lead_s = self._lead_s(facts)
        cause = decide_cause(
            _TRIGGERS.get(trigger.split(" ", 1)[0], "poll"),
            facts,
            own_restarts=self.restart,
            signal_lead_s=short_lead_s or self._config.slurm.signal_lead_s,
            now=self._clock.now(),
            lost_nodes=await self._lost_nodes(facts),
            # Slurm's own warning comes much too early then: by its time a start would end before its ranks train.
            slack_s=0.0 if short_lead_s else WARNING_SLACK_S,
        )
        left = None if cause.deadline is None else (cause.deadline - self._clock.now()).total_seconds()
        # Slurm does not start a job again that reached its limit: before the KILL this process has to leave with a code
        # that says so.
        if cause.kind == "time_limit" and left is not None:
            self._last_try = time.monotonic() + left + self._kill_wait_s - _LAST_WORD_S
        if left is None and meaning_of(cause.kind).ended_by == "Slurm":
            # The job is being ended: TERM has come, KILL follows. A slow answer of slurmctld uses up part of
            # that time.
            left = max(self._kill_wait_s - (time.monotonic() - asked), 0.0)
            self._ends_at = time.monotonic() + left
        return CauseKnown(cause.kind, f"{trigger}; {cause.evidence}", left)

    async def _lost_nodes(self, facts: JobFacts) -> tuple[str, ...]:
        """Returns the nodes because of which the job was requeued."""
        # Asked in case of a requeue alone: for a large job the answer is large.
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
        return Outlook(True, left, facts.preempt_time is not None, _limit_s(facts), self._lead_s(facts))

    def _lead_s(self, facts: JobFacts) -> float | None:
        """Returns how many seconds before a short time limit a save has to begin; None: as configured."""
        limit_s, lead_s = _limit_s(facts), self._config.slurm.signal_lead_s
        if limit_s is None or limit_s >= 2 * lead_s:
            return None
        # Half of the limit is left for a start and for training; less, if a save of this run has taken
        # longer.
        return min(lead_s, max(limit_s / 2, self._save_s + self._config.daemon.save_margin_s))

    async def requeue(self, delay_s: int | None = None, *, hold: bool = False) -> RequeueAnswered | str:
        self._delay_s = self._config.daemon.requeue_delay_s if delay_s is None else delay_s
        # The start time is by slurmctld's clock; a node's may be minutes off.
        if not self._heard:
            await self._hear_in_time()
        try:
            outcome = await self._client.requeue(
                self._job.job_id,
                self._delay_from_now(left=self._leaves_at_once),
                own_restarts=self.restart,
                now=self._clock.now,
                hold=hold,
            )
        except VerlSlurmError as error:
            return self._unanswered(str(error))
        # Kept for `hasten`, which leaves a time alone that somebody else has chosen.
        self._start = outcome.start_time if outcome.delay_kept else None
        said = f"{outcome.kind}: {outcome.detail}"
        if outcome.kind == "unconfirmed":
            return self._unanswered(said)
        if outcome.kind == "cancelled":
            return RequeueAnswered(ExitCode.CANCELLED, said)
        # A task of an array has its next task; the components of a heterogeneous job are not in the configuration.
        alone = self._job.array_job_id is None and self._job.het_size == 1
        if outcome.kind == "forbidden" and self._config.slurm.successor and alone:
            return await self._follow(outcome.detail, hold)
        if not outcome.will_run_again:
            said = f"{said}; `verl-slurm submit {shell_word(self._paths.root)}` goes on"
        code = ExitCode.REQUEUED if outcome.will_run_again else ExitCode.REQUEUE_FAILED
        return RequeueAnswered(code, said)

    def _delay_from_now(self, *, left: bool) -> int:
        """Returns the seconds until the next start. `left`: all processes here are about to end."""
        # Slurm ignores a start time that has passed by the end of COMPLETING, and waits its own 120 s (22.05.8).
        ends_s = 0.0 if left else self._kill_wait_s + _LEAVES_S
        # Where that happened before, COMPLETING takes longer than expected.
        leaves_s = min(_LEAST_DELAY_S * 4.0**self._overruled, _MOST_LEAST_DELAY_S)
        least_s = ends_s + max(leaves_s, self._epilog_s)
        return max(self._delay_s, math.ceil(least_s))

    async def learn(self, history: History) -> StartOverruled | None:
        self._overruled = history.counts["start_overruled"]
        self._save_s = max((save.event.seconds or 0.0 for save in history.all_saves[-3:]), default=0.0)
        if history.end is None or not history.end.next_start:
            return None
        # Since then the batch script has asked for another start, as where storage did not answer.
        before, now = ([0, 0] + [one.event.requeues for one in history.attempts])[-2:]
        if now - before > 1:
            return None
        wanted = datetime.fromisoformat(history.end.next_start)
        try:
            eligible = (await self._client.job(self._job.job_id)).eligible_time
        except VerlSlurmError:
            return None
        # Slurm's own delay is 120 s and more. A job that merely waits for nodes keeps the time that was asked for.
        if eligible is None or (eligible - wanted).total_seconds() < _OVERRULED_S:
            return None
        self._overruled += 1
        return StartOverruled(wanted.isoformat(), eligible.isoformat())

    async def hasten(self, clean: bool) -> datetime | None:
        with contextlib.suppress(VerlSlurmError, TimeoutError):
            async with asyncio.timeout(_LAST_WORD_S):
                facts = await self._client.job(self._job.job_id)
                # A job that an operator held by requeuehold stays held: the operator wants to look first.
                held = "held" in (facts.reason or "").lower()
                if facts.state != "COMPLETING" or facts.restarts <= self.restart or held:
                    return None
                # Requeued by Slurm after a lost node, it may start as soon as it has left its nodes, before all others.
                # With a start time it lets a job pass that waits already (26.05.5). Slurm refuses one from the job's
                # user, but not from an operator, nor from its own user, as on an embedded cluster.
                if facts.expedited and self._start is None:
                    return None
                eligible = facts.eligible_time
                if eligible is not None and eligible > self._clock.now() and eligible != self._start:
                    return None  # somebody chose another time
                return await self._client.set_start(facts, self._delay_from_now(left=clean), self._clock.now)
        return None

    def _unanswered(self, said: str) -> RequeueAnswered | str:
        """Returns a text if the request should be repeated while it can still matter."""
        # slurmctld enforces the limit: while it is away, the job is not ended. Once it is back it ends the job with
        # TERM and KillWait, and the request gets through in that time.
        if any(words in said.lower() for words in _AWAY):
            still = time.monotonic() + self._kill_wait_s - _LAST_WORD_S
            self._last_try = max(self._last_try, still)
        # Infinite but for a time limit: Slurm itself requeues a job that is preempted or whose node is lost.
        return said if time.monotonic() < self._last_try else RequeueAnswered(ExitCode.REQUEUE_FAILED, said)

    async def _follow(self, why: str, hold: bool) -> RequeueAnswered | str:
        try:
            number = await queue_successor(self._paths, self._config, self.job_id, hold=hold)
        # sbatch may have queued it all the same: asked again, `queue_successor` finds it by its script.
        except SlurmMissing as error:
            return self._unanswered(f"{why}; {error}")
        except (VerlSlurmError, OSError) as error:
            return RequeueAnswered(ExitCode.REQUEUE_FAILED, f"{why}; {error}")
        held = f"; it is held until somebody says: scontrol release {number}" if hold else ""
        said = f"job {number} is queued and follows this one: {why}{held}"
        return RequeueAnswered(ExitCode.REQUEUED, said)

    async def exit_code(self, code: ExitCode) -> int:
        if not self._conf_asked:  # a start that was refused has not asked yet
            self._conf_asked = True
            await self._hear_in_time()
        return lasting_exit(int(code), self._conf)

    async def withdraw(self) -> str:
        if self._ends_at < math.inf:
            return ""  # Slurm already ends it and accepts no such change (22.05.8)
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
        own_life = facts.restarts == self.restart  # the running attempt may already be the next one
        if not (facts.requeue and facts.is_running and own_life):
            return ""
        if refused := await self._client.forbid_requeue(facts):
            raise SlurmMissing("Slurm did not take Requeue=0", found=refused)
        return "Requeue=0 is set: Slurm does not start this job again"

    async def cancelled_before(self) -> str:
        events, array = await asyncio.to_thread(read_events, self._paths), self._job.array_job_id
        history = History(events)
        former = cancelled_task(events, self.job_id) if array else history.predecessor_of(self.job_id)
        if not former.isdigit():
            return ""
        try:
            facts = await self._client.job(int(former))
        except NotFound:
            # Slurm forgot the job (a chain may wait for hours): then the journal decides.
            if array is not None and history.cancelled_in_array(former, str(array)):
                return f"job {former}, which this one follows, was cancelled"
            return ""
        if array is not None and not (facts.array_task or "").startswith(f"{array}_"):
            return ""  # of an earlier chain
        ended = facts.state.startswith("CANCELLED")
        return f"job {former}, which this one follows, is {facts.state}" if ended else ""

    async def avoid(self, nodes: Sequence[str], before: Collection[str]) -> Avoided:
        try:
            facts = await self._client.job(self._job.job_id)
            present = await self._client.expand(facts.excluded) if facts.excluded else []
            # ExcNodeList is replaced as a whole, and also has what the user and operators exclude.
            own = [node for node in present if node not in before]
            asked = set(await self._client.expand(facts.required)) if nodes and facts.required else set()
            spared: tuple[str, ...] = ()
            usable: dict[str, str] = {}
            if set(nodes) - asked:
                usable = await self._client.usable_nodes(facts.partition.split(",")[0], facts.reservation)
                spared = sparable(nodes, usable, own, self._config.all_nodes, asked)
            wanted = [*own, *spared]
            # One that is drained, or gone from Slurm, starts no job: there is nothing to say.
            back = [node for node in nodes if node not in spared and (node in usable or node in asked)]
            # Where none can be spared, an earlier exclusion goes as well.
            if set(wanted) == set(present) and not back and not spared:
                return Avoided("", spared)
            if set(wanted) != set(present):
                await self._client.exclude(facts, ",".join(wanted))
        except VerlSlurmError as error:
            return Avoided(f"nothing is avoided: {error}", tuple(before))
        place = f"reservation {facts.reservation}" if facts.reservation else f"partition {facts.partition}"
        why = f"{place} has too few other nodes like that"
        if named := [node for node in back if node in asked]:
            # Of the others, if there are any, the same is told as without these.
            few = f"; {why}" if set(back) - asked else ""
            why = f"the job asks for {', '.join(named)}{few}"
        if back and not spared:
            return Avoided(f"nothing is avoided: {why}")
        said = "the next start avoids no node any more"
        if wanted:
            said = f"the next start avoids {', '.join(wanted)}"
        return Avoided(f"{said}; it may have {', '.join(back)}: {why}" if back else said, spared)

    async def is_running(self) -> bool:
        """Returns whether Slurm has the job as running, with its batch process. Raises as `SlurmClient.job`."""
        facts = await self._client.job(self._job.job_id)
        # With --no-kill Slurm takes even the first node from the job, which then runs without its batch process
        # until its limit (22.05).
        if facts.is_running and facts.batch_host and self._config.may_lose_nodes:
            return facts.batch_host in await self._client.expand(facts.node_list or self._job.node_list)
        return facts.is_running

    def lacks(self) -> str:
        has, job = self._job.num_nodes, self._job.label
        least = sum(nodes_of_components(self._config.least_nodes, self._config.services))
        if has >= least:
            return ""
        return (
            f"the job has {has} of the {least} nodes that the run needs at least: "
            f"scontrol update JobId={job} NumNodes={least}, then scontrol release {job}"
        )

    async def still_alive(self, owner: RunOwner) -> str:
        if owner.cluster != self.cluster:
            return ""
        is_elsewhere = bool(owner.slurm) and self._job.cluster not in (None, owner.slurm)
        # A job that was requeued may have begun before the cluster was renamed.
        if owner.job_id == self.job_id and (self.restart or not is_elsewhere):
            return ""  # our own former attempt; the attempt fences off what may still run of it
        if is_elsewhere:
            return await self._lives_elsewhere(owner)
        silent, leaving = iter(_ASK_AGAIN_S), iter(_LEAVING_S)
        while True:
            try:
                facts = await self._client.job(int(owner.job_id))
            except NotFound:
                return ""  # Slurm has forgotten the job: it ended long ago
            except VerlSlurmError:
                pause = next(silent, None)
                if pause is None:  # not taken for an end: the other one would have to leave
                    raise
            else:
                history = await asyncio.to_thread(read_history, self._paths)
                by_us = history.was_queued(owner.job_id)
                last = history.last_of_job.get(owner.job_id)
                heard_at = None if last is None else last.at
                if facts.is_over or not may_be_of(
                    self._paths.root, facts, queued_by_us=by_us, heard_at=heard_at
                ):
                    return ""
                # The job was cancelled a moment ago, and this one already started on the nodes that it left.
                pause = next(leaving, None) if facts.state == "COMPLETING" else None
                if pause is None:
                    return f"job {owner.job_id} is {facts.state}"
            await asyncio.sleep(pause)

    async def _lives_elsewhere(self, owner: RunOwner) -> str:
        """Returns why the owner, a job of another Slurm cluster, may still work; empty: it does not."""
        # What is being cancelled may still save. A lead that died without a word is not waited for any longer.
        # The journal alone can tell: this cluster's Slurm knows nothing of the job.
        for pause in _LEAVING_S:
            history = await asyncio.to_thread(read_history, self._paths)
            word = history.what_became(owner.attempt)
            if word == "goes on":
                cluster = f"Slurm cluster {owner.slurm} has not ended, and this is {self._job.cluster}"
                return f"job {owner.job_id} of {cluster}"
            if word == "over":
                break
            await asyncio.sleep(pause)
        return ""

    async def places(self, avoid: Collection[str], *, with_spares: bool = False) -> StepPlacement:
        if not self._config.may_lose_nodes:
            return StepPlacement()
        try:
            # Slurm takes nodes that it finds lost from the job.
            facts = await self._client.job(self._job.job_id)
            names = await self._client.expand(facts.node_list or self._job.node_list)
        except VerlSlurmError as error:
            raise OSError(f"the names of the job's nodes: {error}") from error
        return choose_places(names, avoid, allowed_nodes(self._config), with_spares=with_spares)

    async def idle_nodes(self) -> int:
        try:
            facts = await self._client.job(self._job.job_id)
            own = await self._client.expand(facts.node_list or self._job.node_list)
            usable, idle = await self._client.usable_and_idle(facts.partition.split(",")[0])
        except VerlSlurmError:
            return 0
        # Others may lack what a constraint or a GPU request asks for.
        kinds = {usable.get(name) for name in own}
        return sum(usable[name] in kinds for name in idle)

    async def _keep_alone(self, node: str) -> None:
        """Gives back the other nodes, which are lost for this job, if `node` is the batch process's."""
        # A precaution: without it the run goes on all the same.
        # Slurm requeues a job of one node that loses it, whatever `--no-kill` says. A job of more nodes would
        # end as FAILED: no agent runs on the others that could ask for the requeue.
        with contextlib.suppress(VerlSlurmError, OSError):
            facts = await self._client.job(self._job.job_id)
            if facts.batch_host == node and facts.num_nodes > 1:
                await self._client.shrink(facts, node)

    async def start_step(
        self, argv: list[str], service: str = "", names: Sequence[str] = ()
    ) -> list[asyncio.subprocess.Process]:
        nodes = nodes_of_step(self._config, self._job.sizes, service)
        if len(names) == 1 and self._config.may_lose_nodes:
            await self._keep_alone(names[0])
        if not nodes.are_whole and not names:
            try:
                # It parses the names, and asks no slurmctld.
                names = await self._client.expand(self._job.node_list)
            except VerlSlurmError as error:
                raise OSError(f"the names of the job's nodes: {error}") from error
            if nodes.wanted.stop > len(names):
                raise OSError(
                    f"the job has {len(names)} nodes, and its configuration {self._config.all_nodes}"
                )
            names = names[nodes.wanted.start : nodes.wanted.stop]
        step = step_argv(
            "srun",
            self._config,
            argv,
            het_size=self._job.het_size,
            nodes=nodes,
            names=names,
            cpus=self._config.cpus_on_nodes_of(service),
        )
        environ = {**os.environ, **in_image(self._config)}
        return [await asyncio.create_subprocess_exec(*step, stdin=asyncio.subprocess.DEVNULL, env=environ)]

    def keep_step(self, step: list[asyncio.subprocess.Process]) -> None:
        # srun forks a shepherd. It has Slurm KILL the whole step, on all nodes, once srun has died without a
        # word (_shepherd_spawn in Slurm's srun_job.c). If everything here is killed, srun a moment before its
        # shepherd, the other nodes' agents would end before any of them can ask for the requeue. Without a
        # shepherd srun prints "write(shepherd): Broken pipe" at the step's end and does nothing else: agents
        # end by themselves.
        for process in step:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(process.pid).children(recursive=True):
                    parent = child.parent()
                    if child.name() == "srun" and parent is not None and parent.name() == "srun":
                        child.kill()
