"""`verl-slurm cancel` and `requeue`: a user's requests for a run's job."""

import asyncio
import signal
from typing import TYPE_CHECKING

import click
import psutil

from verl_slurm.base.errors import NotFound, SlurmRefused
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.cli.options import RUN, exits, json_option
from verl_slurm.cli.show import render

if TYPE_CHECKING:
    from verl_slurm.journal.folds.jobs import Submission
    from verl_slurm.slurm.facts import JobFacts
    from verl_slurm.slurm.requeue_rules import RequeueOutcome

__all__ = ["ask_for_save", "cancel", "requeue", "way_on"]

_EXITS = exits(ExitCode.NO_SLURM, ExitCode.SLURM_REFUSED, ExitCode.NOT_FOUND)


@click.command(epilog=_EXITS)
@click.argument("run", type=RUN)
@json_option
def cancel(run: RunPaths, as_json: bool) -> int:
    """End the job of RUN for good.

    It is `scancel`: the daemon has Slurm's KillWait to save, and never requeues a job that its user cancelled.
    `verl-slurm submit RUN` starts it again, from the newest checkpoint that verifies.
    """
    from verl_slurm.journal.events import CancelAsked
    from verl_slurm.journal.files import append_event
    from verl_slurm.runs.record import last_job
    from verl_slurm.slurm.client import SlurmClient

    job = last_job(run)
    _require_living(run)
    # Before the journal: a job that is refused here must leave no word of a cancel.
    _require_own(run, job, "scancel {}")
    # Before the signal: the next task of a chain starts by itself, and looks for this line.
    append_event(run, CancelAsked())
    if job.cluster == "slurm":
        asyncio.run(SlurmClient().cancel(int(job.job_id)))
    else:
        # The lead takes it for a cancel, as it takes what scancel sends.
        _signal_local(run, signal.SIGTERM)
    _say(
        as_json, run, job.job_id, "cancelled", f"job {job.job_id} is being cancelled; it will not be requeued"
    )
    return ExitCode.OK


@click.command(epilog=_EXITS)
@click.argument("run", type=RUN)
@click.option(
    "--now", "at_once", is_flag=True, help="Have Slurm do it at once: what saves has only KillWait."
)
@json_option
def requeue(run: RunPaths, at_once: bool, as_json: bool) -> int:
    """Save, end the running job of RUN, and have it start again a few seconds later.

    For instance to leave a node that is to be repaired. The daemon saves with all the time that it needs, reads the
    checkpoint back, and asks Slurm for the requeue itself. With --now it is `scontrol requeue`, for a daemon that does
    not answer: the ranks are ended after Slurm's KillWait, saved or not. A job that is over is started again by
    `verl-slurm submit RUN`.
    """
    from verl_slurm.journal.events import RequeueAsked
    from verl_slurm.journal.files import append_event
    from verl_slurm.runs.record import last_job

    job = last_job(run)
    # `scontrol requeue` starts a job that is over again, one that its user has cancelled as well.
    state = _require_living(run)
    _require_own(run, job, "scontrol requeue {}" if at_once else "scancel --batch --signal=USR2 {}")
    append_event(run, RequeueAsked())
    if job.cluster == "slurm":
        detail = (
            _requeue_now(run, int(job.job_id)) if at_once else _wish_for_requeue(run, int(job.job_id), state)
        )
    else:
        _signal_local(run, signal.SIGUSR2)
        detail = "it saves and starts again in place"
    _say(as_json, run, job.job_id, "requeued", f"job {job.job_id} is being requeued: {detail}")
    return ExitCode.OK


def _wish_for_requeue(run: RunPaths, number: int, state: str) -> str:
    from verl_slurm.slurm.client import SlurmClient

    client = SlurmClient()
    # A job that waits has no daemon that could be asked, and a suspended one would take the signal when it goes on.
    if state != "RUNNING":
        facts = asyncio.run(client.job(number))
        raise _not_requeued(run, facts, f"it is {state}, and only a running job saves")
    # By the lead, since Slurm's own requeue leaves KillWait to save. To the batch process alone: in a step the signal
    # would reach every process, and end those without a handler.
    asyncio.run(client.signal_batch(number, signal.SIGUSR2.name.removeprefix("SIG")))
    return f"its daemon saves first; verl-slurm watch {run.root} shows it"


def _requeue_now(run: RunPaths, number: int) -> str:
    from verl_slurm.config.load import load_resolved
    from verl_slurm.slurm.client import SlurmClient

    client = SlurmClient()
    delay_s = load_resolved(run.run_yaml).daemon.requeue_delay_s

    async def ask() -> "tuple[JobFacts, RequeueOutcome]":
        facts = await client.job(number)
        # Slurm counts one restart more when it has taken the request, whatever became of the answer.
        return facts, await client.requeue(number, delay_s, own_restarts=facts.restarts)

    facts, outcome = asyncio.run(ask())
    if not outcome.will_run_again:
        raise _not_requeued(run, facts, outcome.detail)
    return outcome.detail


