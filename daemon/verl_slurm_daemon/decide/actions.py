"""The actions of a lead, as data without behaviour. `policy.decide` makes them, `effects` carries them out.

`SaveRequest` is the message itself: it goes to all ranks, and its `seconds_left`, less the margin, arm
`SaveDeadline`.
"""

import msgspec

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.journal.events import Event
from verl_slurm.wire.messages import SaveRequest as SaveRequest


class _Action(msgspec.Struct, frozen=True):
    """Base: frozen, compared by value."""


class StartRanks(_Action, frozen=True):
    """Starts one step: an agent on every node, all ranks. Also arms the start timeout."""

    restart: int
    avoid: tuple[str, ...] = ()
    """Nodes of the job that are lost or bad: spare ones take their places."""


class AskCause(_Action, frozen=True):
    """Asks Slurm what is going on. `trigger`: the reason to ask."""

    trigger: str


class ArmDeadline(_Action, frozen=True):
    """Arms `SaveDeadline` at this many seconds less the margin; an earlier timer stays."""

    seconds_left: float


class Verify(_Action, frozen=True):
    """Reads a committed checkpoint back, every byte."""

    name: str


class TakeDown(_Action, frozen=True):
    """Ends the step: `Shutdown` to the agents, then kills the rest. Ends in `RanksEnded`."""

    stacks: bool = False
    """Before that, all ranks dump the stacks of their threads."""


class Pause(_Action, frozen=True):
    """Waits before the next restart, then `BackoffOver`."""

    seconds: float


class AskRequeue(_Action, frozen=True):
    """Asks Slurm to run this job again, or to hold it."""

    avoid: tuple[str, ...] = ()
    """Nodes that the next attempt should avoid for a while."""
    delay_s: int | None = None
    """Seconds before which it must not start; None: as the user configured it."""
    hold: bool = False
    """It must not start before a person releases it."""


class Exit(_Action, frozen=True):
    code: ExitCode
    reason: str


class Note(_Action, frozen=True):
    """A line for the journal (`events.jsonl`) and for the log."""

    event: Event


Action = (
    ArmDeadline | AskCause | Exit | Note | Pause | AskRequeue | SaveRequest | StartRanks | TakeDown | Verify
)
