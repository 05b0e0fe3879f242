"""Steps that an agent takes before it leaves: find out whether its lead lives, and if not, ask Slurm for a requeue.

The lead is the batch process. If it is killed, Slurm ends the job as FAILED and never requeues it. The agents
of the other nodes then have KillWait seconds, enough for one request. The first agent asks first; a later one
finds the job requeued and leaves. A job that its user cancelled is left alone. `leaving.py` decides, and says
from which facts.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.events import Orphaned
from verl_slurm.journal.files import read_history
from verl_slurm.slurm.slurm_environment import SlurmJob
from verl_slurm.wire.lead_file import LeadAddress
from verl_slurm_daemon.agent.agent_log import AgentLog
from verl_slurm_daemon.allocation.slurm_job import SlurmAllocation
from verl_slurm_daemon.decide.inputs import RequeueAnswered
from verl_slurm_daemon.decide.leaving import AgentKnowledge, LeavingStep, decide
from verl_slurm_daemon.journal import Journal
from verl_slurm_daemon.link.channel import connect

_TURN_S = 1.5
"""Between the agents' turns: longer than one request to an idle slurmctld (20 to 60 ms)."""
_LOOKS_S = (0.5,) * 20
_LATER_S = 5.0
"""Pauses between looks: Slurm knows of a batch process's death within a second (seen: 0.2 s)."""
_ASKS = 20
# For reading the journal: storage that hangs must not hold up the rest.
_READ_S = 3.0

# For a handshake, which takes a millisecond: a node that is gone does not answer, and KillWait runs.
_PROBE_S = 2.0

T = TypeVar("T")


class Senses(Protocol):
    """The questions and requests that an agent has in its last seconds. Each may raise; its answer is then unknown."""

    async def lead_ended(self) -> bool:
        """Returns whether the journal has the end of this attempt."""

    async def lead_answers(self) -> bool:
        """Returns whether this attempt's lead answers a new connection."""

    async def job_runs(self) -> bool | None:
        """Returns whether Slurm has the job as running; None: it does not say."""

    async def requeue(self) -> RequeueAnswered | str:
        """Asks for another attempt of the job. Returns a text if no answer counts."""

    def tell(self, accepted: bool, detail: str) -> None:
        """Records the request for a requeue and its result."""


class SlurmSenses:
    """`Senses` that ask the journal, the lead and Slurm. `address`: of the lead; None: it was never known."""

    def __init__(
        self,
        job: SlurmJob,
        config: RunConfig,
        paths: RunPaths,
        *,
        attempt: int,
        node_id: int,
        address: LeadAddress | None,
    ) -> None:
        self._paths, self._attempt, self._node_id, self._address = paths, attempt, node_id, address
        self._job_id = str(job.job_id)
        self._allocation = SlurmAllocation(job, config, paths, leaves_at_once=True)

    async def lead_ended(self) -> bool:
        async with asyncio.timeout(_READ_S):
            # In a thread, because storage that hangs would stop the loop and with it the limit above.
            history = await asyncio.to_thread(read_history, self._paths)
        return self._attempt in history.ended_attempts

    async def lead_answers(self) -> bool:
        if self._address is None:
            return False
        address = self._address
        try:
            async with asyncio.timeout(_PROBE_S):
                # A whole handshake, not just a TCP connection: another process may have taken the port meanwhile.
                link = await connect(address.host, address.port, bytes.fromhex(address.token), self._attempt)
        # Whatever the reason, this lead does not answer; Slurm and time decide what that means.
        except (OSError, TimeoutError, asyncio.IncompleteReadError, VerlSlurmError):
            return False
        # Without an AgentReady the link names no node, so the lead does not count its end as a lost agent.
        await link.close()
        return True

    async def job_runs(self) -> bool | None:
        return await self._allocation.is_running()

    async def requeue(self) -> RequeueAnswered | str:
        return await self._allocation.requeue()

    def tell(self, accepted: bool, detail: str) -> None:
        journal = Journal(self._paths, attempt=self._attempt, job_id=self._job_id)
        journal.write(Orphaned(self._node_id, accepted, detail))


