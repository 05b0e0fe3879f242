"""What an agent does before it leaves: find out whether its lead lives, and if not, ask Slurm to run the job again.

The lead is the batch process. When somebody kills it, Slurm ends the job as FAILED and never requeues it; the agents
of the other nodes have KillWait seconds, time enough for one request. The first agent asks first; a later one finds
the job requeued and leaves. A job that its user cancelled is left alone. What is decided, and on what: `leaving.py`.
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
from verl_slurm.journal.files import read_events
from verl_slurm.journal.folds.jobs import lead_ended
from verl_slurm.slurm.environment import SlurmJob
from verl_slurm.wire.lead_file import LeadAddress
from verl_slurm_daemon.agent.agent_log import AgentLog
from verl_slurm_daemon.allocation.slurm import SlurmAllocation
from verl_slurm_daemon.decide.inputs import RequeueAnswered
from verl_slurm_daemon.decide.leaving import Known, Verdict, decide
from verl_slurm_daemon.journal import Journal
from verl_slurm_daemon.link.channel import connect

__all__ = ["Senses", "SlurmSenses", "ask_until_answered", "see_off", "slurm_job"]

_TURN_S = 1.5
"""Between the agents' turns: longer than one request to an idle slurmctld (20 to 60 ms)."""
_LOOKS_S = (0.5,) * 20
_LATER_S = 5.0
"""Pauses between looks: Slurm knows of a batch process's death within a second (seen: 0.2 s)."""
_ASKS = 20
_READ_S = 3.0
"""Storage that hangs must not hold up the rest."""

_PROBE_S = 2.0
"""For a handshake, which takes a millisecond: a node that is gone answers nothing, and KillWait runs."""

T = TypeVar("T")


class Senses(Protocol):
    """What an agent can find out, and ask for, in its last seconds. Any of it may raise: then it is not known."""

    async def lead_ended(self) -> bool:
        """Whether the journal has this attempt's end."""

    async def lead_answers(self) -> bool:
        """Whether a new connection is answered by this attempt's lead."""

    async def job_runs(self) -> bool | None:
        """Whether Slurm has the job as running; None: it does not say."""

    async def requeue(self) -> RequeueAnswered | str:
        """Ask for another attempt of the job; a text: no answer that counts."""

    def tell(self, accepted: bool, detail: str) -> None:
        """Write down that it was asked for, and what came of it."""


class SlurmSenses:
    """The real ones.

    Args:
        address: of the lead; None: it was never known.
    """

    def __init__(
        self,
        job: SlurmJob,
        config: RunConfig,
        paths: RunPaths,
        *,
        epoch: int,
        node_id: int,
        address: LeadAddress | None,
    ) -> None:
        self._paths, self._epoch, self._node_id, self._address = paths, epoch, node_id, address
        self._job_id = str(job.job_id)
        self._allocation = SlurmAllocation(job, config, paths, leaves_at_once=True)

    async def lead_ended(self) -> bool:
        async with asyncio.timeout(_READ_S):
            events = await asyncio.to_thread(read_events, self._paths)
        return lead_ended(events, self._epoch)

    async def lead_answers(self) -> bool:
        if self._address is None:
            return False
        address = self._address
        try:
            async with asyncio.timeout(_PROBE_S):
                link = await connect(address.host, address.port, bytes.fromhex(address.token), self._epoch)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, VerlSlurmError):
            return False
        await link.close()
        return True

    async def job_runs(self) -> bool | None:
        return await self._allocation.is_running()

    async def requeue(self) -> RequeueAnswered | str:
        return await self._allocation.requeue()

    def tell(self, accepted: bool, detail: str) -> None:
        journal = Journal(self._paths, epoch=self._epoch, job_id=self._job_id)
        journal.write(Orphaned(self._node_id, accepted, detail))


def slurm_job(environ: dict[str, str], log: AgentLog) -> SlurmJob | None:
    """The job that this agent is in; an environment that nobody understands is as none."""
    try:
        return SlurmJob.from_environ(environ)
    except VerlSlurmError as error:
        log.say("no_job", loud=True, error=str(error))
        return None


async def see_off(
    known: Known,
    senses: Senses | None,
    node_id: int,
    log: AgentLog,
    *,
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Verdict:
    """Stay until this agent may leave, and do what it has to do first.

    Args:
        known: what the agent knows of itself.
        senses: None outside Slurm.
        node_id: agents ask Slurm in its order.
        sleep, clock: for tests.
    """
    began, looks, seen = clock(), 0, ""
    verdict = decide(known)
    while verdict.do == "look" and senses is not None:
        # The lead first and alone: where it lives there is nothing to ask Slurm, of a thousand agents at once.
        ended, answers, runs = await asyncio.gather(
            _ask(senses.lead_ended, None, log) if known.released else _said(False),
            _ask(senses.lead_answers, False, log),
            _ask(senses.job_runs, None, log) if looks else _said(None),
        )
        if seen != (seen := f"ended={ended} answers={answers} runs={runs}"):
            log.say("look", lead_ended=ended, lead_answers=answers, job_runs=runs)
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
            await sleep(_TURN_S * node_id)  # a turn in a row, not a wait for something
        else:
            await sleep(
                _LOOKS_S[looks] if looks < len(_LOOKS_S) else _LATER_S
            )  # Slurm has no event to wait for
        looks += 1
    if verdict.do == "ask" and senses is not None:
        log.say("asking", reason=verdict.reason)
        answer = await ask_until_answered(senses, sleep=sleep)
        accepted = not isinstance(answer, str) and answer.exit_code is ExitCode.REQUEUED
        detail = answer if isinstance(answer, str) else answer.detail
        log.say("orphaned", accepted=accepted, detail=detail, loud=not accepted)
        senses.tell(accepted, detail)
    return verdict


async def _ask(question: Callable[[], Awaitable[T]], unknown: T, log: AgentLog) -> T:
    """The answer, or `unknown`: whatever goes wrong in asking must not end the last one who asks."""
    try:
        return await question()
    except Exception as error:  # noqa: BLE001 - see above
        log.say("no_answer", error=f"{type(error).__name__}: {error}")
        return unknown


async def _said(answer: T) -> T:
    return answer


async def ask_until_answered(
    senses: Senses, *, sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep
) -> RequeueAnswered | str:
    """Ask for the requeue; again where there was no answer that counts, for nobody else is left to ask.

    Slurm has just sent TERM to all processes of the step, and a request that runs at that moment dies of it. A refusal
    is asked again, too: Slurm says it of a job in transition as well as of one that may not be requeued.
    """
    answer: RequeueAnswered | str = "not asked"
    for number in range(1 + _ASKS):
        if number:
            await sleep(_LOOKS_S[0])
        try:
            answer = await senses.requeue()
        except Exception as error:  # noqa: BLE001 - nobody else is left to ask
            answer = f"{type(error).__name__}: {error}"
        if not isinstance(answer, str) and answer.exit_code is not ExitCode.REQUEUE_FAILED:
            break
    return answer
