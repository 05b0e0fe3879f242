"""Every event of `RUN/events.jsonl`: one struct per kind. This module is the specification of the journal.

A line of the file is one JSON object. `event` names the kind: the class in snake_case (`OneCopy` is `one_copy`), unless
the class says otherwise. Each kind may have `time`, `run`, `attempt` and `job_id` beside its own fields; a field at its
default is left out. Durations are in seconds, sizes in bytes, steps count from 0.

The journal informs people and decides what to do at a start: whether a run is stuck, which nodes it avoids, which job
it follows. It never decides what a run has computed; that is in its checkpoints and its ledger, which carry digests.

Compatibility: a kind is never removed, and a field only gets added, with a default. A line of an unknown kind, or with
a field of another type, is read as `Other`: it is told as it is, and no fold counts it.
"""

from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from verl_slurm.base.exit_codes import ExitCode

Cluster = Literal["slurm", "local"]
Int = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]
"""JSON allows integers that no float can hold; one of those is none of ours."""


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).removeprefix("_")


class Event(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="event", tag=_snake):
    """What every kind of event has."""

    loud: ClassVar[bool] = False
    """Something is wrong: the lead's log marks the line."""

    time: str = ""
    """When it was written: UTC, ISO 8601, milliseconds. The host's clock."""
    run: str = ""
    """The run's id (`RUN/run_id`): a line of another run is not used. Empty: the id was not known."""
    attempt: Int | None = None
    """The attempt (one start of the Slurm job) that wrote it; None: a person's command did."""
    job_id: str | None = None
    """The job that it is about."""

    @property
    def at(self) -> float | None:
        """`time` in seconds since 1970; None: it is no time."""
        try:
            return datetime.fromisoformat(self.time).timestamp()
        except (ValueError, OverflowError, OSError):
            return None


# ---- jobs and attempts


class Submitted(Event):
    """`verl-slurm submit`, on `host`, queued a job."""

    cluster: Cluster = "slurm"
    host: str = ""
    slurm: str = ""
    """Name of the Slurm cluster, where it is known: a job's number means nothing on another one."""


class Successor(Event):
    """The lead queued another job that follows its own, which Slurm may not requeue."""

    after: str
    """The job that it follows."""
    cluster: Cluster = "slurm"
    slurm: str = ""
    """As in `submitted`."""


class Started(Event):
    """An attempt began: the lead, process `pid` on `host`, owns the run."""

    cluster: Cluster = "slurm"
    host: str = ""
    requeues: Int = 0
    """How often Slurm has requeued the job."""
    nodes: str = ""
    pid: Int = 0
    array: str | None = None
    """The job array that the job is a task of."""
    slurm: str = ""
    """As in `submitted`."""


class StartFailed(Event):
    """Storage or Slurm did not let an attempt begin, or go on: the next one waits for it without the nodes."""

    detail: str
    before: Int = 0
    """How many attempts in a row could not begin before this one."""


class Ended(Event):
    """An attempt is over. The newest one says how the run came out."""

    exit_code: Int
    exit: str = ""
    """The name of the exit code."""
    reason: str = ""
    checkpoint: str | None = None
    """The newest verified checkpoint."""
    next_start: str = ""
    """From when on the scheduler was asked to start the next attempt; empty: it was not asked for a time."""

    @property
    def is_final(self) -> bool:
        """Whether the run does not go on by itself."""
        return self.exit_code != ExitCode.REQUEUED

    @property
    def code(self) -> ExitCode:
        """INTERNAL for a number that is no exit code."""
        return next((code for code in ExitCode if code == self.exit_code), ExitCode.INTERNAL)

    @property
    def outcome(self) -> str:
        """`done`, `cancelled` or `failed with 11`; `requeued` where the run goes on."""
        names = {ExitCode.OK: "done", ExitCode.CANCELLED: "cancelled", ExitCode.REQUEUED: "requeued"}
        return names.get(self.code, f"failed with {self.exit_code}")


class AttemptFenced(Event, tag="fenced"):
    """An attempt left because a newer one owns the run."""

    exit_code: Int
    reason: str = ""


class Orphaned(Event):
    """The lead died without a word; an agent noticed, and asked for the requeue, which Slurm `accepted` or not."""

    node_id: Int
    accepted: bool
    detail: str = ""


class Held(Event):
    """The run stands still until a person acts: `stuck` starts in a row came to nothing."""

    loud: ClassVar[bool] = True
    stuck: Int
    reason: str = ""


class Requeue(Event):
    """The scheduler answered a request to requeue the job."""

    accepted: bool
    detail: str = ""


class StartOverruled(Event):
    """The scheduler started this attempt later than it was asked to: the job was still leaving its nodes at that time.
    The next requeue asks for a later one."""

    wanted: str = ""
    eligible: str = ""


