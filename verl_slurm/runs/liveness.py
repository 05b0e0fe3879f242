"""Finds out whether a run's job is still alive, from Slurm or from the processes of this machine."""

import asyncio
import os
import re
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import msgspec
import psutil

from verl_slurm.base.errors import Fenced, NotFound, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.fence import read_copy, read_owner
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.processes import KnownProcess
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.journal.files import read_history
from verl_slurm.journal.history import History, Submission
from verl_slurm.runs.run_record import last_job
from verl_slurm.slurm.facts import JobFacts
from verl_slurm.slurm.slurm_client import SlurmClient

HIDDEN = "Slurm shows you no jobs of other users (PrivateData)"
"""`JobState.detail` of a job that may live all the same."""
ANOTHERS = "another job has its number"
"""`JobState.detail` of a job whose number is, on this cluster or by now, not the run's."""
# Prefix of the job id of a lead that was started without submitit.
_BY_HAND = "local-"

# The number of a job or a process. `isdecimal` would accept the digits of all scripts.
_JOB = re.compile(r"[0-9]{1,10}")
# Seconds by which clocks may differ: what Slurm's munge allows.
_CLOCKS_S = 300.0


def job_number(job_id: str) -> int | None:
    """Returns the number of a Slurm job or of a process; None: it is none, whatever a journal says."""
    return int(job_id) if _JOB.fullmatch(job_id) else None


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's answer about a job now."""

    state: str
    """Slurm's state, or RUNNING and GONE for a local job."""
    over: bool
    """It will not run again by itself."""
    waits: bool = False
    """It is in Slurm's queue: to be started, or held."""
    detail: str = ""
    way_on: str = ""
    """How a job goes on that stands until somebody acts; empty: it does not stand still. Also in `detail`."""
    left: str = ""
    """What is known of starts since when the journal has no news of the job: its batch script's words, or Slurm's."""
    since: datetime | None = None
    """When it last began to run; None: it waits, or leaves its nodes."""
    starts: datetime | None = None
    """When Slurm expects a job that waits to start; None: it does not say."""
    ends: datetime | None = None
    """When a running job has reached its time limit; None: there is none."""

    @property
    def exit_code(self) -> ExitCode:
        """Returns the exit code for a run whose daemon said nothing about its end."""
        if self.state.startswith("CANCELLED"):
            return ExitCode.CANCELLED
        return ExitCode.OK if self.state == "COMPLETED" else ExitCode.CRASHED


_OUR_SCRIPT = re.compile(r"\.submission_file_[0-9a-f]{32}\.sh|successor_of_\d+\.sh")
# Those of `sbatch/`, which have RUN as their argument (`verl-slurm submit --prepare-only` prints the line).
_SHIPPED_SCRIPT = re.compile(r"/(chain|heterogeneous|multi_node|pyxis|single_node)\.sbatch ")
# The word is missing in the sentences about licenses that are gone, and about a requeue in a special state.
_HELD = r"held|holding[_ ]job|JobHoldMaxRequeue|special[_ ]exit[_ ]state|BurstBufferOperation"
_RESERVATION_GONE = r"Reservation(Deleted|Invalid|_.*_(was_deleted|is_invalid)$)"
# By the beginning of Slurm's reason, or of the sentence that stands for it, whose blanks are `_` here.
_PASSES = re.compile(r"^Partition(Down|Inactive)|maintenance", re.IGNORECASE)
"""Slurm starts the job by itself when that is over."""
_CHANGES = {
    r"PartitionTimeLimit|(QOS|Assoc)Max\w*(WallDuration|MinutesPerJob)": "TimeLimit=MINUTES",
    # More of something than any job there may have; and too little of it.
    r"QOSMax\w+Per(Job|Node)|QOSMin": "QOS=OTHER",
    r"AssocMax\w+Per(Job|Node)": "Account=OTHER",
    # A budget of past jobs. Other group limits, RunMinutes among them, are freed by the end of jobs that run.
    r"QOSGrp\w*(?<!Run)Minutes|QOSGrpWall|QOSUsageThreshold": "QOS=OTHER",
    r"AssocGrp\w*(?<!Run)Minutes|AssocGrpWall": "Account=OTHER",
    # Not the number of nodes: what a run is divided over is settled when it is submitted.
    r"PartitionNodeLimit|PartitionConfig|uid_\d+_not_in_group": "Partition=OTHER",
    r"BadConstraints": "Features=OTHER",
    r"DependencyNeverSatisfied": "Dependency=",
    r"InvalidAccount|AccountNotAllowed|Job's_account_not": "Account=OTHER",
    r"InvalidQOS|QOSNotAllowed|Job's_QOS_not": "QOS=OTHER",
    r"MaxMemPerLimit": "MinMemoryNode=MB",
    _RESERVATION_GONE: "ReservationName=",
}


