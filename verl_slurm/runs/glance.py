"""Reads many runs at a glance: collects for `list` and `watch` the facts of a thousand run directories in a second.

A bounded part of each run is read: its snapshot, with the lead's sums of the journal, the end of its journal, the
newest checkpoint's manifest. Where that is not enough, more is read, up to the whole: slower, and never wrong.
"""

import asyncio
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from verl_slurm.base.bounded import TooMuch
from verl_slurm.base.errors import NotFound, SlurmMissing, VerlSlurmError
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.checkpoint.store.catalog import newest_listed
from verl_slurm.checkpoint.store.lost import in_tiers
from verl_slurm.config.load import left_of_run
from verl_slurm.journal.events import Cause, Ended, Event, Started, Submitted
from verl_slurm.journal.files import read_last_events
from verl_slurm.journal.history import History, Outage, Submission
from verl_slurm.journal.pace import number
from verl_slurm.journal.status import read_status
from verl_slurm.runs.liveness import (
    HIDDEN,
    JobState,
    elsewhere,
    hides_jobs,
    is_anothers,
    is_held,
    is_script_of,
    job_number,
    job_state,
    needed_change,
    requeued_words,
    runs_here,
    start_left,
    trains,
    was_requeued,
)
from verl_slurm.runs.run_record import completed, job_by_files, last_job
from verl_slurm.slurm.facts import is_stopped, is_waiting
from verl_slurm.slurm.slurm_client import SlurmClient

_DEPTH = 3
# Bytes at the journal's end that are read first: some twenty events.
_FIRST_BYTES = 4 << 10
_TIMES_MORE = 16
# Runs that are read at the same time. On a network, waiting takes the time. On a local disk, too, a thousand runs
# took 0.5 s instead of 1.4 (cold) and of 1.0 (warm, two busy cores), for the same processor time.
_AT_ONCE = 16


class Glance(msgspec.Struct, kw_only=True):
    """The facts about one run, from its files alone."""

    root: Path
    status: dict[str, Any] = {}
    job: Submission | None = None
    word: Submitted | Started | Ended | None = None
    """The newest event that says whether the run goes on. None: it has a lead, which started longer ago than was read
    back.
    """
    last: Event | None = None
    """The newest event of all."""
    is_cancelled: bool = False
    """`verl-slurm cancel` was the last that became of its newest job."""
    cause: Cause | None = None
    """The newest cause, unless it is longer ago than what was read back."""
    checkpoint: CheckpointInfo | None = None
    lost: str = ""
    """The checkpoint that the run had last, where it has none, or an older one alone."""
    interruptions: int = 0
    interrupted_s: float = 0.0
    last_interruption: dict[str, Any] = {}
    foreign: list[str] = []
    """About lines of the journal that are another run's, among those that were read."""
    error: str = ""
    """Why nothing is known, as of another user's run that is closed to us; or that run.yaml is gone."""

    @property
    def step(self) -> int:
        """The completed steps."""
        return steps_done(self.status, self.checkpoint)

    @property
    def cost_s(self) -> float:
        """Seconds that the interruptions cost, with those so far of one that lasts."""
        with suppress(TypeError, ValueError):  # of another version
            last = msgspec.convert(self.last_interruption, Outage)
            return self.interrupted_s + (last.so_far(datetime.now(UTC)) if last.seconds is None else 0.0)
        return self.interrupted_s

    @property
    def reward(self) -> float | None:
        """Of the newest step; None: its loop has none."""
        metrics = self.status.get("metrics")
        return number(metrics.get("reward")) if isinstance(metrics, dict) else None


class Seen(msgspec.Struct, frozen=True):
    """The scheduler's, or the process table's, answer about a run's job."""

    alive: bool | None
    """None: this machine cannot tell."""
    state: str = ""
    """Slurm's state."""
    detail: str = ""
    left: str = ""
    """As `JobState.left`."""


def find_runs(place: Path, depth: int = _DEPTH) -> Iterator[tuple[Path, bool]]:
    """Yields (run, whether it is readable) in the order of the names, `depth` directories down."""
    try:
        entries = sorted((e.name, e.is_symlink()) for e in os.scandir(place) if _leads_to_directory(e))
    # Removed since it was listed.
    except (FileNotFoundError, NotADirectoryError):
        return
    # It may be another user's run: it is told as closed to us, not left out.
    except PermissionError:
        yield place, False
        return
    for name, is_link in entries:
        # A link and its run are the same run, so both have the same path.
        path = (place / name).resolve() if is_link else place / name
        try:
            os.stat(path / "run.yaml")
        except FileNotFoundError:
            if left_of_run(path):
                yield path, True
            elif depth > 1:
                # Not below a run: a thousand of them have a hundred thousand directories of checkpoints.
                yield from find_runs(path, depth - 1)
        except OSError:
            yield path, False
        else:
            yield path, True


