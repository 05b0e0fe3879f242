"""What a user asks of a run's job: to end, to start again, to save."""

import asyncio
import errno
import re
import shutil
import signal
import time
from contextlib import suppress

import psutil

from verl_slurm.base.errors import NotFound, SlurmMissing, SlurmRefused, VerlSlurmError
from verl_slurm.base.files import no_directory
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.changes import require_in_place
from verl_slurm.config.load import load_resolved
from verl_slurm.journal.events import CancelAsked, Ended, Event, RequeueAsked
from verl_slurm.journal.files import append_event, read_history
from verl_slurm.journal.history import Submission
from verl_slurm.runs.glance import glance, is_over
from verl_slurm.runs.liveness import (
    ANOTHERS,
    HIDDEN,
    JobState,
    is_script_beside,
    job_state,
    leads,
    runs_here,
    unknown_jobs,
    what_next,
)
from verl_slurm.runs.run_record import last_job
from verl_slurm.slurm.facts import JobFacts
from verl_slurm.slurm.requeue_rules import RequeueOutcome
from verl_slurm.slurm.runner import tell_user
from verl_slurm.slurm.slurm_client import SlurmClient

# Seconds after which a request that Slurm does not answer is not begun again.
_PATIENCE_S = 30.0
_PAUSE_S = 1.0


def cancel_run(run: RunPaths, *, patience_s: float = _PATIENCE_S) -> str:
    """Ends the job of RUN for good; returns its id. Asks again for `patience_s` while Slurm does not answer.

    Raises:
        NotFound: the run has no living job.
        SlurmMissing, SlurmRefused: the request failed.
    """
    until, asked = time.monotonic() + patience_s, False
    while True:
        try:
            return _cancel(run)
        except NotFound:
            # The request before was taken, and its answer lost.
            if asked and read_history(run).is_cancelled:
                return last_job(run).job_id
            raise
        except SlurmMissing as error:
            # Without its commands no second try helps.
            if shutil.which("scontrol") is None or shutil.which("scancel") is None:
                raise
            asked = read_history(run).is_cancelled
            if time.monotonic() >= until:
                what = "the run is not cancelled, and its job goes on"
                if is_over(glance(run.root)):
                    what = f"{run.root.name} has ended: nothing is done"
                elif asked:  # a request that got no answer may be taken later
                    what = "Slurm may have taken the cancel, and has not answered"
                raise SlurmMissing(
                    what,
                    where=run.root,
                    found=f"{error.what}: {error.where}: {error.found}",
                    expected="an answer from slurmctld",
                    remedy=f"`verl-slurm cancel {shell_word(run.root)}` again once `scontrol ping` answers",
                ) from error
        time.sleep(_PAUSE_S)


def _cancel(run: RunPaths) -> str:
    try:
        job = last_job(run)
        is_away = _is_away(run, job)
        # Before the journal: a job that is refused here must leave no word of a cancel.
        if not is_away:
            _require_living(run, "scancel {}")
    except NotFound as error:
        return _cancel_unknown(run, error)
    # Before the signal: the next task of a chain starts by itself, and looks for this line.
    unsaid, chain = None if read_history(run).is_cancelled else unwritten(run, CancelAsked()), ""
    if job.cluster == "slurm":
        chain = asyncio.run(_end(run, int(job.job_id)))
    elif is_away:
        if unsaid is not None:  # there is nothing else to be told
            raise unsaid
        tell_user(
            f"{job.host}, where the job was started, cannot be reached from here. If it is gone, so is the job, and "
            f"`verl-slurm submit {shell_word(run.root)}` goes on. If it is not, the job goes on until then: "
            "the same cancel there ends it"
        )
    else:
        # The lead takes it for a cancel, as it takes what scancel sends.
        _signal_local(run, signal.SIGTERM)
    _say_unwritten(unsaid, job.job_id, chain)
    return job.job_id


def _is_away(run: RunPaths, job: Submission) -> bool:
    """Returns whether a local job without an end is another host's, of which nothing here can tell if it lives."""
    if job.cluster != "local" or read_history(run).has_ended(job.job_id):
        return False
    return job_state(run, job).state == "UNKNOWN"


def unwritten(run: RunPaths, event: Event) -> OSError | None:
    """Writes down what a person asks for; returns the error if that fails, as where no room is left.

    For requests that reach the job all the same: Slurm and the lead need no storage for them.
    """
    try:
        append_event(run, event)
    except OSError as error:
        return error
    return None


def _say_unwritten(error: OSError | None, job_id: str, chain: str) -> None:
    if error is not None:
        ends = f"; the chain's next task would go on with the run, and `scancel {chain}` ends all of them"
        tell_user(f"the cancel of job {job_id} could not be written down: {error}{ends * bool(chain)}")