def job_state(paths: RunPaths, job: Submission) -> JobState:
    """Asks once; SlurmMissing: no Slurm, or no answer."""
    if job.cluster == "local":
        return _local_state(paths, job)
    number = job_number(job.job_id)
    if number is None:
        return JobState(state="GONE", over=True, detail="not a Slurm job id")
    if other := cluster_of_another(paths.root, job):
        return JobState(state="UNKNOWN", over=False, detail=other)
    try:
        facts = asyncio.run(SlurmClient().job(number))
    except NotFound:
        if is_anothers(paths.root) and hides_jobs(asyncio.run(SlurmClient().config())):
            return JobState(state="UNKNOWN", over=False, detail=HIDDEN)
        # It forgets jobs that are over, after MinJobAge.
        return JobState(state="GONE", over=True, detail="Slurm has forgotten it")
    if not may_be_of(paths.root, facts, queued_by_us=job.queued_by_us, heard_at=job.heard_at):
        script = Path(facts.command or "")
        # This run, moved while its job lives; or another run, which was removed.
        if _OUR_SCRIPT.fullmatch(script.name) and not script.parent.exists():
            told = f"it is a run's at {script.parent.parent}, which is not here; if that is this run, move it back"
            return JobState(state="UNKNOWN", over=False, detail=told)
        return JobState(state="GONE", over=True, detail=ANOTHERS)
    waits, (words, stands) = facts.is_waiting, what_next(facts)
    left = start_left(facts.comment, job.heard_at) if waits else ""
    unheard = unheard_starts(facts, job.requeues) if waits and not left else ""
    return JobState(
        state=facts.state,
        over=facts.is_over,
        waits=waits,
        detail="; ".join(filter(None, (facts.reason, facts.comment if waits else "", unheard, words))),
        way_on=words if stands else "",
        left=left or unheard,
        since=None if waits or facts.is_over or facts.state == "COMPLETING" else facts.start_time,
        starts=facts.start_time if waits else None,
        ends=facts.end_time if facts.is_running else None,
    )


def start_left(comment: str, heard_at: float | None) -> str:
    """Returns a comment of `batch.AWAIT` in words; empty: it is none, or older than the job's newest event. Pure."""
    said = comment.removeprefix("verl-slurm: ")
    with suppress(ValueError):  # of another version: it is told
        # Its minute, without a zone: by the site's clocks.
        when = datetime.fromisoformat(said.partition(" ")[0]).timestamp()
        said = "" if heard_at is not None and when + 60.0 <= heard_at else said
    return f"waits for its next start, since the last one could not begin: {said}" if said else ""


def unheard_starts(facts: JobFacts, requeues: int) -> str:
    """Says how often Slurm has started a job since the start after so many requeues; empty: it has not. Pure."""
    starts = counted(facts.restarts - requeues - 1, "time")
    words = f"Slurm has started it {starts} since its last word, in vain: before its daemon began, it was requeued"
    why = f"slurmctld's log says why ({facts.target}), e.g. a node or a PrologSlurmctld that failed"
    return f"{words}; {why}" if facts.restarts > requeues + 1 else ""


def was_requeued(ended_at: float | None, state: JobState) -> bool:
    """Returns whether a job whose end the journal has goes on all the same: somebody requeued it since. Pure."""
    # For seconds to minutes after its end a job still runs, or completes; an allocation by hand outlives its lead.
    again = state.since is not None and ended_at is not None and state.since.timestamp() > ended_at
    return not state.over and (state.waits or again)


def requeued_words(root: Path, job_id: str, outcome: str) -> str:
    """Says of a job that `was_requeued` what happens now, and how it is ended. Pure."""
    return (
        f"job {job_id} was requeued after its end ({outcome}), by whom is not known, and trains when it starts; "
        f"`verl-slurm cancel {shell_word(root)}` ends it"
    )


def is_anothers(root: Path) -> bool:
    """Returns whether a run is of another user, whose jobs Slurm may keep from us: from all but root and operators."""
    return os.geteuid() != 0 and os.geteuid() != os.stat(root).st_uid