def _leads_to_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a circular link, or one into a closed directory: that hides no other run
        return False


def steps_done(status: Mapping[str, Any], checkpoint: CheckpointInfo | None) -> int:
    """Returns the completed steps. Pure."""
    step: int = status.get("step", 0)
    # Without a phase no rank has reported yet, and a new lead's snapshot may begin with step 0.
    # Then it has those that it resumes from.
    if checkpoint is not None and not status.get("phase"):
        return max(step, checkpoint.step)
    return step


def glance(root: Path, history: History | None = None) -> Glance:
    """Reads one run; with the `history` of its whole journal, an error is raised. Otherwise `error` says what it is."""
    paths, checkpoint, lost, given = RunPaths(root), None, "", history is not None
    try:
        status = read_status(paths)
        history, whole = (history, True) if history is not None else _last_events(paths, status)
        job = history.job
        if job is None and whole:
            job = job_by_files(paths)
        # A colleague (`group`) sees none of them.
        with suppress(PermissionError):
            checkpoint = newest_listed(paths)
            lost = status.get("last_checkpoint", "")
            order = checkpoint_order(lost) or (-1, -1)
            # A start brings one from its tiers.
            lost = "" if checkpoint and (order <= checkpoint.order or in_tiers(paths, lost)) else lost
    except (OSError, TooMuch) as error:
        if given:
            raise
        return Glance(root=root, error=unreadable(error))
    found = Glance(
        root=root,
        error="" if given or paths.run_yaml.exists() else "run.yaml is gone",
        status=status,
        job=None if job is None else completed(job, history, status),
        word=history.word,
        last=history.last,
        is_cancelled=history.is_cancelled,
        cause=history.cause,
        foreign=[event.text for event in history.foreign],
        checkpoint=checkpoint,
        lost=lost,
    )
    # The lead's sums in the snapshot; a journal that was read whole is newer than they are.
    if "interruptions" in status and not whole:
        found.interruptions = status["interruptions"]
        found.interrupted_s = status.get("interrupted_s", 0.0)
        found.last_interruption = status.get("last_interruption", {})
    else:
        found.interruptions, found.interrupted_s = len(history.outages), history.interrupted_s
        found.last_interruption = msgspec.to_builtins(history.outages[-1]) if history.outages else {}
    return found


def unreadable(error: OSError | TooMuch) -> str:
    """Returns the state of a run that has a file which cannot be read: the file's name and the reason."""
    if isinstance(error, PermissionError):
        return "no permission"
    if isinstance(error, TooMuch):
        return f"{os.path.basename(str(error.where))}: {error}"
    name = os.path.basename(error.filename or "")
    return f"{name}: {error.strerror}" if name else str(error.strerror or error)


def _last_events(paths: RunPaths, status: dict[str, Any]) -> tuple[History, bool]:
    """Returns what enough events from the journal's end tell, and whether they are the whole journal."""
    cluster, host = status.get("cluster", "slurm"), status.get("host", "")
    num_bytes = _FIRST_BYTES
    while True:
        events, whole = read_last_events(paths, num_bytes)
        history = History(events, cluster, host)
        if whole or ("interruptions" in status and _says_enough(history, status)):
            return history, whole
        num_bytes *= _TIMES_MORE


def _says_enough(history: History, status: dict[str, Any]) -> bool:
    if history.job is None:
        return False
    its_snapshot = status.get("job_id") == history.job.job_id and bool(status.get("cluster"))
    # A lead that is at work started longer ago than these events. If none is, its end must be among them.
    if its_snapshot and status.get("state") not in (None, "", "ended"):
        return True
    told = history.counts
    return bool(told["submitted"] or told["started"] or (told["ended"] and its_snapshot))


def glance_at_all(place: Path) -> list[Glance]:
    """Reads every run below `place`, several at a time."""
    # ---- which runs there are; many are read side by side, because reading them is mostly waiting
    found = list(dict(find_runs(place)).items())  # a link beside its run is one run
    closed = [Glance(root=path, error="no permission") for path, open_to_us in found if not open_to_us]
    roots = [path for path, open_to_us in found if open_to_us]
    if len(roots) > _AT_ONCE:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            glances = list(pool.map(glance, roots))
    else:
        glances = [glance(root) for root in roots]
    return sorted([*glances, *closed], key=lambda one: one.root)


