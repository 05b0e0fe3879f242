"""Decides what may be requeued and how, what became of a requeue, and which answers of Slurm count. Pure.

`--requeue=expedite`: the job comes back at once, before all others, on nodes that are kept for it. Slurm's source
(25.11, job_mgr.c; release notes: "Expedited Requeue") means this for our runs:

* a node is lost: the job is requeued as before, but is eligible at once instead of after cred_expire (120 s). It is
  first in the queue, and the remaining nodes are kept for it. That is the purpose: in a full cluster a requeued job
  waits for days.
* `scontrol requeue`, a preemption with PreemptMode=REQUEUE: no 120 s; its place in the queue is unchanged.
* while it waits so (JobState=EXPEDITING) its user cannot change it: neither a start time nor nodes to avoid.
* a batch process that leaves with an error is requeued if an Epilog failed. Otherwise the job is HELD instead of
  FAILED, up to 25.11.2 even after exit code 0. So a lead that ends permanently sets `Requeue=0` first
  (`SlurmAllocation.withdraw`), as before every such end.

It needs a new enough sbatch and `SlurmctldParameters=enable_expedited_requeue`; without the latter the job is refused.
Both are read; no version is compared.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Literal

import msgspec

from verl_slurm.slurm.facts import JobFacts
from verl_slurm.slurm.runner import Completed


class RequeueOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a request to requeue, as read back from Slurm."""

    kind: Literal["requeued", "already_requeued", "cancelled", "forbidden", "refused", "unconfirmed"]
    """`requeued`: by us. `already_requeued`: Slurm or somebody was first. `cancelled`: the user has ended the job, and
    it stays so. `forbidden`: this job may not be requeued, another one may follow it. `refused`: Slurm refused.
    `unconfirmed`: the request was lost on its way (it may have arrived), or Slurm accepted it, but reading back fails.
    """
    detail: str
    start_time: datetime | None = None
    """The earliest start of the next run, as Slurm has it. It holds only if the job has left all its nodes by then; one
    that is still completing gets Slurm's own delay on top (measured: 10 s asked, gone after 14 s, so 25 s more with
    cred_expire=25). So end the ranks first, and leave at once."""
    delay_kept: bool = False
    """Whether that is the short delay that was requested."""
    seconds: float = 0.0

    @property
    def will_run_again(self) -> bool:
        """Returns whether the job is queued."""
        return self.kind in {"requeued", "already_requeued"}


def refuse_requeue(facts: JobFacts, own_restarts: int) -> RequeueOutcome | None:
    """Returns why the job must not be requeued (any more), by facts read just before; None: go on. Pure."""
    if facts.restarts > own_restarts:
        return RequeueOutcome(
            kind="already_requeued",
            detail=f"Restarts={facts.restarts}, this run is {own_restarts}; JobState={facts.state}",
            start_time=facts.eligible_time,
        )
    # after scancel the job is COMPLETING with Restarts unchanged, then CANCELLED; scontrol requeue would revive it (rc
    # 0, seen). So an ending job is left alone, unless Slurm itself names the time limit, a preemption, or a failure
    timed_out = facts.state in {"COMPLETING", "TIMEOUT"} and facts.reason == "TimeLimit"
    not_wanted = timed_out or facts.preempted or facts.failed
    if facts.state.startswith("CANCELLED") or (facts.state == "COMPLETING" and not not_wanted):
        return RequeueOutcome(
            kind="cancelled",
            detail=f"JobState={facts.state}, Restarts={facts.restarts} unchanged: ended by its user",
        )
    # Held, suspended or waiting: `scontrol requeue` of a suspended job ends in JobHeldAdmin, and never runs (22.05.8).
    if not facts.is_running and not not_wanted:
        return RequeueOutcome(kind="refused", detail=f"JobState={facts.state}: not a running job")
    # Last: after `forbidden` another job may follow, which a job that its user cancelled must not get.
    if not facts.requeue:
        return RequeueOutcome(kind="forbidden", detail="Slurm may not requeue this job (Requeue=0)")
    return None


_NO_ANSWER = (
    "unable to contact",
    "timed out",
    "connection",
    "communication",
    "zero bytes",
    "standby mode",
    "rate limit",  # 23.02 and newer, where slurmctld limits a user's requests
    "try again later",  # a job in transition
)
"""Slurm's words for: slurmctld was not reached, its answer was lost, or ask again (slurm_errno.c)."""


def is_answer(done: Completed) -> bool:
    """Returns whether slurmctld answered a failed request, as opposed to one killed or lost on its way. Pure."""
    said = done.stderr.lower()
    # Below 0: a signal killed the command, which says nothing about slurmctld.
    return done.exit_code >= 0 and not any(words in said for words in _NO_ANSWER)


def lasting_exit(code: int, conf: Mapping[str, str]) -> int:
    """Returns the exit code, or another one in its place that this site lets a job end with. Pure."""
    listed = ",".join(conf.get(name, "") for name in ("RequeueExit", "RequeueExitHold"))
    ranges = re.findall(r"([0-9]{1,3})(?:-([0-9]{1,3}))?", listed)
    again = {one for first, last in ranges for one in range(int(first), int(last or first) + 1)}
    return next((one for one in (code, *range(64, 256)) if one == 0 or one not in again), code)


def names_expedite(sbatch_help: str) -> bool:
    """Returns whether this sbatch knows `--requeue=expedite`."""
    return "--requeue[=expedite]" in sbatch_help


def offered(sbatch_help: str, conf: Mapping[str, str]) -> bool:
    """Returns whether Slurm accepts `--requeue=expedite`, by `sbatch --help` and `scontrol show config`."""
    words = {word.strip().lower() for word in conf.get("SlurmctldParameters", "").split(",")}
    return names_expedite(sbatch_help) and "enable_expedited_requeue" in words


def sparable(
    nodes: Sequence[str],
    usable: Mapping[str, str],
    excluded: Collection[str],
    needed: int,
    required: Collection[str] = (),
) -> tuple[str, ...]:
    """Returns those of `nodes`, the first ones first, that a job of `needed` nodes can do without.

    Args:
        required: nodes that the job asks for by name; Slurm starts no job that excludes one of them.
    """
    # Of each kind (`usable`, by node), enough stay: others may lack what a constraint or a GPU request asks
    # for, and nothing withdraws an exclusion while a job waits. A node that is down is left to Slurm.
    left = Counter(kind for node, kind in usable.items() if node not in excluded)
    spared = []
    for node in nodes:
        kind = usable.get(node)
        if kind is not None and node not in {*excluded, *required} and left[kind] > needed:
            left[kind] -= 1
            spared.append(node)
    return tuple(spared)