def hides_jobs(slurm_conf: Mapping[str, str]) -> bool:
    """Returns whether Slurm shows each user his own jobs alone. Pure."""
    return not {"jobs", "all"}.isdisjoint(slurm_conf.get("PrivateData", "").lower().split(","))


def cluster_of_another(root: Path, job: Submission) -> str:
    """Returns that the job is of another Slurm cluster; empty: it is not, or not known. May raise SlurmMissing."""
    here = asyncio.run(SlurmClient().cluster_name()) if job.slurm else ""
    if not here or here == job.slurm:
        return ""
    with suppress(NotFound):
        facts = asyncio.run(SlurmClient().job(job_number(job.job_id) or 0))
        if not facts.is_over and is_script_of(root, facts.command or ""):
            return ""  # the cluster has been renamed
    return elsewhere(job.slurm, here)


def elsewhere(cluster: str, here: str) -> str:
    """Says that a job's number means nothing here."""
    return f"it is of Slurm cluster {cluster}, and this is {here}: ask there"


def queued_jobs(paths: RunPaths) -> list[str]:
    """Returns the run's unfinished jobs by their commands (`trains`), newest last. SlurmMissing: no answer."""
    jobs = asyncio.run(SlurmClient().own_jobs())
    return [number for number, command, where in jobs if trains(paths.root, command, where)]


def trains(root: Path, command: str, where: str) -> bool:
    """Returns whether a job of this command is one of the run's, by that alone. `where`: its working directory."""
    # Another script with RUN as an argument may look at the run, or copy it: `cancel` must not end that one.
    by_hand = _SHIPPED_SCRIPT.search(command) is not None
    return runs_here(root, command, where) if by_hand else is_script_of(root, command)


def unknown_jobs(paths: RunPaths, history: History) -> list[str]:
    """Returns those of `queued_jobs` that the journal does not name. Raises as it."""
    return [number for number in queued_jobs(paths) if number not in history.last_of_job]


def is_script_of(root: Path, script: str) -> bool:
    """Returns whether it is a batch script that `submit` or a lead wrote for the run: those lie in RUN/logs."""
    logs = Path(script).parent
    return logs.name == "logs" and _is_same_place(logs.parent, root)


def is_script_beside(root: Path, script: str) -> bool:
    """Returns whether it is `submit`'s batch script of another run in the folder of `root`, as those of a sweep."""
    logs = Path(script).parent
    ours = _OUR_SCRIPT.fullmatch(Path(script).name) is not None and logs.name == "logs"
    return ours and not is_script_of(root, script) and _is_same_place(logs.parent.parent, root.parent)


def what_next(facts: JobFacts) -> tuple[str, bool]:
    """Returns what to say of how a job goes on, and whether it stands until somebody acts. May raise SlurmMissing."""
    words = way_on(facts)
    # Resumed by hand, a job that another one preempted would share the cores with that one.
    if facts.state == "SUSPENDED" and resumes_jobs(asyncio.run(SlurmClient().config())):
        return f"if another job preempted it, Slurm resumes it by itself; else {words}", False
    return words, bool(words) and _PASSES.search(facts.reason or "") is None


def resumes_jobs(slurm_conf: Mapping[str, str]) -> bool:
    """Returns whether Slurm itself suspends jobs for others, and lets them go on afterwards. Pure."""
    return not {"SUSPEND", "GANG"}.isdisjoint(slurm_conf.get("PreemptMode", "").upper().split(","))


