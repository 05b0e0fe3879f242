"""Decides why the lead was woken, from what Slurm reports, never from a signal alone. Pure.

`scontrol show job` shows the following, in this order, measured on 22.05.8 (two nodes, GraceTime=8, KillWait=5,
SlurmdTimeout=10; the outputs themselves are the golden files of the tests):

* preemption: RUNNING, PreemptTime set, EndTime = end of the grace time. TERM comes only after it (8 s here:
  Slurm looks now and then); with it COMPLETING, Restarts+1, PreemptTime None; then PENDING Reason=BeginTime.
* the same with --no-requeue: RUNNING as above; COMPLETING, Restarts unchanged, PreemptTime set; PREEMPTED.
* the same with PreemptMode=CANCEL, and with GraceTime=0 without the RUNNING: as with --no-requeue, and Requeue=1.
* time limit: nothing at the warning: RUNNING, EndTime unchanged. TERM up to 28 s after EndTime, with it
  COMPLETING, Reason=TimeLimit, Restarts unchanged; then TIMEOUT.
* scancel: at once COMPLETING, Reason None, Restarts unchanged, EndTime = now; then CANCELLED. Slurm
  shows the author, its user or an administrator, in sacct alone (`CANCELLED by UID`).
* scancel in the grace time: the same, with PreemptTime still set, to the grace time's beginning.
* scancel -b -s USR1: nothing.
* scontrol requeue by anyone: at once COMPLETING, Restarts+1 (requeuehold: Reason=job_requeued_in_held_state).
* a node lost: nothing for 2 to 3 times SlurmdTimeout (27 and 30 s); then COMPLETING, Restarts+1, NodeList =
  the nodes left. A node set DOWN: the same at once. 23.02 and newer also name it: FailedNode=.
* a node lost or DOWN with --no-requeue: COMPLETING, Reason=NodeDown, Restarts unchanged; then NODE_FAIL.
* the batch process killed: COMPLETING, Reason=JobLaunchFailure (22.05) or `RaisedSignal:9(Killed)` (23.02 and
  newer), Restarts unchanged; then FAILED. Out of memory: Reason=OutOfMemory; then OUT_OF_MEMORY. We hear of neither
  as the lead, which is that process; its agents do (`requeue_rules.py`).
* scontrol suspend: SUSPENDED. scancel -s STOP: STOPPED (the steps stand still, we go on).

So Restarts decides first, then the state, then PreemptTime.

What a lead never sees of its own job, from Slurm's source: BOOT_FAIL, CONFIGURING, DEADLINE (before its start:
--deadline takes effect as EndTime), REQUEUED, REQUEUE_HOLD, REQUEUE_FED, SPECIAL_EXIT, EXPEDITING, RESV_DEL_HOLD (it
waits, with Restarts+1: `requeued`), REVOKED (another cluster of a federation started it), STAGE_OUT (after its end). A
task of an array has a number and a record of its own, and is read like any job; so has the first component of a
heterogeneous job, and Slurm preempts, ends and requeues all components together. What differs between versions is in
docs/slurm-versions.md.
"""

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Literal

import msgspec

from verl_slurm.journal.causes import CauseKind
from verl_slurm.slurm.facts import JobFacts

Trigger = Literal["warning", "requeue_wish", "term", "poll"]
"""Reason for the question: a warning signal (USR1, or the CONT that newer Slurm sends), USR2 (`verl-slurm requeue`),
TERM, or a routine look of our own."""

WARNING_SLACK_S = 60
"""sbatch(1): the warning of `--signal` may come up to 60 s early (seen: 2 s and 13 s)."""


class JobCause(msgspec.Struct, frozen=True, kw_only=True):
    """The event that the job meets, and its evidence."""

    kind: CauseKind
    """`operator`: wants a save. `operator_requeue`: wants a save, with all the time that it needs, and the job
    requeued. `none`: all is well. `unknown`: Slurm cannot be asked, or reports something that fits nothing. `failed`:
    Slurm ends the job because something broke (a node of one that it may not requeue), and it will not run again by
    itself. An agent reports these, never Slurm: `reclaimed`, the cloud takes a node back; `bad_node`, a node failed a
    check before its ranks started; `service`, one that the run needs cannot be started again. The lead itself finds
    `growth`: idle nodes for a run that has fewer than it may have."""
    evidence: str
    deadline: datetime | None = None
    """Time at which Slurm will end the job (EndTime; in truth up to 30 s later, then KillWait). None: not known, or the
    job is being ended now and KillWait runs."""


