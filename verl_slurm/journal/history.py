"""The history of a run, from its journal: attempts, their restarts and saves, interruptions, and where the time went.

Pure, and the same whether it is read back or fed event by event. Metrics, `status`, `list`, `report`, `plan` and the
lead ask it, so that they cannot disagree.

* An ATTEMPT lives from `started` to its last word. Only the newest one lives: an older one is fenced out, and what it
  still writes is no part of the run. Nor is what a person's command writes (it has no attempt) a sign of life.
* An OUTAGE (interruption) lasts from its first sign (the cause that the lead found, the hang, the crash, or the last
  word of a lead that died) to the first rollout that is new: then the run does what it has not done before. A loop that
  is not ours reports no rollouts: it is back where its training goes on. An outage that begins before the run is back
  from another ends that one: no second is counted twice. What a user ended, and submitted again, is none.
* INTERVALS are the life of the run without a gap:

| kind | from | to |
| --- | --- | --- |
| queued | a submission, or the last word of an attempt that goes on | the next attempt's start |
| starting | an attempt's start, or the ranks' restart | their first safe point |
| recovering | that safe point, after an interruption | the first new rollout |
| training | the first safe point, or the first new rollout | the first sign of an interruption, or the end |
| hung | the verdict that ranks hang (they were silent before) | their end |
| preempted | the first sign of any other interruption or end | the last word of the attempt, or the restart |
| saving | the request to save and stop | the committed checkpoint |

After an end that is final there is no interval until the run is submitted or started again.

Times are the hosts' clocks, in seconds since 1970; one that went backwards counts as no time. Durations are in seconds.
"""

import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import CHECKPOINT_NAME
from verl_slurm.journal import events as ev
from verl_slurm.journal.causes import SERIES, meaning_of
from verl_slurm.journal.pace import number

IntervalKind = Literal["training", "saving", "preempted", "queued", "starting", "recovering", "hung"]
KINDS: tuple[IntervalKind, ...] = get_args(IntervalKind)
# Each part of the time, with its name in Google's ml-goodput-measurement: steps that count; steps that were thrown
# back and done again; the first part of steps that an interruption cut, and what lies between steps; saves before an
# end; ranks that start and load; leaving nodes, and hanging; waiting for nodes after an attempt, and before the first
# of a submission.
PARTS: dict[str, str] = {
    "useful": "GOODPUT",
    "repeated": "WASTED_PROGRESS_FROM_DISRUPTION",
    "unfinished": "OTHER",
    "saving": "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    "starting": "TPU_INITIALIZATION, TRAINING_PREP, PROGRAM_STARTUP, UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    "preempted": "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    "hung": "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    "requeued": "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    "queued": "",
}

_MOST_EVIDENCE = 1000
_MOST_STEPS = 10_000_000


# ---- what a run is made of


class SaveHistory(msgspec.Struct):
    """One checkpoint that the ranks wrote."""

    event: ev.Saved
    at: float | None
    read_at: float | None = None
    """When it was first read back and found good."""

    @property
    def cost(self) -> tuple[float, float] | None:
        """(seconds, bytes); None: they are not known, or cannot be."""
        seconds, size = number(self.event.seconds), number(self.event.num_bytes)
        # Whatever a journal says: a sum with a NaN would stay one.
        return None if seconds is None or size is None or min(seconds, size) < 0.0 else (seconds, size)


class RestartHistory(msgspec.Struct, kw_only=True):
    """One start of the ranks."""

    standby: bool
    crashed_at: float | None
    """When the ranks before it were lost, in the same attempt."""
    replaced: bool
    """The job went on without the node that was lost then."""
    trained_at: float | None = None
    """Their first safe point, at `step`."""
    step: int = 0


class AttemptHistory(msgspec.Struct, kw_only=True):
    """One start of the Slurm job."""

    number: int
    event: ev.Started
    began: float
    last: float
    """Its last word, so far."""
    queue_s: float | None
    """Since the end of the attempt before, if that was to go on."""
    end: ev.Ended | ev.AttemptFenced | None = None
    is_cancelled: bool = False
    """`verl-slurm cancel` came since."""
    num_nodes: int = 0
    """The most that it trained on or kept spare; 0: the journal does not say."""
    num_crashes: int = 0
    is_degraded: bool = False
    """It left without a verified save."""
    causes: list[tuple[float, ev.Cause]] = []
    restarts: list[RestartHistory] = []
    saves: list[SaveHistory] = []