class Gone(Event):
    """The scheduler says that the job is over, and its lead wrote no end. Told by `watch`; never in the file."""

    state: str = ""


# ---- restarts of the ranks, and training


class Resume(Event):
    """One reason for the choice of the checkpoint to resume from."""

    reason: str


class Restart(Event):
    """The ranks of an attempt are about to start, for the `number`-th time."""

    number: Int
    resume: str | None = None
    """The checkpoint; None: from the beginning."""
    progress: str = ""
    """The checkpoint and the rollouts in the ledger. Two restarts with the same one: the first came to nothing."""
    standby: bool = False
    """Agents and ranks stand by, with their imports done."""


class Training(Event):
    """The ranks passed their first safe point."""

    step: Int = 0
    phase: str = ""
    index: Int = 0


class FirstRollout(Event):
    """The first rollout that was sampled, not replayed, since the restart."""

    step: Int = 0
    phase: str = ""
    index: Int = 0


class Done(Event):
    """No rank was started: nothing is left to do after the checkpoint `name`."""

    name: str = ""
    reason: str = ""


class Crash(Event):
    """A restart failed."""

    loud: ClassVar[bool] = True
    detail: str = ""
    kind: str = "crash"
    """crash, hang, node, environment or stranger (`verl_slurm_daemon.decide.lead_model.FailureKind`)."""
    node: str | None = None
    crashes: Int = 0
    """Of this kind, in this attempt, since the last verified save; `budget` of them lead to a restart in place."""
    budget: Int = 0
    replaced: bool = False
    """The job goes on without `node`: a spare one takes its place, or the run is smaller."""

    @property
    def cause(self) -> str:
        """As outages and metrics count it."""
        return {"hang": "hang", "node": "node_lost", "stranger": "stranger"}.get(self.kind, "crash")


class Hang(Event):
    """The ranks came to no safe point for much longer than usual."""

    loud: ClassVar[bool] = True
    detail: str = ""
    node: str = ""


class Stacks(Event):
    """The stacks of a node's ranks were written to a file."""

    node: str
    log: str


class Refused(Event):
    """A rank refuses to train: another start would change nothing."""

    loud: ClassVar[bool] = True
    reason: str = ""
    rank: Int | None = None


class Stranger(Event):
    """A process that does not belong to the run tried to connect: for the `total`-th time.

    `reason` says why it was refused; `ranks`: a rank met it and ended itself."""

    reason: str
    peer: str = ""
    total: Int = 1
    node: str | None = None
    rank: Int | None = None


class Internal(Event):
    """An error inside the lead."""

    error: str


class Notice(Event):
    """Something that a person may want to know."""

    topic: str = ""
    text: str = ""


class Warned(Notice, tag="warning"):
    """Something that a person should know."""

    loud: ClassVar[bool] = True


class Foreign(Warned):
    """Stands for `lines` of the journal, one after another, that are of another `run`. Told by readers; never in the
    file. No fold counts what those lines say."""

    lines: Int = 1


# ---- why a job ends


class Cause(Event):
    """Why Slurm signalled the job, as the lead found out. The evidence is what Slurm said, word for word."""

    cause: str
    """`verl_slurm.slurm.cause.CauseKind`."""
    evidence: str = ""
    seconds_left: float | None = None


class Ignored(Event):
    """Something was not acted upon."""

    reason: str


class CancelAsked(Event):
    """`verl-slurm cancel`."""


class RequeueAsked(Event):
    """`verl-slurm requeue`."""

    at_once: bool = False
    """`--now`."""


class AlertSaveAsked(Event):
    """An alert of Prometheus asked for a save."""


class RewardAsked(Event):
    """`verl-slurm update-reward`."""

    reward: str
    request: Int = 0
    warm_start_steps: Int = 0


class ForceResume(Event):
    """The data set has changed, or the run has lost its checkpoints, and the user goes on (`--force-resume`). Paths
    below the data set."""

    added: list[str] = []
    removed: list[str] = []
    changed: list[str] = []
    lost: str = ""
    """The run begins again from step 0; what told that it had a checkpoint."""


class Adopted(Event):
    """`verl-slurm adopt` took checkpoints over."""

    checkpoints: list[str] = []
    source: str = ""


class Resharded(Event):
    """A start of verl divided the checkpoint that it resumes from among another number of ranks."""

    name: str
    before: Int = 0
    """Ranks that saved it."""
    after: Int = 0
    seconds: float | None = None
    num_bytes: Int = 0


# ---- saves


class Save(Event):
    """The lead asked the ranks for a save, after which they `stop` or go on."""

    stop: bool
    request: Int = 0
    seconds_left: float | None = None


