"""What can happen to a lead. Data without behaviour; `sources` make them, `policy.decide` reads them."""

import msgspec

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.slurm.cause import CauseKind
from verl_slurm.wire.messages import FromRank

__all__ = [
    "AllDone",
    "BackoffOver",
    "CauseKnown",
    "GenerationEnded",
    "Hung",
    "Input",
    "NodeFailed",
    "Over",
    "RankSaid",
    "Ready",
    "RequeueAnswered",
    "RunLost",
    "SaveDeadline",
    "SignalArrived",
    "StartFailed",
    "StartTimedOut",
    "StrangerFound",
    "Verified",
]


class _Event(msgspec.Struct, frozen=True):
    """Base: frozen, compared by value."""


class Ready(_Event, frozen=True):
    """The checks at the start are done; `world_size` ranks may be launched."""

    world_size: int
    strangers: int = 0
    """How many starts of earlier attempts met strangers, in a row, up to now (`journal.stranger_starts`)."""


class Over(_Event, frozen=True):
    """There is nothing to lead, and another start would not change that: no rank of ours runs."""

    exit_code: ExitCode
    reason: str


class AllDone(_Event, frozen=True):
    """What the ranks would resume from is the run's end: they are not started."""

    name: str
    """The checkpoint."""
    detail: str


class StartFailed(_Event, frozen=True):
    """The start met an error of the operating system: storage that is full or does not answer, say."""

    detail: str
    before: int = 0
    """How many attempts in a row have failed so before this one."""
    exit_code: ExitCode = ExitCode.NO_PROGRESS
    """To end with, when there were too many."""


class SignalArrived(_Event, frozen=True):
    """A signal reached the lead or one of its steps. Never a cause by itself."""

    signal: str
    where: str


class CauseKnown(_Event, frozen=True):
    """What Slurm answered when it was asked why."""

    kind: CauseKind
    evidence: str
    seconds_left: float | None
    """Until the job is killed; None where Slurm gives no deadline."""


class RankSaid(_Event, frozen=True):
    message: FromRank


class NodeFailed(_Event, frozen=True):
    """An agent reported its ranks dead, or its link broke."""

    node: str
    detail: str
    lost: bool = False
    """The agent itself is gone: of the node nothing is known."""


class StrangerFound(_Event, frozen=True):
    """A rank ends itself, because a peer of its process group is none of ours. Comes before what follows from that."""

    node: str
    detail: str


class Hung(_Event, frozen=True):
    """A rank has passed no safe point for too long (`hang.py` says what that is)."""

    generation: int
    node: str
    detail: str


class RunLost(_Event, frozen=True):
    """A newer attempt owns the run: what ours do from here on counts for nothing. Said again while it is so."""

    owner: str


class GenerationEnded(_Event, frozen=True):
    """The step with the agents is gone: no process of ours is left on any node."""

    exit_code: int


class Verified(_Event, frozen=True):
    """A committed save was read back.

    `pruned`: it was not found good, but the retention of the living run had removed it meanwhile.
    """

    name: str
    good: bool
    detail: str
    pruned: bool = False


class SaveDeadline(_Event, frozen=True):
    """So little time is left that the requeue must be asked for now."""


class StartTimedOut(_Event, frozen=True):
    generation: int


class BackoffOver(_Event, frozen=True):
    """The pause after a crash is over. `stuck`: how many restarts in a row brought nothing new."""

    stuck: int


class RequeueAnswered(_Event, frozen=True):
    """Slurm's final word on the requeue."""

    exit_code: ExitCode
    """REQUEUED, REQUEUE_FAILED, or CANCELLED where the user was faster."""
    detail: str


Input = (
    Ready
    | Over
    | AllDone
    | StartFailed
    | SignalArrived
    | CauseKnown
    | RankSaid
    | NodeFailed
    | StrangerFound
    | Hung
    | RunLost
    | GenerationEnded
    | Verified
    | SaveDeadline
    | StartTimedOut
    | BackoffOver
    | RequeueAnswered
)