def way_on(facts: JobFacts) -> str:
    """Returns how to continue a job that stands still; empty: nothing of that kind holds it. Pure."""
    # A requeue of a suspended job would leave it held for good (JobHeldAdmin), so it has to go on first.
    if facts.state == "SUSPENDED":
        return f"an operator has to: scontrol resume {facts.target}"
    # Its ranks alone: the lead goes on, and cannot tell a rank that was stopped from one that computes.
    if facts.state == "STOPPED":
        return f"its ranks were stopped by a signal: scancel --signal=CONT {facts.target}"
    reason = facts.reason or ""
    if is_held(reason):
        # Slurm lets the job's user release a hold of his own.
        return f"{'an operator has to: ' * (reason == 'JobHeldAdmin')}scontrol release {facts.target}"
    if facts.is_waiting and "maintenance" in reason.lower():
        return f"a shorter job may start before it: scontrol update JobId={facts.target} TimeLimit=MINUTES"
    if facts.is_waiting and _PASSES.search(reason):
        other = f"scontrol update JobId={facts.target} Partition=OTHER"
        return f"it starts once the partition {facts.partition} is UP again; in another one sooner: {other}"
    change = needed_change(reason) if facts.is_waiting else ""
    if not change:
        return ""
    limits = f"scontrol show partition {facts.partition} --all"
    if change == _CHANGES[_RESERVATION_GONE]:
        # Slurm has held it, too.
        change, limits = f"{change}; scontrol release {facts.target}", "scontrol show reservation"
    elif reason.startswith(("QOS", "Assoc")):
        limits = "sacctmgr show qos; sacctmgr show assoc user=$USER; sshare"
    return (
        f"Slurm starts it only after a change: scontrol update JobId={facts.target} {change} (the limits: {limits}), "
        "or verl-slurm cancel, and submit with other keys of slurm"
    )


def is_held(reason: str) -> bool:
    """Returns whether a waiting job stands until somebody releases it: held, or requeued too often. Pure."""
    return re.search(_HELD, reason, re.IGNORECASE) is not None


def needed_change(reason: str) -> str:
    """Returns what has to be changed of a waiting job before Slurm starts it; empty: it waits for its turn. Pure."""
    # The reasons are those of `job_reason_string` in Slurm's slurm_protocol_defs.c.
    # squeue has blanks where scontrol has `_`.
    reason = reason.replace(" ", "_")
    return next((change for pattern, change in _CHANGES.items() if re.match(pattern, reason)), "")


def runs_here(root: Path, command: str, where: str | None) -> bool:
    """Returns whether Slurm itself ties a job to the run, by its script in RUN/logs, or RUN as an argument of it."""
    # A journal proves nothing: a run that was handed over brings its own.
    _, *words = command.split(" ")
    # Slurm writes no quotes: RUN, and the path of a script in it, may contain blanks.
    arguments = [*words, *(" ".join(words[start:]) for start in range(len(words)))]
    return is_script_of(root, command) or _names(root, arguments, where)


def may_be_of(root: Path, job: JobFacts, *, queued_by_us: bool, heard_at: float | None) -> bool:
    """Returns whether a job with this number can be the run's.

    `queued_by_us`: by `submit` or a lead. `heard_at`: the time of the run's newest event of that number.
    """
    # On another cluster, and where a cluster's numbers begin anew, the number is another job's.
    command = job.command or ""
    if runs_here(root, command, job.work_dir):
        return True
    # `salloc` and `sbatch --wrap` have no script, and one that somebody wrote by hand need not name the run. What we
    # queue has one in RUN/logs; here that is another RUN.
    if queued_by_us or _OUR_SCRIPT.fullmatch(Path(command).name) or job.user_id != os.stat(root).st_uid:
        return False
    if heard_at is None or job.submit_time is None or job.restarts:
        return True
    return job.submit_time.timestamp() <= heard_at + _CLOCKS_S


def _names(root: Path, words: Iterable[str], where: str | None) -> bool:
    return any(word and _is_same_place(Path(where or "/") / word, root) for word in words)


def _is_same_place(one: Path, other: Path) -> bool:
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    try:
        # By two mounts of one file system.
        return one.samefile(other)
    except (OSError, ValueError):  # it is not here, or no path at all
        return False


def _local_state(paths: RunPaths, job: Submission) -> JobState:
    # A process number means nothing on another host.
    if job.host and job.host != socket.gethostname():
        # That host may be gone, or be this one under a new name: a container has another at each start.
        if job.is_cancelled:
            return JobState(state="CANCELLED", over=True, detail=f"it was started on {job.host}")
        return JobState(state="UNKNOWN", over=False, detail=f"it was started on {job.host}: ask there")
    process = controller(paths, job)
    if process is None:
        return JobState(state="GONE", over=True)
    return JobState(state="RUNNING", over=False, detail=f"process {process.pid}")


def controller(paths: RunPaths, job: Submission) -> psutil.Process | None:
    """Returns the living process of a local run: submitit's local controller, or a lead that was started by hand."""
    if job.job_id.startswith(_BY_HAND):
        return _lead_by_hand(paths, job)
    number = job_number(job.job_id)
    if number is None:
        return None
    try:
        # By its command line: a pid is reused, and the run's directory of logs is an argument of submitit's controller.
        process = psutil.Process(number)
        # A zombie has ended; its parent has not waited for it.
        if str(paths.logs) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
            return process
    except (ValueError, psutil.Error):
        return None
    return None


