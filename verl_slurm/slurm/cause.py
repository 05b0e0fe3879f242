"""Why were we woken? Decided from what Slurm says, never from a signal alone. Pure.

What `scontrol show job` shows, in this order, measured on 22.05.8 (two nodes, GraceTime=8, KillWait=5,
SlurmdTimeout=10; the outputs themselves are the golden files of the tests):

* preemption: RUNNING, PreemptTime set, EndTime = end of the grace time. TERM comes only after it (8 s here:
  Slurm looks now and then); with it COMPLETING, Restarts+1, PreemptTime None; then PENDING Reason=BeginTime.
* the same with --no-requeue: RUNNING as above; COMPLETING, Restarts unchanged, PreemptTime set; PREEMPTED.
* time limit: nothing at the warning: RUNNING, EndTime as ever. TERM up to 28 s after EndTime, with it
  COMPLETING, Reason=TimeLimit, Restarts unchanged; then TIMEOUT.
* scancel: at once COMPLETING, Reason None, Restarts unchanged, EndTime = now; then CANCELLED.
* scancel in the grace time: the same, with PreemptTime still set, to the grace time's beginning.
* PreemptMode=CANCEL: RUNNING as above in the grace time, if there is one; then COMPLETING, Restarts unchanged,
  PreemptTime = EndTime = now; then PREEMPTED. `scontrol requeue` is taken until KillWait is over.
* scancel -b -s USR1: nothing.
* scontrol requeue by anyone: at once COMPLETING, Restarts+1 (requeuehold: Reason=job_requeued_in_held_state).
* a node lost: nothing for 2 to 3 times SlurmdTimeout (27 and 30 s); then COMPLETING, Restarts+1, NodeList =
  the nodes left. A node set DOWN: the same at once.
* scontrol suspend: SUSPENDED.

So Restarts decides first, then the state, then PreemptTime: in the grace time a user's scancel still shows
PreemptTime, and only COMPLETING with Restarts unchanged and a PreemptTime before EndTime tells it from the preemption.
"""

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Literal

import msgspec

from verl_slurm.slurm.parse import JobFacts

__all__ = ["WARNING_SLACK_S", "Cause", "CauseKind", "Trigger", "decide_cause"]

Trigger = Literal["warning", "term", "node_link", "poll"]
"""What made us ask: a warning signal (USR1, or the CONT that newer Slurm sends), TERM, a node's agent gone
silent, or a look of our own."""

CauseKind = Literal[
    "preemption", "time_limit", "operator", "cancel", "requeued", "node_lost", "suspended", "none", "unknown"
]

WARNING_SLACK_S = 60
"""sbatch(1): the warning of `--signal` may come up to 60 s early (seen: 2 s and 13 s)."""


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """What is happening to the job, and what shows it.

    Called by: the lead, which writes it into events.jsonl before it acts.
    """

    kind: CauseKind
    """`none`: all is well. `unknown`: Slurm cannot be asked, or says something that fits nothing."""
    evidence: str
    deadline: datetime | None = None
    """When Slurm will end the job (EndTime; in truth up to 30 s later, then KillWait). None: not known, or it
    is being ended now and KillWait runs."""

    @property
    def ends_job(self) -> bool:
        """Whether this incarnation is over soon, whatever we do."""
        return self.kind in {"preemption", "time_limit", "cancel", "requeued", "node_lost"}

    @property
    def may_requeue(self) -> bool:
        """Whether asking for a requeue is right: the job is to go on, and nobody has asked yet."""
        return self.kind in {"preemption", "time_limit"}


def decide_cause(
    trigger: Trigger,
    facts: JobFacts | None,
    *,
    own_restarts: int,
    signal_lead_s: int,
    now: datetime,
    time_limit_warned: bool = False,
    lost_nodes: Collection[str] = (),
) -> Cause:
    """One of the kinds above.

    Args:
        trigger: what made us ask.
        facts: the job as read after that; None: Slurm did not answer.
        own_restarts: SLURM_RESTART_COUNT of this incarnation, 0 where unset.
        signal_lead_s: N of `--signal=B:USR1@N`.
        now: UTC.
        time_limit_warned: Slurm's one warning of the time limit has already come.
        lost_nodes: the job's nodes that Slurm calls DOWN or not responding.
    """
    if facts is None:
        return Cause(kind="unknown", evidence=f"{trigger}, and Slurm does not answer")
    shown = _shown(facts, own_restarts)
    if facts.restarts > own_restarts:
        if lost_nodes:
            return Cause(kind="node_lost", evidence=f"{shown}; lost: {', '.join(sorted(lost_nodes))}")
        return Cause(kind="requeued", evidence=shown)
    if facts.is_running:
        return _running(trigger, facts, shown, signal_lead_s, now, time_limit_warned, lost_nodes)
    if facts.state == "SUSPENDED":
        return Cause(kind="suspended", evidence=shown)
    if facts.reason == "TimeLimit" or facts.state in {"TIMEOUT", "DEADLINE"}:
        return Cause(kind="time_limit", evidence=shown)
    if facts.state == "NODE_FAIL":
        return Cause(kind="node_lost", evidence=shown)
    # one that may not be requeued, or that PreemptMode=CANCEL ends, keeps its Restarts when preempted
    if facts.state == "PREEMPTED" or facts.ended_by_preemption:
        return Cause(kind="preemption", evidence=shown)
    if facts.state == "COMPLETING" or facts.state.startswith("CANCELLED"):
        return Cause(kind="cancel", evidence=f"{shown}: ended by its user or an administrator")
    return Cause(kind="unknown", evidence=shown)


def _running(
    trigger: Trigger,
    facts: JobFacts,
    shown: str,
    signal_lead_s: int,
    now: datetime,
    time_limit_warned: bool,
    lost_nodes: Collection[str],
) -> Cause:
    if facts.preempt_time is not None:
        return Cause(kind="preemption", evidence=shown, deadline=facts.end_time)
    if lost_nodes:
        return Cause(kind="node_lost", evidence=f"{shown}; lost: {', '.join(sorted(lost_nodes))}")
    if trigger == "warning":
        if facts.end_time is not None and not time_limit_warned:
            left = (facts.end_time - now).total_seconds()
            if facts.end_time - now <= timedelta(seconds=signal_lead_s + WARNING_SLACK_S):
                return Cause(
                    kind="time_limit",
                    evidence=f"{shown}, {left:.0f} s to the time limit",
                    deadline=facts.end_time,
                )
        return Cause(kind="operator", evidence=f"{shown}: a warning that Slurm has no reason for")
    if trigger == "term":
        return Cause(kind="operator", evidence=f"{shown}: a TERM that is not Slurm's end of the job")
    return Cause(kind="none", evidence=shown)


def _shown(facts: JobFacts, own_restarts: int) -> str:
    """The deciding fields as one line."""
    preempt = "None" if facts.preempt_time is None else facts.preempt_time.isoformat()
    end = "None" if facts.end_time is None else facts.end_time.isoformat()
    return (
        f"JobState={facts.state} Reason={facts.reason} Restarts={facts.restarts} (ours {own_restarts}) "
        f"PreemptTime={preempt} EndTime={end}"
    )
