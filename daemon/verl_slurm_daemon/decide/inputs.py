"""The events that a lead decides about, as data without behaviour: `lead` makes them for `policy.decide`."""

from typing import Literal

import msgspec

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.journal.causes import CauseKind
from verl_slurm.wire.messages import FromRank


class _Event(msgspec.Struct, frozen=True):
    """Base: frozen, compared by value."""


class Ready(_Event, frozen=True):
    """The checks at the start are done; `world_size` ranks may be launched."""

    world_size: int
    strangers: int = 0
    """Starts in a row, of earlier attempts and up to now, that met strangers (`journal.history`)."""
    unfit: int = 0
    """Attempts in a row, before this one, that met a bad node."""
    failed: int = 0
    """Attempts in a row, before this one, that storage or Slurm stopped."""
    trained: bool = False
    """The ranks of an attempt before this one have trained."""


class Shaped(_Event, frozen=True):
    """The restart that begins has so many ranks that speak: the job may have lost nodes."""

    world_size: int


class Over(_Event, frozen=True):
    """There is nothing to lead, and another start would not change that: none of our ranks runs."""

    exit_code: ExitCode
    reason: str


class AllDone(_Event, frozen=True):
    """The checkpoint to resume from is the run's end: no ranks are started."""

    name: str
    """The checkpoint."""
    detail: str


class StartHindered(_Event, frozen=True):
    """A start of the attempt, or of its ranks, met storage that is full or does not answer, or a Slurm that is away."""

    detail: str
    before: int = 0
    """Failed starts in a row of this kind before this one. Of a start of ranks, `Ready` tells it."""
    exit_code: ExitCode = ExitCode.NO_PROGRESS
    """The exit code to end with after too many such starts, where no job can be held."""


class NeedsPerson(_Event, frozen=True):
    """A further start of this job would come to nothing, as `starts` did, until a person changes the job."""

    starts: int
    detail: str


class SignalArrived(_Event, frozen=True):
    """A signal reached the lead or one of its steps. Never a cause by itself."""

    signal: str
    where: str
    again: bool = False
    """Slurm did not answer the question after this signal, which is due once more."""


class CauseKnown(_Event, frozen=True):
    """Slurm's answer to the question why."""

    kind: CauseKind
    evidence: str
    seconds_left: float | None
    """Seconds until the job is killed; None: Slurm gives no deadline."""


class LeaveNode(_Event, frozen=True):
    """An agent or a rank reports that the run must leave its node."""

    node: str
    cause: Literal["reclaimed", "bad_node"]
    evidence: str
    seconds_left: float | None = None
    """Seconds until the node is gone; None: it stays, and no rank has begun to train on it."""


class ServiceLost(_Event, frozen=True):
    """A service that the run needs cannot be started again."""

    detail: str
    environment: bool = False
    """A host of it has not come, as in `NodeFailed`."""


class RankSaid(_Event, frozen=True):
    message: FromRank


class NodeFailed(_Event, frozen=True):
    """An agent reported its ranks dead, or its link broke."""

    node: str
    detail: str
    lost: bool = False
    """The agent itself is gone, so nothing is known about the node."""
    environment: bool = False
    """Agents have not come, by no fault of theirs: Slurm or a node was away, and nothing of the run has failed."""


class StrangerFound(_Event, frozen=True):
    """A rank ends itself because a peer of its process group is not ours. Comes before what fails by it."""

    node: str
    detail: str


class Hung(_Event, frozen=True):
    """A rank has passed no safe point for too long (defined in `hang.py`)."""

    restart: int
    node: str
    detail: str


class RunLost(_Event, frozen=True):
    """A newer attempt owns the run, so the work of our ranks no longer counts. Repeated as long as it is so."""

    owner: str


class RanksEnded(_Event, frozen=True):
    """The step with the agents is gone: none of our processes is left on any node."""

    exit_code: int


class SaveReadBack(_Event, frozen=True):
    """A committed save was read back."""

    name: str
    good: bool
    detail: str
    pruned: bool = False
    """Not found good, but the retention of the living run had removed it in between."""
    unreadable: bool = False
    """Not good, because storage did not let it be read: that proves no damage."""


class SaveDeadline(_Event, frozen=True):
    """So little time is left that the requeue must be asked for now."""


class StartTimedOut(_Event, frozen=True):
    """The ranks had their time for a first message."""

    restart: int
    limit_s: float
    all_ranks: bool = False
    """Each of them should have sent one; otherwise, any of them."""


class BackoffOver(_Event, frozen=True):
    """The pause after a crash is over. `stuck`: the number of starts in a row that brought nothing new."""

    stuck: int
    reason: str = ""
    """Of an end because of them, with the words of the last crash."""


class RequeueAnswered(_Event, frozen=True):
    """Slurm's final answer to the requeue."""

    exit_code: ExitCode
    """REQUEUED, REQUEUE_FAILED, or CANCELLED if the user was faster."""
    detail: str


Input = (
    Ready
    | Shaped
    | Over
    | AllDone
    | StartHindered
    | SignalArrived
    | CauseKnown
    | LeaveNode
    | ServiceLost
    | RankSaid
    | NodeFailed
    | StrangerFound
    | Hung
    | RunLost
    | RanksEnded
    | SaveReadBack
    | SaveDeadline
    | StartTimedOut
    | NeedsPerson
    | BackoffOver
    | RequeueAnswered
)