def is_over(run: Glance) -> bool:
    """Returns whether the journal has the run's end: it counts unless Slurm has the job again (`end_of_slurm_job`)."""
    if run.job is None or run.error:
        return True
    return isinstance(run.word, Ended) and run.word.is_final


def end_of_slurm_job(run: Glance) -> Ended | None:
    """Returns the end of a run whose job somebody, or Slurm itself, may have requeued since; None: it has none."""
    if run.job is None or run.job.cluster != "slurm" or not is_over(run) or run.error:
        return None
    return run.word if isinstance(run.word, Ended) and run.word.job_id == run.job.job_id else None


def requeue_after_end(run: Glance, seen: Seen | None) -> str:
    """Returns that the run's job was requeued after its end, as `ask_for` found it; empty: it was not. Pure."""
    end = end_of_slurm_job(run)
    if end is None or seen is None or not seen.alive:
        return ""
    return requeued_words(run.root, end.job_id or "", end.outcome)


def ask_for(runs: Sequence[Glance]) -> tuple[dict[Path, Seen], str]:
    """Looks up the jobs of the runs; also returns the error that kept Slurm from answering.

    Of a run that is over there is an answer if its job goes on all the same, and only then. A run that ended between
    our two looks is read again, and brought up to date in `runs`.
    """
    # A snapshot does not know that its lead was killed, and a run without a job may have one that waits: queued by
    # the line that `submit --prepare-only` prints, it writes its first word when it starts.
    has_slurm = shutil.which("squeue") is not None
    prepared = [run for run in runs if run.job is None and not run.error] if has_slurm else []
    ended = [run for run in runs if end_of_slurm_job(run) and run.root.exists()] if has_slurm else []
    waiting = [run for run in runs if not is_over(run)] + prepared
    seen, problem = _ask(waiting, ended)
    for run in waiting:
        if seen[run.root].alive is False and run.job is not None:
            # It may have ended, or been followed by another job, between the look at its files and Slurm's answer.
            asked, later = run.job, glance(run.root)
            # In place: callers hold the `Glance` of this run.
            for name in later.__struct_fields__:
                setattr(run, name, getattr(later, name))
            if run.job is None or run.job.job_id != asked.job_id:
                seen[run.root] = Seen(None)  # another job has come, which was not asked about
    return seen, problem


def _ask(runs: Iterable[Glance], ended: Sequence[Glance]) -> tuple[dict[Path, Seen], str]:
    seen: dict[Path, Seen] = {}
    at_slurm: list[Glance] = []
    for run in runs:
        if run.job is None or run.job.cluster == "slurm":
            at_slurm.append(run)
        else:
            found = job_state(RunPaths(run.root), run.job)
            unknown = found.state == "UNKNOWN"
            seen[run.root] = Seen(None, detail=found.detail) if unknown else Seen(not found.over)
    if not at_slurm and not ended:
        return seen, ""
    try:
        # By the owners of the directories: the runs of a project may be several users'.
        owners = {os.stat(run.root).st_uid for run in (*at_slurm, *ended)}
        states = asyncio.run(SlurmClient().states(owners))
    except SlurmMissing as error:
        return seen | {run.root: Seen(None) for run in at_slurm}, error.one_line()
    # Slurm is asked for its name where a run has one to compare: a job number means nothing on another cluster. And,
    # where a run is another user's, whether it shows us his jobs.
    asks = any(run.job is not None and run.job.slurm for run in at_slurm) or any(
        is_anothers(run.root) for run in at_slurm
    )
    slurm_conf = _slurm_conf() if asks else {}
    here = slurm_conf.get("ClusterName", "")
    named = {run.job.job_id for run in at_slurm if run.job is not None}
    unnamed = {number: facts for number, facts in states.items() if str(number) not in named}
    for run in at_slurm:
        job = run.job
        if job is None:
            seen[run.root] = _unnamed(run.root, unnamed)
            continue
        # squeue lists what is not over, so a job that is missing is gone.
        state, reason, script, where, comment = _row(states, job)
        # One with the run's own script is its job: the cluster has been renamed.
        if here and job.slurm not in ("", here) and not is_script_of(run.root, script):
            seen[run.root] = Seen(None, detail=elsewhere(job.slurm, here))
            continue
        # Its number may be another job's by now, so for once `scontrol show job` is asked as well.
        if script and not runs_here(run.root, script, where):
            answer = _job_state(run)
            if answer.state == "UNKNOWN":
                seen[run.root] = Seen(None, detail=answer.detail)
                continue
            state, reason = ("", "") if answer.over else (state, reason)
        if not state and hides_jobs(slurm_conf) and is_anothers(run.root):
            seen[run.root] = Seen(None, detail=HIDDEN)
            continue
        left = start_left(comment, job.heard_at) if is_waiting(state) else ""
        seen[run.root] = Seen(bool(state), state, reason, left)
    return seen | _requeued(ended, states), ""


