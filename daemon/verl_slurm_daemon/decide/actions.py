"""What a lead may do. Data without behaviour; `policy.decide` makes them, `effects` carries them out.

`SaveRequest` is the message itself: it goes to all ranks, and its `seconds_left`, less the margin, arm `SaveDeadline`.
"""

import msgspec

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.journal.events import Event
from verl_slurm.wire.messages import SaveRequest

__all__ = [
    "Action",
    "ArmDeadline",
    "AskCause",
    "Exit",
    "Note",
    "Pause",
    "Requeue",
    "SaveRequest",
    "StartGeneration",
    "TakeDown",
    "Verify",
]


class _Action(msgspec.Struct, frozen=True):
    """Base: frozen, compared by value."""


class StartGeneration(_Action, frozen=True):
    """Start one step: an agent on every node, all ranks. Also arms the start timeout."""

    generation: int


class AskCause(_Action, frozen=True):
    """Ask Slurm what is going on. `trigger`: what made us ask."""

    trigger: str


class ArmDeadline(_Action, frozen=True):
    """`SaveDeadline` at this many seconds less the margin; an earlier timer stays."""

    seconds_left: float


class Verify(_Action, frozen=True):
    """Read a committed checkpoint back, every byte."""

    name: str


class TakeDown(_Action, frozen=True):
    """End the step: `Shutdown` to the agents, then kill what stays. Ends in `GenerationEnded`."""

    stacks: bool = False
    """Before it, have all ranks write down where their threads are."""


class Pause(_Action, frozen=True):
    """Wait before the next restart, then `BackoffOver`."""

    seconds: float


class Requeue(_Action, frozen=True):
    """Ask Slurm to run this job again."""

    avoid: tuple[str, ...] = ()
    """Nodes that it is to stay away from for a while."""
    delay_s: int | None = None
    """Not before so many seconds; None: as the user configured it."""


class Exit(_Action, frozen=True):
    code: ExitCode
    reason: str


class Note(_Action, frozen=True):
    """A line for the journal (`events.jsonl`) and for the log."""

    event: Event


Action = (
    ArmDeadline | AskCause | Exit | Note | Pause | Requeue | SaveRequest | StartGeneration | TakeDown | Verify
)