class Saved(Event):
    """The ranks wrote a checkpoint. The lead has not read it back yet, except where `on_shared` is False."""

    name: str
    seconds: float | None = None
    """From the safe point until it was durable."""
    num_bytes: Int | None = None
    emergency: bool = False
    """Somebody asked for it."""
    reason: str = ""
    on_shared: bool = True
    """False: only the nodes' own disks have it; the ranks have read it back there."""


class SaveFailed(Event):
    """A save came to nothing."""

    loud: ClassVar[bool] = True
    reason: str = ""
    rank: Int = 0


class Verified(Event):
    """The lead read a checkpoint back, and every byte is as it was written."""

    name: str
    detail: str = ""


class Corrupt(Event):
    """A checkpoint was read back and is damaged; it is in quarantine."""

    loud: ClassVar[bool] = True
    name: str
    detail: str = ""


class Pruned(Event):
    """A checkpoint was removed before it could be read back: newer ones are there."""

    name: str
    detail: str = ""


class OneCopy(Event):
    """A checkpoint is on one medium of the two that the configuration names."""

    loud: ClassVar[bool] = True
    name: str
    reason: str = ""


class SecondCopy(Event):
    """About the copies on the nodes' own disks."""

    reason: str
    name: str = ""


class Degraded(Event):
    """The job ends without a verified save."""

    loud: ClassVar[bool] = True
    reason: str = ""


class Scrubbed(Event):
    """An older checkpoint, or a frozen model (`frozen/DIGEST`), was read back. An empty name: not known which."""

    good: bool
    name: str = ""
    num_bytes: Int = 0
    detail: str = ""
    judged: bool = False  # refused for what no second look would change


# ---- tiers


class TierCopied(Event):
    """A checkpoint was copied to a tier."""

    name: str
    tier: str
    reason: str = ""
    source: str = ""
    bytes_sent: Int = 0
    seconds: float = 0.0


class TierRemoved(Event):
    """A checkpoint was removed from a tier."""

    name: str
    tier: str
    reason: str = ""


class TierFetched(Event):
    """A checkpoint was copied back from a tier."""

    name: str
    tier: str
    num_bytes: Int = 0


class TierFailed(Event):
    """Work with a tier failed: a copy, drop, fetch or forget."""

    tier: str
    name: str = ""
    what: str = ""
    problem: str = ""
    reason: str = ""


class TierUnreachable(Event):
    """A tier does not answer."""

    tier: str
    reason: str = ""


class Tiers(Event):
    """The process that moves checkpoints to tiers failed, or the run ended before its last one was there."""

    detail: str = ""


# ---- nodes


class NodesChosen(Event):
    """Among more nodes than the ranks need, those that got them, and those that are spare."""

    train: list[str] = []
    """In the order of their ranks."""
    spare: list[str] = []


class Avoid(Event):
    """The job stays away from nodes that failed it: `nodes` are new, `detail` says what Slurm was told."""

    nodes: list[str] = []
    detail: str = ""
    told: list[str] = []
    """All nodes that Slurm excludes by our word: other ones in its list are the user's or an operator's."""


class Link(Event):
    """The connection to an agent broke."""

    node: str = ""
    error: str = ""


# ---- services


class ServiceStarted(Event):
    """A service of the configuration was started on a node."""

    service: str
    node: str = ""
    address: str = ""
    """`host:port`, where the ranks find it."""


class ServiceReady(Event):
    """A service answered its probe, so many seconds after its start."""

    service: str
    node: str = ""
    address: str = ""
    seconds: float = 0.0


class ServiceEnded(Event):
    """A service ended, or no longer answered its probe. It is started again, for the `restarts`-th time in a row."""

    loud: ClassVar[bool] = True
    service: str
    node: str = ""
    detail: str = ""
    restarts: Int = 0
    budget: Int = 0


class ServiceFailed(Event):
    """A service is not started again. If it is `needed`, the run cannot go on in this job."""

    loud: ClassVar[bool] = True
    service: str
    node: str = ""
    detail: str = ""
    needed: bool = True


# ---- what is not known here


class Other(Event):
    """A line of a kind that this version does not know, or with fields that do not fit. Never written."""

    kind: str
    fields: dict[str, Any] = {}
    """All of the line but `event`, `time`, `run`, `attempt` and `job_id`."""


KINDS: dict[str, type[Event]] = {
    str(kind.__struct_config__.tag): kind
    for kind in [*Event.__subclasses__(), *Notice.__subclasses__()]
    if kind is not Other
}
"""Every kind by its name in the file."""


def kind_of(event: Event) -> str:
    """Its name in the file."""
    return event.kind if isinstance(event, Other) else str(event.__struct_config__.tag)