def _not_requeued(run: RunPaths, facts: "JobFacts", found: str) -> SlurmRefused:
    other = f"see `verl-slurm status {run.root}`; a job that is over starts with verl-slurm submit"
    return SlurmRefused(
        "the job was not requeued",
        where=facts.job_id,
        found=f"{found}; {facts.reason}" if facts.reason else found,
        remedy=way_on(facts) or other,
    )


def way_on(facts: "JobFacts") -> str:
    """Returns how to continue a job that stands still; empty: nothing of that kind holds it. Pure."""
    # A requeue of a suspended job would leave it held for good (JobHeldAdmin), so it has to go on first.
    if facts.state == "SUSPENDED":
        return f"scontrol resume {facts.target}"
    if "held" in (facts.reason or "").lower():
        return f"scontrol release {facts.target}"
    return ""


def _require_living(run: RunPaths) -> str:
    """Returns the state of the run's job.

    Raises:
        NotFound: it is over.
    """
    from verl_slurm.runs.liveness import job_state
    from verl_slurm.runs.record import last_job

    job = last_job(run)
    state = job_state(run, job)
    if state.over:
        from verl_slurm.journal.events import Ended
        from verl_slurm.runs.glance import glance

        word = glance(run.root).word  # a scheduler forgets its jobs, the journal does not
        came_to = word.outcome if isinstance(word, Ended) and word.is_final else state.state
        more = f"`verl-slurm submit {run.root} train.steps=N` goes on to more steps"
        raise NotFound(
            "the run has no living job",
            where=run.root,
            found=f"job {job.job_id}, {came_to}",
            remedy=more if came_to == "done" else f"`verl-slurm submit {run.root}` starts it again",
        )
    return state.state


def _require_own(run: RunPaths, job: "Submission", by_hand: str) -> None:
    """Refuses a Slurm job that nothing but the run's journal ties to the run. (A local one is recognised by its
    command line.)

    Args:
        by_hand: the command that does the same to the job `{}`.

    Raises:
        SlurmRefused: it is another job.
        NotFound, SlurmMissing: as `SlurmClient.job`.
    """
    from verl_slurm.runs.liveness import runs_here
    from verl_slurm.slurm.client import SlurmClient

    # A local lead is recognised by its own command line, whatever the journal says.
    if job.cluster != "slurm":
        return
    # A run that was handed over brings its own journal, which may name any job of the user's.
    facts = asyncio.run(SlurmClient().job(int(job.job_id)))
    if not runs_here(run.root, facts):
        raise SlurmRefused(
            f"{run.events} names a job of which Slurm does not say that it is this run's",
            where=job.job_id,
            found=f"the command {facts.command} and the output {facts.std_out}",
            expected=f"{run.root} as the command's argument, or its output in {run.logs}",
            remedy=f"where it is this run's all the same: {by_hand.format(facts.target)}",
        )


def ask_for_save(run: RunPaths) -> str:
    """Has the running job of RUN save and go on, by the signal of an operator (`scancel -b -s USR1 JOB`).

    Returns:
        The job's id; empty: no job of the run is running, so nothing was asked.

    Raises:
        SlurmMissing, SlurmRefused: the request failed.
    """
    from verl_slurm.runs.liveness import job_state
    from verl_slurm.runs.record import last_job
    from verl_slurm.slurm.client import SlurmClient

    try:
        job = last_job(run)
    except NotFound:
        return ""
    state = job_state(run, job)
    # A job that waits or stands still cannot save.
    if state.over or state.state != "RUNNING":
        return ""
    if job.cluster == "slurm":
        _require_own(run, job, "scancel --batch --signal=USR1 {}")
        asyncio.run(SlurmClient().signal_batch(int(job.job_id), signal.SIGUSR1.name.removeprefix("SIG")))
    else:
        try:
            _signal_local(run, signal.SIGUSR1)
        except NotFound:  # submitit's controller lives and has not started the lead yet
            return ""
    return job.job_id


def _signal_local(run: RunPaths, number: signal.Signals) -> None:
    """Signals the lead of a run without Slurm."""
    from verl_slurm.runs.liveness import leads
    from verl_slurm.runs.record import last_job

    found = leads(run, last_job(run))
    if not found:
        raise NotFound("the run's process is gone", where=run.root, remedy=f"verl-slurm submit {run.root}")
    for lead in found:
        try:
            lead.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _say(as_json: bool, run: RunPaths, job_id: str, what: str, text: str) -> None:
    if as_json:
        render.json_value({"run_dir": str(run.root), "job_id": job_id, "result": what})
    else:
        render.line(text)