class Outage(msgspec.Struct, kw_only=True):
    """One interruption. Durations in seconds; None: not known, or not there yet."""

    cause: str
    """One of `causes.CAUSES`."""
    began: str
    """When its first sign was seen (UTC, ISO 8601)."""
    seconds: float | None = None
    """In all, to the first new rollout (or to the end of the run, or to the next interruption); None: it lasts."""
    back: bool = False
    """Whether it ended with the run back at work."""
    save_s: float | None = None
    """From the first sign to the committed emergency checkpoint."""
    queue_s: float | None = None
    """From the last word of one attempt to the start of the next; 0 for a restart in place."""
    start_s: float | None = None
    """From the start of the attempt (in place: from the end of the ranks) to the first safe point."""
    again_s: float | None = None
    """From there to the first new rollout."""
    saved: str = ""
    """The emergency checkpoint."""
    verified: bool = False
    """It was read back and is whole."""
    rollouts_lost: str = ""
    """What the next start found lost of the finished rollouts."""
    resumed: str | None = None
    """What the next ranks started from; empty: from the beginning; None: none have."""
    evidence: str = ""
    """What Slurm or the daemon said at its first sign, cut to 1,000 characters. Empty: a lead died without a word."""
    attempt: int = 0
    """The attempt that it struck."""
    trained: bool = True
    """The ranks had reported work, since they were last started, when it struck."""

    @property
    def tokens_lost(self) -> int | None:
        """0 where the ranks went on from what they had saved when they stopped, or will. Else None."""
        # Finished rollouts are in the ledger. The tokens of micro-batches that were being sampled are not
        # counted.
        goes_on = self.verified if self.resumed is None else self.resumed == self.saved
        return 0 if self.saved and goes_on else None

    def so_far(self, now: datetime) -> float:
        """Seconds from its beginning to `now`."""
        # Never below zero: the journal may be another machine's, with its clock ahead of ours.
        return max((now - datetime.fromisoformat(self.began)).total_seconds(), 0.0)


class LifeInterval(msgspec.Struct, frozen=True):
    """A part of the run's life. Times in seconds since 1970."""

    kind: IntervalKind
    began: float
    ended: float
    attempt: int
    """The attempt that it belongs to; a wait belongs to the one before it. 0: before the first."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class TimeUse(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a run."""

    wall_s: float
    """From the first submission to the end, without the time between an end and the next submission."""
    allocated_s: float
    """From each start of the job to its end."""
    useful_s: float
    goodput: float | None
    """Useful of allocated, 0 to 1, as the metric `verl_goodput_ratio` has it. None: nothing was allocated, or no step
    has a duration."""
    ettr: float | None
    """Effective training time ratio (arXiv:2410.21680): useful of all time, with the queue. None likewise."""
    parts: dict[str, float]
    """Seconds by the names of `PARTS`, in their order, without empty ones. They add up to `wall_s`. A periodic save
    runs beside the training; where the training waited for one, the wait is a part of its step."""


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """The job that a run has, or had last."""

    job_id: str
    cluster: ev.Cluster
    host: str = ""
    """Where a local one was started."""
    slurm: str = ""
    """Name of its Slurm cluster; empty: not known."""
    queued_by_us: bool = False
    """By `submit` or a lead, so that its script and its output lie in RUN/logs. False: not known."""
    heard_at: float | None = None
    """When its newest event was written; None: not known."""
    requeues: int = -1
    """Of it before its newest start that could write; -1: there is none."""
    is_cancelled: bool = False
    """`verl-slurm cancel` was the last that became of it. It counts where nothing else can tell."""