async def _end(run: RunPaths, number: int) -> str:
    """Ends a job for good; returns the array that it is a task of. Runs beside it that wait for its end (`--at-once`)
    wait for what it waits for, instead.
    """
    client = SlurmClient()
    job = await client.job(number)
    if job.is_waiting and job.dependency:
        for other, dependency, command in await client.dependencies():
            instead = depends_instead(dependency, number, job.dependency)
            # Those of its own run, and jobs that are no runs, are to start after it, however it ends.
            if not instead or not is_script_beside(run.root, command):
                continue
            try:
                # Before the cancel, with which Slurm may start them.
                await client.set_dependency(other, instead)
                tell_user(f"job {other} waited for job {number}, and waits for {instead} now, as that did")
            except (SlurmRefused, NotFound) as error:
                tell_user(
                    f"the limit of --at-once no longer holds for job {other}, which waits for job {number} alone: "
                    f"{error.one_line()}; while it waits: scontrol update JobId={other} Dependency={instead}"
                )
    await client.cancel(number)
    return (job.array_task or "").partition("_")[0]


def depends_instead(dependency: str, number: int, its: str) -> str:
    """Returns a dependency with job `number` replaced by its own, `its`; empty: it names no end of that job. Pure."""
    terms, its_terms = (re.sub(r"\([^)]*\)", "", text).split(",") for text in (dependency, its))
    if (end := f"afterany:{number}") not in terms:
        return ""
    return ",".join(dict.fromkeys(one for term in terms for one in (its_terms if term == end else [term])))


def _cancel_unknown(run: RunPaths, error: NotFound) -> str:
    """Ends the jobs of the run that its journal does not name; returns their ids. Raises `error` if there are none."""
    history = read_history(run)
    job = history.job
    if job is not None and job.cluster != "slurm":
        raise error
    if unknown := unknown_jobs(run, history) if shutil.which("squeue") else []:
        unsaid = unwritten(run, CancelAsked())
        for number in unknown:
            _say_unwritten(unsaid, number, asyncio.run(_end(run, int(number))))
        return ", ".join(unknown)
    # By nothing else can another cluster tell that a job is over which ended without a word.
    silent = job is not None and not history.has_ended(job.job_id) and not history.is_cancelled
    if silent and job_state(run, last := last_job(run)).over:
        _say_unwritten(unwritten(run, CancelAsked()), last.job_id, "")
    raise error


def requeue_run(run: RunPaths, *, at_once: bool = False) -> tuple[str, str]:
    """Has the running job of RUN save, end and start again; returns its id, and in words what happens now.

    `at_once`: Slurm does it, and the ranks have KillWait to save.

    Raises:
        NotFound: the run has no living job.
        SlurmMissing, SlurmRefused: the request failed.
    """
    job = last_job(run)
    # `scontrol requeue` starts a job that is over again, one that its user has cancelled as well.
    state = _require_living(run, "scontrol requeue {}" if at_once else "scancel --batch --signal=USR2 {}")
    if job.cluster == "slurm":
        number, unsaid = int(job.job_id), unwritten(run, RequeueAsked(at_once=at_once))
        detail = _requeue_now(run, number) if at_once else _wish_for_requeue(run, number, state)
        if unsaid is not None:
            tell_user(f"the requeue of job {job.job_id} could not be written down: {unsaid}")
        return job.job_id, detail
    # By this line a lead without Slurm tells it from a preemption, which leaves 30 s to save: no line, no signal.
    append_event(run, RequeueAsked(at_once=at_once))
    _signal_local(run, signal.SIGUSR2)
    how = "within 30 s, saved or not, it" if at_once else "it saves, and"
    return job.job_id, f"{how} starts again in place"


def _wish_for_requeue(run: RunPaths, number: int, state: str) -> str:

    client = SlurmClient()
    # A job that waits has no daemon that could be asked, and a suspended one would take the signal when it goes on.
    if state != "RUNNING":
        facts = asyncio.run(client.job(number))
        raise _not_requeued(run, facts, f"it is {state}, and only a running job saves")
    # By the lead, since Slurm's own requeue leaves KillWait to save. To the batch process alone: in a step the signal
    # would reach every process, and end those without a handler.
    asyncio.run(client.signal_batch(number, signal.SIGUSR2.name.removeprefix("SIG")))
    return f"its daemon saves first; verl-slurm watch {shell_word(run.root)} shows it"


def _requeue_now(run: RunPaths, number: int) -> str:

    client = SlurmClient()
    delay_s = load_resolved(run.run_yaml).daemon.requeue_delay_s

    async def ask() -> tuple[JobFacts, RequeueOutcome]:
        facts = await client.job(number)
        # Slurm counts one restart more when it has taken the request, whatever became of the answer.
        return facts, await client.requeue(number, delay_s, own_restarts=facts.restarts)

    facts, outcome = asyncio.run(ask())
    if not outcome.will_run_again:
        raise _not_requeued(run, facts, outcome.detail)
    return outcome.detail


def _not_requeued(run: RunPaths, facts: JobFacts, found: str) -> SlurmRefused:
    other = (
        f"see `verl-slurm status {shell_word(run.root)}`; a job that is over starts with verl-slurm submit"
    )
    return SlurmRefused(
        "the job was not requeued",
        where=facts.job_id,
        found=f"{found}; {facts.reason}" if facts.reason else found,
        remedy=what_next(facts)[0] or other,
    )


