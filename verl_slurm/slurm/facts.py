"""Holds the facts of a job, a node and a partition, from any version of Slurm (`parse.py`). Pure."""

from datetime import datetime

import msgspec

# Slurm shows one word of several: for a running job a flag rather than RUNNING (job_state_string, all versions).
# STOPPED: `scancel -s STOP` stopped the steps; the batch process continues, and Slurm ends the job as any other.
_STATES_RUNNING = frozenset({"RUNNING", "SIGNALING", "RESIZING", "STOPPED"})
_STATES_OVER = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"}
    | {"PREEMPTED", "REVOKED", "STAGE_OUT", "TIMEOUT"}
)
_STATES_WAITING = frozenset(
    {
        "EXPEDITING",
        "PENDING",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",  # requeued, and held until somebody releases it
    }  # 25.11, then all versions
)
# Slurm keeps its nodes, and nothing of it moves until somebody lets it go on.
_STATES_STOPPED = frozenset({"SUSPENDED", "STOPPED"})
_STATES_FAILED = frozenset({"BOOT_FAIL", "COMPLETING", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"})
_REASONS_FAILED = frozenset(
    {"JobLaunchFailure", "NodeDown", "NonZeroExitCode", "OutOfMemory", "PartitionDown", "RaisedSignal"}
)


def is_waiting(state: str) -> bool:
    """Returns whether a job in this state is in the queue, maybe held there, and has no nodes yet, or no more."""
    return state in _STATES_WAITING


def is_stopped(state: str) -> bool:
    """Returns whether a job in this state stands still until somebody lets it go on."""
    return state in _STATES_STOPPED


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One job as slurmctld sees it now."""

    job_id: int
    name: str
    state: str
    """RUNNING, PENDING, COMPLETING, CANCELLED, ... (Slurm's long names)."""
    reason: str | None
    restarts: int
    requeue: bool
    """Whether Slurm may requeue it at all (`--no-requeue`: False)."""
    partition: str
    preempt_time: datetime | None
    """Set from the moment Slurm decides to preempt the job until it is requeued."""
    eligible_time: datetime | None
    """The job may not start before this time. While a requeued job completes, no other field is right: StartTime is
    first the start of the old run, then "now"."""
    submit_time: datetime | None = None
    """A requeue sets it anew."""
    start_time: datetime | None
    end_time: datetime | None
    """While running: the time at which it will be ended. A preemption moves it to the end of the grace time."""
    time_limit_s: int | None = None
    """Of each start; None: there is none."""
    exit_code: str
    """`code:signal`."""
    batch_host: str | None
    node_list: str | None
    """Slurm's bracket form; `SlurmClient.expand` lists it."""
    num_nodes: int
    user_id: int
    comment: str = ""
    """What the batch script said of a start that it left (`batch.AWAIT`)."""
    command: str | None = None
    """The batch script and its arguments, with blanks between."""
    work_dir: str | None = None
    excluded: str | None = None
    """Nodes that it avoids, in Slurm's bracket form."""
    required: str | None = None
    """Nodes that it asks for by name, in Slurm's bracket form."""
    reservation: str | None = None
    """The reservation that it asks for, or several, `a,b`, of which Slurm takes one."""
    dependency: str | None = None
    """What it still waits for: `afterany:18(unfulfilled),singleton(unfulfilled)`."""
    array_task: str | None = None
    """`12_3`: the third task of array 12."""
    failed_node: str | None = None
    """The node that Slurm gave up, while the job completes; 23.02 and newer."""
    expedited: bool = False
    """Queued with `--requeue=expedite` (25.11 and newer): see `requeue_rules.py`."""
    ended_as: str | None = None
    """The coming state of a COMPLETING job, e.g. PREEMPTED, if it was asked for and Slurm reports it
    (`parse.ended_as`)."""

    @property
    def target(self) -> str:
        """Returns the name of this job alone, for a command that changes it."""
        # The task that was started last has the array's own number as its JobId, and Slurm takes that number for every
        # task: `scontrol requeue 12` ends all of them (seen on 22.05.8).
        return self.array_task or str(self.job_id)

    @property
    def ended_by_preemption(self) -> bool:
        """Returns whether Slurm has ended it for another job, as far as times tell."""
        # Slurm sets PreemptTime anew when it ends the job, so both times are equal. A scancel in the grace time leaves
        # PreemptTime at the beginning of that (both seen on 22.05.8); in its first second the two look the same.
        ending = self.state in {"COMPLETING", "PREEMPTED"} and self.preempt_time is not None
        return ending and self.preempt_time == self.end_time

    @property
    def preempted(self) -> bool:
        """Returns whether Slurm ends, or has ended, it for another job, as far as that can be told from a cancel."""
        # A job that may not be requeued keeps its Restarts when preempted; for one that may, Slurm's own word is
        # required.
        end = self.ended_as if self.state == "COMPLETING" else self.state
        return end == "PREEMPTED" or (end is None and self.ended_by_preemption and not self.requeue)

    @property
    def failed(self) -> bool:
        """Returns whether it ends, or ended, because something broke: a node, memory, or its batch process."""
        # 22.05 says JobLaunchFailure for a batch process that was killed, newer ones `RaisedSignal:9(Killed)`.
        # `scancel`, with any signal but through `-b`, leaves Reason=None.
        word = (self.reason or "").partition(":")[0]
        return self.state in _STATES_FAILED and word in _REASONS_FAILED

    @property
    def ended_before_its_limit(self) -> bool:
        """Returns whether the end came, or comes, a minute and more before the job's own time limit."""
        if self.time_limit_s is None or self.start_time is None or self.end_time is None:
            return self.time_limit_s is None
        return (self.end_time - self.start_time).total_seconds() < self.time_limit_s - 60

    @property
    def is_running(self) -> bool:
        """Returns whether it has its nodes and runs."""
        return self.state in _STATES_RUNNING

    @property
    def is_waiting(self) -> bool:
        """Returns whether it is in the queue, maybe held there, and has no nodes yet, or no more."""
        return is_waiting(self.state)

    @property
    def is_over(self) -> bool:
        """Returns whether it has ended permanently: nothing of it runs or will run, unless somebody requeues it."""
        return self.state in _STATES_OVER


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One node."""

    name: str
    addr: str
    hostname: str
    state: frozenset[str]
    """E.g. {IDLE}, {DOWN, NOT_RESPONDING}, {MIXED, DRAIN}; upper case."""
    cpus: int


class PartitionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One partition."""

    name: str
    state: str
    """UP, DOWN, DRAIN or INACTIVE."""
    total_nodes: int
    total_cpus: int
    max_time_s: int | None
    """None: unlimited."""
    max_nodes: int | None
    grace_s: int
    preempt_mode: str
    is_default: bool

    @property
    def takes_jobs(self) -> bool:
        """Returns whether Slurm queues jobs for it; in one that is DOWN none starts until it is UP."""
        return self.state in {"UP", "DOWN"}