_Rows = Mapping[int, tuple[str, str, str, str, str]]


def _row(states: _Rows, job: Submission) -> tuple[str, str, str, str, str]:
    number = job_number(job.job_id)
    return states.get(-1 if number is None else number, ("", "", "", "", ""))


def _requeued(ended: Sequence[Glance], states: _Rows) -> dict[Path, Seen]:
    """Returns what Slurm says of those runs that are over whose job goes on all the same."""
    seen: dict[Path, Seen] = {}
    for run in ended:
        end = end_of_slurm_job(run)
        if run.job is None or end is None:
            continue
        state, reason, script, where, _ = _row(states, run.job)
        is_its = runs_here(run.root, script, where)
        # A number comes again, and a job that has ended lingers: most need no second question.
        if not state or (not is_its and (run.job.queued_by_us or not is_waiting(state))):
            continue
        # By its own script, in the queue of this cluster: no job of ours has this number and script but that one.
        if (is_its and is_waiting(state)) or was_requeued(end.at, _job_state(run)):
            seen[run.root] = Seen(True, state, reason)
    return seen


def _job_state(run: Glance) -> JobState:
    """As `status` has it, by the whole journal: the part that was read need not have who queued the job."""
    paths = RunPaths(run.root)
    try:
        return job_state(paths, last_job(paths))
    except VerlSlurmError as error:
        return JobState(state="UNKNOWN", over=False, detail=error.one_line())


def _unnamed(root: Path, states: _Rows) -> Seen:
    """Returns what Slurm says of the newest job of a run whose journal names none."""
    found = [job for job in states if trains(root, *states[job][2:4])]
    state, reason, *_ = states[max(found)] if found else ("", "")
    return Seen(bool(state), state, reason)


def _slurm_conf() -> dict[str, str]:
    try:
        return asyncio.run(SlurmClient().config())
    except (SlurmMissing, NotFound):
        return {}


def state_of(run: Glance, seen: Seen | None) -> str:
    """Returns one or two words. A `?` after them: this machine cannot tell whether the lead lives. Pure."""
    if run.error:
        return run.error
    if run.job is None:
        if seen is None or seen.alive is False:
            return "prepared"
        return _in_queue(seen) or ("starting" if seen.alive else "prepared?")
    # The journal's end first: the scheduler may lag behind it. `ask_for` has an answer only of a job that was requeued.
    if isinstance(run.word, Ended) and run.word.is_final and not requeue_after_end(run, seen):
        return run.word.outcome
    if seen is not None and seen.alive is False:
        return "cancelled" if run.is_cancelled else "gone"
    if seen is not None and seen.alive is None and seen.detail.startswith("it is of Slurm cluster"):
        return f"on {run.job.slurm}"
    if seen is not None and (word := _in_queue(seen)):
        return word
    state = str(run.status.get("state") or "")
    its_snapshot = run.status.get("job_id") == run.job.job_id
    # A snapshot of the job before this one says nothing about it.
    of_this_job = its_snapshot and state != "ended" and not isinstance(run.word, Submitted)
    if of_this_job and state == "running" and run.status.get("save_problem"):
        state = "saves fail"
    if seen is not None and seen.alive:
        return state if of_this_job and state else "starting"
    return f"{state if of_this_job and state else 'queued'}?"


def _in_queue(seen: Seen) -> str:
    """Returns the word for a job that does not run; empty: it does, or nothing is known. Pure."""
    if is_stopped(seen.state):
        return "suspended"
    if not is_waiting(seen.state):
        return ""
    # By the reason alone: RESV_DEL_HOLD stays the state of a job that was released and waits for its turn.
    return "held" if is_held(seen.detail) or needed_change(seen.detail) else "queued"