class History:
    """All of it, from the oldest event on. `cluster`, `host`: of the job that wrote before that one."""

    def __init__(
        self, events: Iterable[ev.Event] = (), cluster: ev.Cluster = "slurm", host: str = ""
    ) -> None:
        # Events by kind.
        self.counts: Counter[str] = Counter()
        self.last: ev.Event | None = None
        # Lines of other runs, which count for nothing.
        self.foreign: list[ev.Foreign] = []
        self.first_at: float | None = None
        self.last_at: float | None = None
        self._begin_jobs(cluster, host)
        self._begin_faults()
        self._begin_checkpoints()
        self._begin_lives()
        for event in events:
            self.feed(event)

    def _begin_jobs(self, cluster: ev.Cluster, host: str) -> None:
        # The newest; None: the events name none.
        self.job: Submission | None = None
        # The newest that says whether the run goes on.
        self.word: ev.Submitted | ev.Started | ev.Ended | None = None
        # The newest since the last submission.
        self.end: ev.Ended | None = None
        # The newest.
        self.cause: ev.Cause | None = None
        # `verl-slurm cancel` was the last that became of the newest job.
        self.is_cancelled = False
        # Those whose lead said that it left, also after a newer one had begun.
        self.ended_attempts: dict[int, ev.Ended | ev.AttemptFenced] = {}
        self.avoided: list[ev.Avoid] = []
        self.requeues = {"accepted": 0, "refused": 0}
        self.held: ev.Held | None = None
        # The newest attempt that could not begin, where none has trained since.
        self.start_failed: ev.StartFailed | None = None
        self._cluster, self._host = cluster, host
        self._known_jobs: dict[str, tuple[str, bool]] = {}  # the Slurm cluster, and whether we queued it
        self._arrays: dict[str, str | None] = {}
        self._follows: dict[str, str] = {}
        self._followed_by: dict[str, str] = {}
        self.last_of_job: dict[str, ev.Event] = {}

    def _begin_checkpoints(self) -> None:
        # The newest of each name, in their order.
        self.saves: dict[str, SaveHistory] = {}
        # With those that were made again.
        self.all_saves: list[SaveHistory] = []
        # verified, corrupt or removed unread.
        self.verdicts: dict[str, str] = {}
        # Checkpoint -> when it was judged last: every byte was as written, or it was refused for what no second look
        # would change.
        self.judged_at: dict[str, float] = {}
        # The newest checkpoint since the run last went back, and what was done with it last. An empty name: none
        # since then; two empty texts: the journal names none at all. Retention never takes it, so it is there, or it
        # was lost. One that only nodes have, or whose first reading found it damaged, does not count.
        self.newest_save = "", ""
        # When the newest checkpoint that counts was written; one counts once it was read back. None: there is none.
        self.last_save_at: float | None = None
        # The newest.
        self.restart: ev.Restart | None = None
        # What ranks reported since they first started from the checkpoint of `restart`, if nothing was told lost.
        self.reached: list[ev.Training | ev.FirstRollout] = []
        self._save_before = "", ""

    def _begin_faults(self) -> None:
        # Restarts in a row that came to nothing and were ended by a fault; by a stranger; by the job's time limit
        # before their ranks trained. A restart's `progress` is what it started from (newest verified checkpoint,
        # rollouts in the ledger); one was fruitless where a later one starts from the same. Faults are crashes, a
        # lead that was killed (`orphaned`), and a service that could not be started again. A preempted or requeued
        # restart is no fault, and what the environment stopped has counts of its own.
        self.stuck = self.strangers = self.short = 0
        # Attempts in a row that ended before any training because a node failed a check.
        self.unfit = 0
        # When the run was last requeued in order to grow.
        self.grew_at: float | None = None
        # Of these the last ones in a row that brought no node.
        self.fruitless_growths = 0
        # Those that the newest attempt has lost, oldest first.
        self.lost_nodes: list[str] = []
        self._progress: str | None = None
        self._failed_starts, self._has_trained = 0, False
        # The newest crash in its own words.
        self.last_fault = ""
        self._grows, self._num_nodes = False, 0
        self._left_out: set[str] = set()

    def _begin_lives(self) -> None:
        self.attempts: list[AttemptHistory] = []
        self.outages: list[Outage] = []
        # Starts of the ranks after the first, by cause.
        self.restarts = dict.fromkeys(SERIES, 0)
        self._why, self._has_started = "", False
        self._intervals: list[LifeInterval] = []
        self._kind: IntervalKind | None = None
        self._since = self._began = self._mark = 0.0
        self._interrupted = False
        self._crash: tuple[float, bool] | None = None
        self._outage: Outage | None = None
        # ---- steps; 8 bytes each, where a list of floats takes 32
        self._step_seconds = array("d")
        # Of the steps that count; a step that was interrupted in its middle counts with its last part.
        self.useful_seconds = 0.0
        # Of the steps that were thrown back, and done again.
        self.repeated_seconds = 0.0

    def feed(self, event: ev.Event) -> None:
        """Add one event. One of an unknown kind, or with a field that does not fit, tells of its job alone."""
        if isinstance(event, ev.Foreign):
            self.foreign.append(event)
            return
        if isinstance(event, ev.Submitted) and self._is_late(event):
            self._known_jobs[event.job_id or ""] = (event.slurm, True)
            return
        self.last, now = event, event.at
        self._feed_jobs(event)
        if isinstance(event, ev.Other):
            return
        self.counts[ev.kind_of(event)] += 1
        self._feed_faults(event)
        self._feed_checkpoints(now, event)
        if now is not None:
            self.first_at = now if self.first_at is None else self.first_at
            self.last_at = max(now, self.last_at or now)
            self._feed_lives(now, event)

    # ---- jobs

    def _feed_jobs(self, event: ev.Event) -> None:
        job_id = event.job_id or ""
        self.last_of_job[job_id] = event
        if isinstance(event, ev.Ended | ev.AttemptFenced) and event.attempt is not None:
            self.ended_attempts[event.attempt] = event
        match event:
            case ev.Submitted():
                self.word, self.end, self.held, self.start_failed = event, None, None, None
            case ev.Started(array=array):
                self.word, self.held, self._arrays[job_id] = event, None, array
            case ev.Ended():
                self.word = self.end = event
            case ev.Cause():
                self.cause = event
            case ev.Avoid():
                self.avoided.append(event)
            case ev.Requeue(accepted=accepted):
                self.requeues["accepted" if accepted else "refused"] += 1
            case ev.CancelAsked():
                self.is_cancelled = True
                for attempt in self.attempts[-1:]:
                    attempt.is_cancelled = True
            # Which job is it about; the newest that is not followed by another counts.
            case ev.Successor():
                self._followed_by[event.after] = job_id
        if job_id in self._followed_by and not isinstance(event, ev.Submitted | ev.Successor):
            return  # the last words of the job that another one follows
        # A lead says so too: a run may have been started by hand, through the sbatch template.
        if isinstance(event, ev.Submitted | ev.Successor | ev.Started):
            self.is_cancelled = False
            self._cluster = event.cluster
            self._host = "" if isinstance(event, ev.Successor) else event.host
            slurm, by_us = self._known_jobs.get(job_id, ("", False))
            # Numbers come again: on another cluster, and where a cluster's begin anew.
            another = bool(slurm and event.slurm and slurm != event.slurm)
            if queued := not isinstance(event, ev.Started):
                self._followed_by.pop(job_id, None)
                self._follows[job_id] = event.after if isinstance(event, ev.Successor) else ""
            self._known_jobs[job_id] = (
                event.slurm or slurm * (not queued),
                queued or (by_us and not another),
            )
            if self.job is not None and self.job.job_id == job_id and (queued or another):
                self.job = None
        if job_id:
            slurm, by_us = self._known_jobs.get(job_id, ("", False))
            if self.job is None or job_id != self.job.job_id:
                self.job = Submission(job_id=job_id, cluster=self._cluster, host=self._host)
            requeues = event.requeues if isinstance(event, ev.Started) else self.job.requeues
            self.job = msgspec.structs.replace(
                self.job, slurm=slurm, queued_by_us=by_us, heard_at=event.at, requeues=requeues
            )

    def _is_late(self, event: ev.Submitted) -> bool:
        # The command writes it after sbatch has answered, and may have been stopped in between: its job has ended, and
        # no other begins. A number that was submitted before has come again.
        job_id = event.job_id or ""
        return self.has_ended(job_id) and not self.was_queued(job_id)

    def has_ended(self, job_id: str) -> bool:
        """Whether the last word of this job is an end that is not a requeue."""
        last = self.last_of_job.get(job_id)
        return isinstance(last, ev.Ended) and last.is_final

    def was_queued(self, job_id: str) -> bool:
        """Whether `submit` or a lead queued this job."""
        return self._known_jobs.get(job_id, ("", False))[1]

    def predecessor_of(self, job_id: str) -> str:
        """The job that `job_id` was queued to follow; empty: none."""
        return self._follows.get(job_id, "")

    def successor_of(self, job_id: str) -> str:
        """The job that follows `job_id` already; empty: none."""
        return self._followed_by.get(job_id, "")

    def what_became(self, attempt: int) -> Literal["goes on", "is cancelled", "over"]:
        """What the journal knows of the job of the run's newest attempt. One that waits in the queue goes on."""
        it = next((one for one in self.attempts if one.number == attempt), None)
        cancelled = self.is_cancelled if it is None else it.is_cancelled
        end = self.ended_attempts.get(attempt)
        if isinstance(end, ev.Ended) and (cancelled or end.is_final):
            return "over"
        return "is cancelled" if cancelled else "goes on"

    def cancelled_in_array(self, job_id: str, array_id: str) -> bool:
        """Whether the lead of that task said that it ended by a cancel."""
        last = self.last_of_job.get(job_id)
        cancelled = isinstance(last, ev.Ended) and last.exit_code == ExitCode.CANCELLED
        return cancelled and self._arrays.get(job_id) == array_id

    def ended_well_with(self, checkpoint: str, job_id: str, array_id: str | None) -> bool:
        """Whether this very job, or an earlier task of its array, ended well with `checkpoint`, and no new
        submission came since.
        """
        end = self.end
        if end is None or end.exit_code != ExitCode.OK or end.checkpoint != checkpoint:
            return False
        return end.job_id == job_id or (
            array_id is not None and self._arrays.get(end.job_id or "") == array_id
        )

    def avoided_nodes(self, new: Collection[str], now: datetime, for_s: float) -> tuple[str, ...]:
        """The nodes to name to Slurm, the newest first, and by name among those of one event.

        `new` were found out just now; `now` has a time zone; `for_s`: how long a node stays away.
        """
        # 0 switches it off.
        nodes = dict.fromkeys(sorted(new) if for_s > 0 else ())
        for event in reversed(self.avoided):
            try:
                age_s = (now - datetime.fromisoformat(event.time)).total_seconds()
            except (ValueError, TypeError):
                continue  # damaged, or without a time zone
            if age_s < for_s:
                nodes |= dict.fromkeys(sorted(event.nodes))
        return tuple(nodes)

    # ---- faults in a row

    def _feed_faults(self, event: ev.Event) -> None:
        match event:
            case ev.Submitted():
                self.stuck = self.strangers = self.short = self.unfit = self._failed_starts = 0
            case ev.Held():
                # A job that was held for it, and released, begins to count anew.
                self.held, self.short, self._failed_starts = event, 0, 0
            case ev.StartFailed():
                self.start_failed = event
                self._failed_starts += 1
            # Not each restart: ranks may start, and meet the storage that fails before anything new is done. One that
            # starts from something else proves that the ones before it came to something.
            case ev.Restart(progress=progress):
                if progress != self._progress:
                    self.stuck = self.strangers = self.short = self._failed_starts = 0
                self._progress, self._has_trained = progress, False
            case ev.Training():
                self._has_trained, self.unfit, self.start_failed = True, 0, None
            case ev.FirstRollout() | ev.Verified() | ev.Done():
                self._failed_starts = 0
            # Before the other crashes: no fault of the program's, and with a limit of its own.
            case ev.Crash(kind="stranger"):
                self.strangers += 1
            # Nor is a node that is lost, and has a spare one in its place; nor storage that failed a rank, or a Slurm
            # that was away.
            case ev.Crash(kind=kind, replaced=replaced):
                self.stuck += not (replaced or kind == "environment")
            case ev.Orphaned():
                self.stuck += 1
            # Whether the ranks trained or not: a service may fail at the first request of each attempt.
            case ev.Cause(cause="service", evidence=evidence):
                self.stuck += 1
                self.last_fault = evidence or self.last_fault
            case ev.Cause(cause="time_limit") if not self._has_trained:
                self.short += 1
            case ev.Cause(cause="bad_node"):
                self.unfit += 1
            case ev.Cause(cause="growth"):
                self.grew_at, self._grows = event.at, True
        if isinstance(event, ev.Crash | ev.Orphaned):
            self.last_fault = event.detail or self.last_fault
        self._feed_nodes(event)

    def _feed_nodes(self, event: ev.Event) -> None:
        match event:
            # Slurm gives another set of nodes.
            case ev.Started():
                self.lost_nodes = []
            case ev.Crash(kind="node", node=str(node), replaced=replaced):
                self.lost_nodes = [*(one for one in self.lost_nodes if one != node), node]
                self._left_out = self._left_out | {node} if replaced else self._left_out - {node}
            # One that was not left out is part of the next start again.
            case ev.Restart():
                self.lost_nodes = [node for node in self.lost_nodes if node in self._left_out]
            case ev.NodesChosen(train=train, spare=spare):
                self.lost_nodes = [node for node in self.lost_nodes if node not in {*train, *spare}]
                if len(train) > self._num_nodes:
                    self.fruitless_growths = 0
                else:
                    self.fruitless_growths += self._grows
                self._num_nodes, self._grows = len(train), False

    @property
    def has_trained(self) -> bool:
        """Whether the ranks of any attempt have trained: all that their start needs was there."""
        return any(self.counts[kind] for kind in ("training", "first_rollout", "verified"))

    def no_progress(self, root: Path) -> str:
        """The reason of an end after `stuck` restarts: the last fault in its own words, and what shows more."""
        last = f"; the last one: {self.last_fault}" if self.last_fault else ""
        # Of several nodes, that of the rank that failed first.
        rank = re.search(r"verl-slurm: rank (\d+) \(", self.last_fault)
        logs = f"verl-slurm logs {shell_word(root)}"
        logs += f" --rank {rank[1]} shows more" if rank else " --all lists what each node has printed"
        goes_on = f"once that is corrected, `verl-slurm submit {shell_word(root)}` goes on"
        return f"{self.stuck} restarts in a row crashed without anything new{last}; {logs}; {goes_on}"

    def failed_starts(self, job_id: str, requeues: int) -> int:
        """How many attempts in a row before this one storage or Slurm stopped. `requeues`: of the job so far."""
        its = [one.event.requeues for one in self.attempts if one.event.job_id == job_id]
        # Requeues beyond the last start that could write: attempts whose storage took not even an event.
        # One that could write to the journal says so there; one that could not is missed there, but Slurm has
        # counted it.
        return self._failed_starts + max(requeues - (its[-1] if its else -1) - 1, 0)

    # ---- checkpoints

    def _feed_checkpoints(self, now: float | None, event: ev.Event) -> None:
        match event:
            # It may have gone back, because the user said so, or because newer ones were lost, which was told then.
            case ev.Restart(resume=name):
                self.newest_save = self._save_before = (name, "verified") if name else ("", "begun again")
                if name in self.saves:
                    self.last_save_at = self.saves[name].at  # what is newer was not found good
                elif not name:
                    self.last_save_at = None
                if self.restart is None or self.restart.resume != name:
                    self.reached = []
                self.restart = event
            case ev.Training() | ev.FirstRollout():
                self.reached.append(event)
            case ev.Warned(topic="rollouts"):
                self.reached = []
            case ev.ForceResume(lost=lost) if lost:
                self.newest_save = self._save_before = "", "begun again"
                self.restart = None
            case ev.Saved(name=name):
                # To the end of the order: saved again after the run was thrown back.
                self.saves.pop(name, None)
                self.verdicts.pop(name, None)
                self.saves[name] = save = SaveHistory(event, now)
                self.all_saves.append(save)
                for attempt in self.attempts[-1:]:
                    attempt.saves.append(save)
                if event.on_shared:
                    self._save_before, self.newest_save = self.newest_save, (name, "saved")
                else:
                    self.last_save_at = now  # the ranks have read it back on the nodes' disks
            case ev.Corrupt(name=name) | ev.Pruned(name=name):
                self.verdicts[name] = "corrupt" if isinstance(event, ev.Corrupt) else "removed unread"
                if self.newest_save == (name, "saved"):
                    self.newest_save = self._save_before
            case ev.Verified(name=name):
                self.verdicts[name] = "verified"
                # From here on it counts, by the time of its writing.
                self.last_save_at = now
                if name in self.saves:
                    written = self.saves[name]
                    self.last_save_at, written.read_at = written.at, written.read_at or now
            case ev.Adopted(checkpoints=names):
                newest = max(names, key=_order, default="")
                if _order(newest) > _order(self.newest_save[0]):
                    self.newest_save = newest, "taken over"
        match event:
            case ev.Verified(name=name) | ev.TierFetched(name=name) if _order(name) >= _order(
                self.newest_save[0]
            ):
                self.newest_save = name, "verified"
        match event:
            case (
                ev.Verified(name=name)
                | ev.Scrubbed(good=True, name=name)
                | ev.Scrubbed(judged=True, name=name)
            ):
                if name and now is not None:
                    self.judged_at[name] = now

    def measured_saves(self, newest: int) -> list[tuple[int, float]]:
        """(bytes, seconds) of the `newest` last saves to shared storage, oldest first."""
        found: list[tuple[int, float]] = []
        for save in reversed(self.all_saves):
            if len(found) == newest:
                break
            if save.event.on_shared and save.cost is not None and min(save.cost) > 0.0:
                found.append((int(save.cost[1]), save.cost[0]))
        return found[::-1]

    def on_nodes_alone(self, present: Collection[str], since: int = 0) -> dict[str, str]:
        """Checkpoint -> the nodes whose disks alone hold it: they are not in this job, or have lost it.

        `present`: the names on shared storage. `since`: the first attempt whose checkpoints count.
        """
        # Which nodes held it follows from the attempt's own Started.
        where = {one.number: one.event.nodes for one in self.attempts}
        # What is older than a save to shared storage is not missed.
        alone = list(takewhile(lambda save: not save.event.on_shared, reversed(self.saves.values())))
        return {
            save.event.name: where.get(save.event.attempt or 0, "")
            for save in reversed(alone)
            if (save.event.attempt or 0) >= since and save.event.name not in present
        }

    # ---- lives

    def _feed_lives(self, now: float, event: ev.Event) -> None:
        former = self.attempts[-1] if self.attempts else None
        match event:
            case ev.Submitted() | ev.Successor():
                # The command writes it after sbatch has answered: its job may have started before.
                if isinstance(event, ev.Submitted) and former and event.job_id != former.event.job_id:
                    self._why = "submitted"
                # Another job of a run that is at work, or waits already, changes nothing.
                if self._kind is None:
                    self._to("queued", now)
            case ev.Started(attempt=int(attempt)) if former is None or attempt >= former.number:
                self._begin_attempt(attempt, now, event, former)
            case _ if former is not None and event.attempt == former.number and former.end is None:
                # Never backwards, when a host's clock is set or another host's is behind.
                former.last = max(former.last, now)
                self._go_on(now, event, former)

    def _begin_attempt(
        self, attempt: int, now: float, event: ev.Started, former: AttemptHistory | None
    ) -> None:
        queue_s = None
        if former is not None:
            if isinstance(former.end, ev.Ended):
                queue_s = None if former.end.is_final else _between(former.last, now)
            else:  # the one before ended without a word
                self._to("queued", max(former.last, self._since))
                self._interrupted, self._why = True, self._why or "lead_lost"
                if self._outage is None:
                    self._begin_outage("lead_lost", former.last)
            # From the last word of the former attempt: that is when the nodes were given back, as far as the journal
            # knows.
            if self._outage is not None:
                self._outage.queue_s = _between(former.last, now)
        self._to("starting", now)
        self._mark, self._crash = now, None
        self.attempts.append(
            AttemptHistory(number=attempt, event=event, began=now, last=now, queue_s=queue_s)
        )

    def _go_on(self, now: float, event: ev.Event, attempt: AttemptHistory) -> None:
        match event:
            case ev.Restart():
                self._start_ranks(now, event, attempt)
            case ev.Training() | ev.FirstRollout():
                self._train(now, event, attempt)
            case ev.Save(stop=True):
                self._to("saving", now)
            case ev.Saved() | ev.SaveFailed() if self._kind == "saving":
                self._to("preempted", now)
            case ev.Cause(cause=cause, evidence=evidence):
                attempt.causes.append((now, event))
                meaning = meaning_of(cause)
                self._why = meaning.series or self._why
                # A save that an operator asked for, a suspended job: the attempt goes on.
                if meaning.ended_by:
                    self._fail(now, cause if meaning.goes_on else "", evidence)
            case ev.Hang(detail=detail):
                self._fail(now, "hang", detail, "hung")
            case ev.Crash(cause=cause, detail=detail):
                attempt.num_crashes += 1
                self._crash, self._why = (now, event.replaced), cause
                self._fail(now, cause, detail)
            case ev.Orphaned(detail=detail):
                self._why = "lead_lost"
                self._fail(now, "lead_lost", detail)
            case ev.Degraded():
                attempt.is_degraded = True
            case ev.NodesChosen(train=train, spare=spare):
                attempt.num_nodes = max(attempt.num_nodes, len(train) + len(spare))
            case ev.Ended() | ev.AttemptFenced():
                attempt.end = event
                final = isinstance(event, ev.Ended) and event.is_final
                if final:
                    self._end_outage(now, back=event.exit_code == ExitCode.OK)
                self._to(None if final else "queued", now)
        if self._outage is not None and self._outage.resumed is None:
            self._note(now, event, self._outage)

    def _note(self, now: float, event: ev.Event, outage: Outage) -> None:
        """What is said between the first sign and the ranks' restart; after it, a save belongs to the next outage."""
        match event:
            case ev.Saved(name=name, emergency=True):
                outage.saved, outage.save_s = name, _between(self._began, now)
            case ev.Verified(name=name) if name == outage.saved:
                outage.verified = True
            case ev.Warned(topic="rollouts", text=text):
                outage.rollouts_lost = text[:_MOST_EVIDENCE]

    def _start_ranks(self, now: float, event: ev.Restart, attempt: AttemptHistory) -> None:
        # The first start of the ranks restarts nothing.
        if self._has_started:
            self.restarts[self._why or "other"] += 1
        self._has_started, self._why = True, ""
        crashed_at, replaced = self._crash or (None, False)
        attempt.restarts.append(
            RestartHistory(standby=event.standby, crashed_at=crashed_at, replaced=replaced)
        )
        self._crash = None
        self._to("starting", now)
        if self._outage is not None:
            self._outage.resumed = event.resume or ""
            # Set already if the scheduler came between; a restart in place has no queue.
            self._outage.queue_s = self._outage.queue_s or 0.0

    def _train(self, now: float, event: ev.Training | ev.FirstRollout, attempt: AttemptHistory) -> None:
        is_first = isinstance(event, ev.Training)
        # A loop that is not ours reports no rollouts, so that what it does again is not known: it is back at once.
        is_back = not is_first or event.phase == "step_end"
        for restart in attempt.restarts[-1:]:
            if restart.trained_at is None:
                restart.trained_at, restart.step = now, event.step
        self._interrupted = self._interrupted and not is_back
        self._to("recovering" if self._interrupted else "training", now)
        outage = self._outage
        if outage is not None and outage.resumed is not None:
            if is_first:
                outage.start_s, self._mark = _between(self._mark, now), now
            else:
                outage.again_s = _between(self._mark, now)
            if is_back:
                self._end_outage(now, back=True)

    def _fail(self, now: float, cause: str, evidence: str, kind: IntervalKind = "preempted") -> None:
        self._interrupted = True
        # A crash of ranks that are saving: the save goes on, or fails by itself.
        if self._kind != "saving":
            self._to(kind, now)
        # The run is not to go on, so that it is no outage.
        if not cause:
            return
        if self._outage is None or self._outage.resumed is not None:
            # A new interruption before the run is back: no second may count in both.
            self._end_outage(now, back=False)
            self._begin_outage(cause, now, evidence)
            self._mark = now
        else:
            self._mark = max(self._mark, now)  # more of the same: a hang's crash, a crash's requeue

    def _begin_outage(self, cause: str, now: float, evidence: str = "") -> None:
        attempt, self._began = self.attempts[-1], now
        self._outage = Outage(
            cause=cause,
            began=datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds"),
            evidence=evidence[:_MOST_EVIDENCE],
            attempt=attempt.number,
            trained=bool(attempt.restarts) and attempt.restarts[-1].trained_at is not None,
        )
        self.outages.append(self._outage)

    def _end_outage(self, now: float, *, back: bool) -> None:
        if self._outage is not None:
            self._outage.seconds, self._outage.back = _between(self._began, now), back
        self._outage = None

    def _to(self, kind: IntervalKind | None, now: float) -> None:
        if kind == self._kind:
            return
        self._intervals += self._open_interval(now)
        self._kind, self._since = kind, max(now, self._since)

    def intervals(self, now: float) -> list[LifeInterval]:
        """All intervals, oldest first, the last of which lasts until `now` unless the run has ended."""
        return [*self._intervals, *self._open_interval(now)]

    def _open_interval(self, now: float) -> list[LifeInterval]:
        if self._kind is None or now <= self._since:
            return []
        attempt = self.attempts[-1].number if self.attempts else 0
        return [LifeInterval(self._kind, self._since, now, attempt)]

    def outages_until(self, now: datetime) -> list[Outage]:
        """`outages`; the last one has the time in the queue so far, if the run waits there."""
        if self._outage is None or self._kind != "queued":
            return self.outages
        waits_s = _between(self._since, now.timestamp())
        return [*self.outages[:-1], msgspec.structs.replace(self._outage, queue_s=waits_s)]

    @property
    def interrupted_s(self) -> float:
        """Of all outages that are over."""
        return round(sum(outage.seconds or 0.0 for outage in self.outages), 3)

    def allocated_seconds(self, now: float | None = None) -> float:
        """From each start to its end, without the queue. `now`: of one that lives; None: its last word."""
        lived = sum(one.last - one.began for one in self.attempts)
        newest = self.attempts[-1] if self.attempts else None
        if newest is None or newest.end is not None or now is None:
            return lived
        return lived + max(now, newest.began) - newest.last

    @property
    def num_lossy(self) -> int:
        """Outages that lost work: a crash of the ranks, an end without a verified save, or without a word."""
        # A preemption or a time limit that was answered with a verified checkpoint loses nothing, and no
        # periodic save would have helped. The newest attempt may still be at work.
        silent = {one.number for one in self.attempts[:-1]} - self.ended_attempts.keys()
        return sum(one.num_crashes + (one.is_degraded or one.number in silent) for one in self.attempts)

    # ---- steps

    def step_took(self, step: int, seconds: float) -> None:
        """The `step`-th step is done, counted from 1. What was done beyond it before is no part of the run any more."""
        # Bounded: a damaged number would ask for memory for all steps up to it.
        if 1 <= step <= _MOST_STEPS and 0.0 <= seconds < float("inf"):
            if len(self._step_seconds) >= step:
                # The run was thrown back, and does these steps again.
                self.repeated_seconds += sum(self._step_seconds[step - 1 :])
                del self._step_seconds[step - 1 :]
                self.useful_seconds = sum(self._step_seconds)
            self._step_seconds.extend([0.0] * (step - 1 - len(self._step_seconds)))
            self._step_seconds.append(seconds)
            self.useful_seconds += seconds

    def feed_row(self, row: Mapping[str, Any]) -> None:
        """Add a line of `steps.jsonl`; one without a duration is passed over."""
        step, seconds = number(row.get("step")), number(row.get("step_s"))
        if step is not None and seconds is not None:
            self.step_took(int(step), seconds)

    def goodput(self, now: float) -> float | None:
        """Useful of allocated seconds, 0 to 1; None before the first second."""
        allocated = self.allocated_seconds(now)
        return min(self.useful_seconds / allocated, 1.0) if allocated > 0.0 else None

    def time_use(self, now: float) -> TimeUse:
        """The use of the time until `now`, by the journal and all steps."""
        seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        intervals, trained, before = self.intervals(now), 0.0, 0.0
        for interval in intervals:
            if interval.kind in ("training", "recovering"):
                trained += interval.seconds
            # A wait that follows an attempt belongs to its interruption. After a final end there is a gap before the
            # wait.
            elif interval.kind == "queued" and before == interval.began:
                seconds["requeued"] += interval.seconds
            else:
                seconds[interval.kind] += interval.seconds
            before = interval.ended
        # Clamped: the first step of a start also counts what its ranks did before their first safe point.
        seconds["useful"] = min(self.useful_seconds, trained)
        seconds["repeated"] = min(self.repeated_seconds, trained - seconds["useful"])
        seconds["unfinished"] = trained - seconds["useful"] - seconds["repeated"]
        wall = sum(interval.seconds for interval in intervals)
        measured = self.useful_seconds > 0.0
        return TimeUse(
            wall_s=round(wall, 3),
            allocated_s=round(self.allocated_seconds(now), 3),
            useful_s=round(self.useful_seconds, 3),
            goodput=self.goodput(now) if measured else None,
            ettr=min(self.useful_seconds / wall, 1.0) if measured and wall > 0.0 else None,
            parts={name: round(value, 3) for name, value in seconds.items() if value > 0.0},
        )