def slurm_job(environ: dict[str, str], log: AgentLog) -> SlurmJob | None:
    """Returns the job that this agent is in; None also if the environment cannot be understood."""
    try:
        return SlurmJob.from_environ(environ)
    except VerlSlurmError as error:
        log.say("no_job", loud=True, error=str(error))
        return None


async def see_off(
    known: AgentKnowledge,
    senses: Senses | None,
    node_id: int,
    log: AgentLog,
    *,
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> LeavingStep:
    """Stays until this agent may leave, and does what has to be done first.

    Args:
        senses: None outside Slurm.
        node_id: agents ask Slurm in the order of this number.
    """
    # ---- look until the facts decide
    began, looks, seen = clock(), 0, ""
    verdict = decide(known)
    while verdict.do == "look" and senses is not None:
        # The lead is asked first: if it lives, a thousand agents must not ask Slurm all at once.
        ended, answers, runs = await asyncio.gather(
            # The journal can confirm a Shutdown; without one there is nothing to confirm.
            _ask(senses.lead_ended, None, log) if known.released else _said(False),
            _ask(senses.lead_answers, False, log),
            _ask(senses.job_runs, None, log) if looks else _said(None),
        )
        # Changes alone: ten minutes are some 140 looks, and the log has 500 lines.
        if seen != (seen := f"ended={ended} answers={answers} runs={runs}"):
            log.say("look", lead_ended=ended, lead_answers=answers, job_runs=runs)
        # Each look replaces all facts of the one before: what could not be asked is unknown again.
        known = msgspec.structs.replace(
            known,
            looked=True,
            lead_ended=ended,
            lead_answers=answers,
            job_runs=runs,
            waited_s=clock() - began,
        )
        if (verdict := decide(known)).do != "look":
            break
        if looks == 0:
            log.say("alone", reason=verdict.reason)
            await sleep(_TURN_S * node_id)  # turns in a row; nothing is waited for
        else:
            # Slurm has no event to wait for.
            await sleep(_LOOKS_S[looks] if looks < len(_LOOKS_S) else _LATER_S)
        looks += 1
    # ---- ask for the requeue, in the KillWait that Slurm leaves after the batch process's death
    if verdict.do == "ask" and senses is not None:
        log.say("asking", reason=verdict.reason)
        answer = await ask_until_answered(senses, sleep=sleep)
        accepted = not isinstance(answer, str) and answer.exit_code is ExitCode.REQUEUED
        detail = answer if isinstance(answer, str) else answer.detail
        log.say("orphaned", accepted=accepted, detail=detail, loud=not accepted)
        # After the request: the journal may be on storage that hangs, and that must not come before the requeue.
        senses.tell(accepted, detail)
    return verdict


async def _ask(question: Callable[[], Awaitable[T]], unknown: T, log: AgentLog) -> T:
    """Returns the answer, or `unknown` after any error."""
    try:
        return await question()
    # An error in asking must not end this agent, which may be the last one to ask.
    except Exception as error:  # noqa: BLE001 - see above
        log.say("no_answer", error=f"{type(error).__name__}: {error}")
        return unknown


async def _said(answer: T) -> T:
    return answer


async def ask_until_answered(
    senses: Senses, *, sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep
) -> RequeueAnswered | str:
    """Asks for the requeue, and again each half second, 20 times at most, until an answer counts."""
    answer: RequeueAnswered | str = "not asked"
    for number in range(1 + _ASKS):
        if number:
            await sleep(_LOOKS_S[0])
        try:
            # Slurm has just sent TERM to all processes of the step, and a request that runs at that moment
            # dies of it.
            answer = await senses.requeue()
        except Exception as error:  # noqa: BLE001 - no other process is left to ask
            answer = f"{type(error).__name__}: {error}"
        # A text is no answer: the request may have been killed by the TERM to the step, or timed out on its way. Asking
        # twice is safe: a request that arrived shows as "already requeued" (`requeue_rules.refuse_requeue`).
        # A refusal is repeated as well: Slurm refuses a job in transition in the same way as one that may not
        # be requeued.
        if not isinstance(answer, str) and answer.exit_code is not ExitCode.REQUEUE_FAILED:
            break
    return answer