def decide_cause(
    trigger: Trigger,
    facts: JobFacts,
    *,
    own_restarts: int,
    signal_lead_s: float,
    now: datetime,
    lost_nodes: Collection[str] = (),
    slack_s: float = WARNING_SLACK_S,
) -> JobCause:
    """Decides which of the kinds above applies.

    Args:
        facts: the job as read after the trigger.
        own_restarts: SLURM_RESTART_COUNT of this attempt, 0 if unset.
        signal_lead_s: N of `--signal=B:USR1@N`, or what a short time limit leaves of it.
        lost_nodes: the job's nodes that Slurm calls DOWN or not responding.
        slack_s: how much earlier than `signal_lead_s` a warning may come.
    """
    shown = _shown(facts, own_restarts)
    # Restarts decides first: it has risen as soon as Slurm requeues, whatever the other fields still show.
    if facts.restarts > own_restarts:
        if lost_nodes or facts.failed_node:
            # 23.02 and newer name it while the job completes; on 22.05 the caller has asked for the nodes.
            lost_nodes = {*lost_nodes, *([facts.failed_node] if facts.failed_node else [])}
            return JobCause(kind="node_lost", evidence=f"{shown}; lost: {', '.join(sorted(lost_nodes))}")
        return JobCause(kind="requeued", evidence=shown)
    # Then the state. PreemptTime alone does not decide: a user's scancel in the grace time still shows it.
    if facts.is_running:
        return _running(trigger, facts, shown, signal_lead_s + slack_s, now, lost_nodes)
    # Nothing runs and nothing is lost: the ranks stand still where they are.
    if facts.state == "SUSPENDED":
        return JobCause(kind="suspended", evidence=shown)
    # The job is being ended from here on, with Restarts unchanged, and Slurm's Reason tells what is no cancel.
    if facts.reason == "TimeLimit" or facts.state in {"TIMEOUT", "DEADLINE"}:
        if facts.ended_before_its_limit:
            shown = f"a limit of its account or QOS, such as a budget that is used up, not its own; {shown}"
        return JobCause(kind="time_limit", evidence=shown)
    # A lost node of a job that may not be requeued looks like a scancel but for its Reason.
    if facts.failed or facts.state == "NODE_FAIL":
        return JobCause(kind="failed", evidence=shown)
    # PreemptMode=CANCEL and --no-requeue: told from a scancel by a PreemptTime that is the EndTime, by the JSON of
    # 23.11 and newer, or by a partition without a grace time to cancel in (`SlurmClient.job`).
    if facts.preempted:
        return JobCause(kind="preemption", evidence=shown)
    # What nothing else explains counts as a cancel: no cancel is ever undone.
    if facts.state == "COMPLETING" or facts.state.startswith("CANCELLED"):
        return JobCause(kind="cancel", evidence=f"{shown}: ended by its user or an administrator")
    return JobCause(kind="unknown", evidence=shown)


def _running(
    trigger: Trigger,
    facts: JobFacts,
    shown: str,
    warned_s: float,
    now: datetime,
    lost_nodes: Collection[str],
) -> JobCause:
    # EndTime has become the end of the grace time.
    if facts.preempt_time is not None:
        return JobCause(kind="preemption", evidence=shown, deadline=facts.end_time)
    if lost_nodes:
        return JobCause(kind="node_lost", evidence=f"{shown}; lost: {', '.join(sorted(lost_nodes))}")
    # Slurm shows nothing at the warning of a time limit: that EndTime is near is all the evidence there is.
    may_be_warned = trigger in ("warning", "requeue_wish") or facts.state == "STOPPED"
    if may_be_warned and facts.end_time is not None:
        left = (facts.end_time - now).total_seconds()
        if facts.end_time - now <= timedelta(seconds=warned_s):
            return JobCause(
                kind="time_limit",
                evidence=f"{shown}, {left:.0f} s to the time limit",
                deadline=facts.end_time,
            )
    # `scancel -s STOP` stops the steps; the batch process, which is the lead, goes on.
    if facts.state == "STOPPED":
        return JobCause(kind="suspended", evidence=f"{shown}: its steps were stopped by a signal")
    if trigger == "requeue_wish":
        return JobCause(kind="operator_requeue", evidence=f"{shown}: a requeue was asked for")
    if trigger == "warning":
        return JobCause(kind="operator", evidence=f"{shown}: a save was asked for, and Slurm shows no reason")
    # Slurm's own TERM comes with COMPLETING or a PreemptTime; this one was sent by a person or a program.
    if trigger == "term":
        return JobCause(kind="operator", evidence=f"{shown}: a TERM that is not Slurm's end of the job")
    return JobCause(kind="none", evidence=shown)


def _shown(facts: JobFacts, own_restarts: int) -> str:
    """Returns the deciding fields as one line."""
    preempt = "None" if facts.preempt_time is None else facts.preempt_time.isoformat()
    end = "None" if facts.end_time is None else facts.end_time.isoformat()
    line = (
        f"JobState={facts.state} Reason={facts.reason} Restarts={facts.restarts} (ours {own_restarts}) "
        f"PreemptTime={preempt} EndTime={end}"
    )
    more = {"FailedNode": facts.failed_node, "ends as": facts.ended_as}
    return " ".join([line, *(f"{name}={value}" for name, value in more.items() if value)])