def leads(paths: RunPaths, job: Submission) -> list[psutil.Process]:
    """Returns the processes that take the signals of a local run."""
    process = controller(paths, job)
    if process is None:
        return []
    return [process] if job.job_id.startswith(_BY_HAND) else process.children()


def _lead_by_hand(paths: RunPaths, job: Submission) -> psutil.Process | None:
    try:
        try:
            owner = read_owner(paths)
        except PermissionError:  # of its claims: a colleague looks (`group`)
            owner = read_copy(paths)
        if owner is None or job.job_id != owner.job_id:
            return None
        process = psutil.Process(owner.pid)
        # The parser takes `--run RUN` as well as `--run=RUN`.
        words = [word.removeprefix("--run=") for word in process.cmdline()]
        # The claim proves nothing in a run that was handed over: it can name any process of this user's.
        if "lead" not in words or not _names(paths.root, words, process.cwd()):
            return None
        # By its birth, which no setting of the clock changes.
        return process if KnownProcess(owner.pid, owner.born).is_running() else None
    except (ValueError, VerlSlurmError, psutil.Error):
        return None


def settle(paths: RunPaths, job: Submission, timeout_s: float = 10.0) -> None:
    """Waits after a run's end until submitit's local controller has noticed it, too (under a second)."""
    process = controller(paths, job) if job.cluster == "local" else None
    if process is not None:
        with suppress(psutil.Error):
            process.wait(timeout=timeout_s)


def refuse_living(paths: RunPaths, *, ask_for_unknown: bool = False) -> None:
    """Raises Fenced if the run has a job, with `ask_for_unknown` also one of Slurm's that its journal does not name."""
    history = read_history(paths)
    with suppress(NotFound):
        _refuse_living_job(paths, history, last_job(paths))
    if not ask_for_unknown:
        return
    # Its number was lost, or the journal was.
    if unknown := unknown_jobs(paths, history):
        ends = f"it trains the run when it starts; `verl-slurm cancel {shell_word(paths.root)}` ends it"
        if not paths.run_yaml.exists():
            ends = f"its run is gone: `scancel {unknown[-1]}`, then the same submit again"
        raise Fenced(
            "the run has a job of which its journal does not know",
            where=paths.root,
            found=f"job {unknown[-1]}",
            remedy=ends,
        )


def _refuse_living_job(paths: RunPaths, history: History, job: Submission) -> None:
    ended = history.has_ended(job.job_id)
    if job.cluster == "slurm" and not ended and (other := cluster_of_another(paths.root, job)):
        # A cancel of a job that waits leaves no other word.
        if history.is_cancelled:
            return
        newest = next((info.path for info in list_checkpoints(paths) if info.kind == "committed"), "PATH")
        raise Fenced(
            "the run lives on another Slurm cluster",
            where=paths.root,
            found=f"job {job.job_id}, which has not ended; {other}",
            remedy=f"`verl-slurm cancel {shell_word(paths.root)}` on {job.slurm}, then submit here; "
            f"if there is no {job.slurm} any more, a new run goes on from this one's checkpoint: "
            f"name=NEW run_dir=NEW {shell_word(f'checkpoint.resume_from={newest}')}",
        )
    if ended:
        # submitit's local controller lives a moment longer than the end that its lead has recorded.
        settle(paths, job)
    state = job_state(paths, job)
    # Slurm takes a moment to notice an end that the daemon has recorded already.
    if not state.over and (not ended or was_requeued(history.last_of_job[job.job_id].at, state)):
        goes_on = f"{state.way_on}; " if state.way_on else ""
        ends = f"`verl-slurm cancel {shell_word(paths.root)}` ends it"
        if job.cluster == "local" and state.state == "UNKNOWN":
            ends += f" there; if {job.host} is gone, `cancel` it here, then the same submit goes on"
        why = state.detail.removesuffix(state.way_on).removesuffix("; ")
        raise Fenced(
            "the run has a job already",
            where=paths.root,
            found=", ".join(filter(None, (f"job {job.job_id}", state.state, why))),
            remedy=f"{goes_on}`verl-slurm watch {shell_word(paths.root)}` follows it, {ends}",
        )