def mean_time_between(num_lossy: int, run_s: float, expected_s: float) -> float:
    """Seconds between outages that lose work: the inverse of the posterior mean rate under a Gamma prior of
    one in `expected_s` (above 0), (1 + lossy) / (expected_s + run_s).
    """
    # What is seen in a short time changes little, and what is seen in a long time outweighs any belief.
    return (expected_s + run_s) / (1 + num_lossy)


def interruption_facts(
    outages: Sequence[Outage], now: datetime, *, has_ledger: bool = True
) -> dict[str, Any]:
    """The sum, and each outage with its parts, for `--json`. One that lasts has its time so far."""
    each = []
    for one in outages:
        lasts = one.seconds is None
        row = {**msgspec.to_builtins(one), "tokens_lost": one.tokens_lost, "lasts": lasts}
        each.append(row | ({"seconds": round(one.so_far(now), 3)} if lasts else {}))
    return {
        "count": len(each),
        "seconds": round(sum(row["seconds"] for row in each), 3),
        "queue_s": round(sum(one.queue_s or 0.0 for one in outages), 3),
        # None: not known, as the tokens of unfinished micro-batches are not counted.
        "tokens_lost": 0 if all(one.tokens_lost == 0 for one in outages) else None,
        "has_ledger": has_ledger,
        "each": each,
    }


def cancelled_task(events: Iterable[ev.Event], job_id: str) -> str:
    """The job that `verl-slurm cancel` ended, where the run did not go on since; empty: none."""
    # The next task of a chain starts by itself, whatever became of the one before it. One that only said that
    # the run was cancelled did not go on with it: the task after that one must not, either.
    job = asked = ""
    for event in events:
        match event:
            # The job that a cancel is meant for: the last one that started, but not the one that asks.
            case ev.Started() if event.job_id != job_id:
                job = event.job_id or ""
            # Another job has started ranks since, so the run went on.
            case ev.Restart() if event.job_id not in (asked, job_id):
                asked = ""
            # A person wants the run to go on.
            case ev.Submitted():
                asked = ""
            case ev.CancelAsked():
                asked = job
    return asked


def since(events: Sequence[ev.Event], *kinds: type[ev.Event]) -> list[ev.Event]:
    """The events after the newest of these kinds, oldest first; all if there is none."""
    return list(takewhile(lambda event: not isinstance(event, kinds), reversed(events)))[::-1]


def _order(name: str) -> tuple[int, int]:
    match = CHECKPOINT_NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, -1)


def _between(earlier: float, later: float) -> float:
    return round(max(later - earlier, 0.0), 3)
