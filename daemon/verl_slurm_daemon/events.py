"""What can happen to a lead. Data without behaviour; `sources` make them, `policy.decide` reads them."""

import msgspec

from verl_slurm.exit_codes import ExitCode
from verl_slurm.slurm.cause import CauseKind
from verl_slurm.wire.messages import FromRank

__all__ = [
    "BackoffOver",
    "CauseKnown",
    "Event",
    "GenerationEnded",
    "Hung",
    "NodeFailed",
    "RankSaid",
    "Ready",
    "RequeueAnswered",
    "SaveDeadline",
    "SignalArrived",
    "StartFailed",
    "StartTimedOut",
    "Verified",
]


class _Event(msgspec.Struct, frozen=True):
    """Base: frozen, compared by value."""


class Ready(_Event, frozen=True):
    """The checks at the start are done; `world_size` ranks may be launched."""

    world_size: int


class StartFailed(_Event, frozen=True):
    """The checks at the start met an error of the operating system: storage that does not answer, say."""

    detail: str


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


class Hung(_Event, frozen=True):
    """A rank has passed no safe point for too long (`hang.py` says what that is)."""

    generation: int
    node: str
    detail: str


class RunLost(_Event, frozen=True):
    """A newer incarnation owns the run: what ours do from here on counts for nothing."""

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
    """The pause after a crash is over. `stuck`: how many starts in a row brought nothing new."""

    stuck: int


class RequeueAnswered(_Event, frozen=True):
    """Slurm's final word on the requeue."""

    exit_code: ExitCode
    """REQUEUED, REQUEUE_FAILED, or CANCELLED where the user was faster."""
    detail: str


Event = (
    Ready
    | StartFailed
    | SignalArrived
    | CauseKnown
    | RankSaid
    | NodeFailed
    | Hung
    | RunLost
    | GenerationEnded
    | Verified
    | SaveDeadline
    | StartTimedOut
    | BackoffOver
    | RequeueAnswered
)