def _require_living(run: RunPaths, by_hand: str) -> str:
    """Returns the state of the run's job. `by_hand` is the command that does what is asked for to the job `{}`.

    Raises:
        NotFound: it is over, or of another cluster or machine.
        SlurmRefused: its number is another job's.
        SlurmMissing: no answer.
    """

    job = last_job(run)
    state = job_state(run, job)
    # Its number, or its process's, is another's here.
    if state.state == "UNKNOWN":
        again = f"`verl-slurm cancel {shell_word(run.root)}`, then `verl-slurm submit {shell_word(run.root)}`"
        gone = f"; if {job.host} is gone: {again}" if _is_away(run, job) else ""
        raise NotFound(
            "the run's job cannot be reached from here",
            where=run.root,
            found=f"job {job.job_id}, {state.detail}",
            remedy="its owner can do it" if state.detail == HIDDEN else f"run the same command there{gone}",
        )
    if not state.over or state.detail == ANOTHERS:
        _require_own(run, job, state, by_hand)
    if state.over:
        word = glance(run.root).word  # a scheduler forgets its jobs, the journal does not
        came_to = word.outcome if isinstance(word, Ended) and word.is_final else state.state
        again = f"verl-slurm submit {shell_word(run.root)}"
        more = f"`{again} train.steps=N` goes on to more steps"
        with suppress(VerlSlurmError):
            trainer = load_resolved(run.run_yaml).trainer
            if trainer.is_guest:  # its program knows its own end
                longer = " -- trainer.total_epochs=N" * (trainer.backend == "verl")
                more = f"`{again}{longer}` goes on, if it has more to do"
        raise NotFound(
            "the run has no living job",
            where=run.root,
            found=f"job {job.job_id}, {came_to}",
            remedy=more if came_to == "done" else f"`{again}` starts it again",
        )
    return state.state


def _require_own(run: RunPaths, job: Submission, state: JobState, by_hand: str) -> None:
    """Raises SlurmRefused for a job that the run's journal alone ties to the run; else as `SlurmClient.job`."""

    # A local lead is recognised by its own command line, whatever the journal says.
    if job.cluster != "slurm":
        return
    # A run that was handed over brings its own journal, which may name any job of the user's.
    facts = asyncio.run(SlurmClient().job(int(job.job_id)))
    if not runs_here(run.root, facts.command or "", facts.work_dir):
        remedy = f"where it is this run's all the same: {by_hand.format(facts.target)}"
        if state.detail == ANOTHERS:
            again = misplaced(run) or f"`verl-slurm submit {shell_word(run.root)}` starts it again"
            remedy = f"leave it: {ANOTHERS}, and the run's is over; {again}"
        raise SlurmRefused(
            f"{run.events} names a job of which Slurm does not say that it is this run's",
            where=job.job_id,
            found=f"the command {facts.command}" if facts.command else "a job without a script",
            expected=f"{run.root} as its argument, or a script in {run.logs}",
            remedy=remedy,
        )


def misplaced(run: RunPaths) -> str:
    """Says what `submit` would refuse of where the run lies: a copy, a run that was moved, a link for checkpoints."""
    try:
        require_in_place(run.root, load_resolved(run.run_yaml), "submit")
        if run.checkpoints.is_symlink():
            raise no_directory(NotADirectoryError(errno.ENOTDIR, ""), run.checkpoints)
    except (OSError, VerlSlurmError) as error:
        return error.one_line() if isinstance(error, VerlSlurmError) else str(error)
    return ""


def ask_for_save(run: RunPaths) -> str:
    """Has the running job of RUN save and go on; returns its id, empty: none is running.

    Raises:
        SlurmMissing, SlurmRefused: the request failed.
    """

    try:
        job = last_job(run)
    except NotFound:
        return ""
    state = job_state(run, job)
    if state.state == "RUNNING" or state.detail == ANOTHERS:
        _require_own(run, job, state, "scancel --batch --signal=USR1 {}")
    # A job that waits or stands still cannot save.
    if state.over or state.state != "RUNNING":
        return ""
    if job.cluster == "slurm":
        # The signal of an operator: `scancel -b -s USR1 JOB`.
        asyncio.run(SlurmClient().signal_batch(int(job.job_id), signal.SIGUSR1.name.removeprefix("SIG")))
    else:
        try:
            _signal_local(run, signal.SIGUSR1)
        except NotFound:  # submitit's controller lives and has not started the lead yet
            return ""
    return job.job_id


def _signal_local(run: RunPaths, number: signal.Signals) -> None:
    found = leads(run, last_job(run))
    if not found:
        raise NotFound(
            "the run's process is gone", where=run.root, remedy=f"verl-slurm submit {shell_word(run.root)}"
        )
    for lead in found:
        try:
            lead.send_signal(number)
        except psutil.NoSuchProcess:
            continue
