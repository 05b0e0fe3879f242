"""The lead's knowledge while it decides: data for `policy.decide`, without effects.

The policy decides when a transition between two states is made:

```
STARTING ──▶ LAUNCHING ──▶ RUNNING ──▶ SAVING ──▶ CHECKING ──▶ LEAVING ──▶ ENDED
   │            │  ▲          │           │           │           ▲
   │            │  └─ PAUSED ◀┤ (crash)   └───────────┴───────────┤   (no time, or the save failed)
   │            └─────────────┴───────────────────────────────────┘   (nothing to save, or the end)
   └──────────────────────────────────────────────────────────────▶ ENDED  (refused at the start)
```

From every state before LEAVING, ENDED is reached at once if nothing is left to take down: all ranks finished,
the trainer refused, or there was no progress.

* STARTING: fenced in, choosing the checkpoint to resume from.
* LAUNCHING: the step with the agents is started; no rank has passed a safe point yet.
* RUNNING: every rank trains. An operator's save happens here, without leaving the state.
* SAVING: the ranks were asked to save and to stop.
* CHECKING: the last save (of an emergency, or of the end) is committed and is being read back.
* PAUSED: after a crash, before the next restart.
* LEAVING: the step is being taken down; then requeue, or not, and out.
* ENDED: an exit code is decided.
"""

from enum import StrEnum
from typing import Literal, Self

import msgspec

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.config.schema import RunConfig
from verl_slurm.wire.messages import PartSaved, RankRefused, SavedOnNodes, SaveStarted
from verl_slurm_daemon.decide import actions as act, inputs

# Half a minute in all: a busy file server may need that, and a place in a full cluster is worth it.
IN_PLACE_S = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds between tries in place of a start that came to nothing."""
SLURM_AWAY_S = 60.0
"""Between tries after that while Slurm does not answer: it takes no requeue either."""

MOST_FAILED_STARTS = 24
"""Starts in a row that come to nothing before any training, after which a person has to look."""
_FIRST_DELAY_S, _LONGEST_DELAY_S = 30, 3600


def delay_after(failed: int) -> int | None:
    """Returns the seconds that the next start waits after `failed` in a row, 30 to 3600; None: as configured."""
    # The last of `MOST_FAILED_STARTS` begins some 17 hours after the first.
    return min(_FIRST_DELAY_S << (failed - 1), _LONGEST_DELAY_S) if failed else None


class State(StrEnum):
    """The state of a lead; see the module."""

    STARTING = "starting"
    LAUNCHING = "launching"
    RUNNING = "running"
    SAVING = "saving"
    CHECKING = "checking"
    PAUSED = "paused"
    LEAVING = "leaving"
    ENDED = "ended"


NEXT: dict[State, frozenset[State]] = {
    State.STARTING: frozenset({State.LAUNCHING, State.LEAVING, State.ENDED}),
    State.LAUNCHING: frozenset({State.RUNNING, State.CHECKING, State.PAUSED, State.LEAVING, State.ENDED}),
    State.RUNNING: frozenset({State.SAVING, State.CHECKING, State.PAUSED, State.LEAVING, State.ENDED}),
    State.SAVING: frozenset({State.CHECKING, State.LEAVING, State.ENDED}),
    State.CHECKING: frozenset({State.PAUSED, State.LEAVING, State.ENDED}),
    State.PAUSED: frozenset({State.LAUNCHING, State.LEAVING, State.ENDED}),
    State.LEAVING: frozenset({State.ENDED}),
    State.ENDED: frozenset(),
}
"""Allowed successors of each state; it may also follow itself. `policy.decide` holds each event to it."""


_ENOUGH_TO_BLAME = 2


class Intent(StrEnum):
    """The plan for the time when the ranks are gone."""

    REQUEUE = "requeue"
    CANCELLED = "cancelled"
    ALREADY_REQUEUED = "already requeued"


FailureKind = Literal["crash", "hang", "node", "stranger", "environment"]


class Limits(msgspec.Struct, frozen=True):
    """The limits that the user configured (`DaemonConfig`)."""

    crash_budget: int
    backoff_s: float
    no_progress_limit: int
    hang_budget: int = 2
    node_budget: int = 2
    stranger_budget: int = 4
    spare_nodes: int = 0
    """Nodes that the job can do without: spare ones, and those beyond `distributed.min_nodes`."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        return cls(
            crash_budget=config.daemon.crash_budget,
            backoff_s=config.daemon.backoff_s,
            no_progress_limit=config.daemon.no_progress_limit,
            hang_budget=config.daemon.hang_budget,
            node_budget=config.daemon.node_budget,
            spare_nodes=config.held_nodes - config.least_nodes,
        )

    def budget(self, kind: FailureKind) -> int:
        """Returns how many restarts in place such failures allow."""
        budgets: dict[FailureKind, int] = {
            "crash": self.crash_budget,
            "hang": self.hang_budget,
            "node": self.node_budget + self.spare_nodes,
            "stranger": self.stranger_budget,
            "environment": len(IN_PLACE_S),
        }
        return budgets[kind]


class Model(msgspec.Struct, frozen=True):
    """Everything that a decision may depend on."""

    limits: Limits
    state: State = State.STARTING
    world_size: int = 0
    restart: int = 0
    crashes: int = 0
    """Failures of all kinds in this allocation, since the last checkpoint that verified."""
    failed: tuple[tuple[FailureKind, str], ...] = ()
    """The same failures one by one: kind, and the node that caused it (empty: unknown)."""
    failure_kind: FailureKind = "crash"
    failure_node: str = ""
    fruitless: int = 0
    """Crashed restarts in a row that sampled nothing new; the back-off grows with this number."""
    strangers: int = 0
    """Starts in a row, of all attempts, that met strangers and had sampled nothing new."""
    request_id: int = 0
    intent: Intent | None = None
    cause: str = ""
    asking: bool = False
    left: tuple[str, ...] = ()
    """Nodes that the next attempt must not have: their cloud takes them back, or they failed a check."""
    replaced: tuple[str, ...] = ()
    """Nodes of this job whose places spare ones take."""
    unfit: int = 0
    """Attempts in a row, before this one, that met a bad node."""
    starts_failed: int = 0
    """Attempts in a row, before this one, that storage or Slurm stopped."""
    tries: int = 0
    """Starts of ranks in a row, in this attempt, that storage or Slurm stopped; the waits grow with this number."""
    hold: tuple[ExitCode, str] | None = None
    """Patience is over: the job is to be held, and why. The code is that of the end where no job can be held."""
    repeated: bool = False
    """The question under way was asked before, and Slurm did not answer it."""
    ask_again: str = ""
    """The trigger that arrived while Slurm was being asked: Slurm's answer may be older than it."""
    started: int = 0
    """The ranks of this restart that have sent a message, a bit for each."""
    spoke: bool = False
    """A rank's program has sent one itself."""
    finished: int = 0
    """The ranks that have done all steps, a bit for each: a set of thousands would be copied for each rank's word."""
    unverified: str = ""
    """The newest checkpoint whose read-back has no result yet."""
    lost: str = ""
    """The result of the newest checkpoint's read-back, if not good: a run that ends with it is not done."""
    has_deadline: bool = False
    """The save before the end has a time by which it is given up."""
    came: int = 0
    """The ranks that have come to the save before the end, a bit for each."""
    wrote: int = 0
    """Those of them whose own part of it is durable, a bit for each."""
    on_nodes: SavedOnNodes | None = None
    """What the nodes' disks have of the save before the end, while shared storage does not have it."""
    failure: str = ""
    """Why the present restart is being taken down; empty: it is not."""
    refusal: RankRefused | None = None
    """The present trainer's refusal, which another start would not change."""
    step_gone: bool = True
    fresh: bool = False
    """This restart has sampled a rollout of its own: it is past everything that was replayed."""
    requeue: inputs.RequeueAnswered | None = None
    delay_s: int | None = None
    """Seconds that the next start has to wait; None: as the user configured it."""
    trained: bool = False
    """Ranks of this run have trained, so all that a start needs was there."""
    step: int = 0
    """Completed steps, as the ranks report them."""
    wish: inputs.CauseKnown | None = None
    """A requeue for which nothing presses: it waits for a checkpoint that verifies, and the ranks train on."""
    wish_save: int = 0
    """The request for that checkpoint."""
    wish_name: str = ""
    """That checkpoint; empty: it is not there yet."""
    raised: str = ""
    """Where the user's code last raised, and the exception; empty: it has not, or new rollouts came since."""

    def relaunched(self) -> "Model":
        """Returns this at the start of the next restart."""
        # Budgets and `request_id` outlive a restart: a late answer to an older request never equals the present one.
        return msgspec.structs.replace(
            self,
            state=State.LAUNCHING,
            restart=self.restart + 1,
            finished=0,
            failure="",
            failure_kind="crash",
            failure_node="",
            lost="",
            refusal=None,
            step_gone=False,
            fresh=False,
            started=0,
            spoke=False,
        )

    def without(self, node: str) -> "Model":
        """Returns this with a spare node in the place of one that is lost or bad, as far as there are any."""
        if not node or node in self.replaced or len(self.replaced) >= self.limits.spare_nodes:
            return self
        return msgspec.structs.replace(self, replaced=(*self.replaced, node))

    @property
    def all_finished(self) -> bool:
        # `Ready` has not come while `world_size` is 0: nobody has finished then.
        return self.world_size > 0 and self.finished.bit_count() == self.world_size

    def further(self, message: SaveStarted | PartSaved) -> "Model":
        """Returns this with a rank's progress in the save before the end."""
        if self.state is not State.SAVING or message.request_id != self.request_id:
            return self
        if isinstance(message, SaveStarted):
            return msgspec.structs.replace(self, came=self.came | self.bit(message.rank))
        return msgspec.structs.replace(self, wrote=self.wrote | self.bit(message.rank))

    def bit(self, rank: int) -> int:
        """Returns the bit of a rank; none of a number that no rank has, which could be of any size."""
        return 1 << rank if 0 <= rank < self.world_size else 0

    @property
    def saves_unbounded(self) -> bool:
        """Returns whether this is a save before the end without a deadline: nothing but a hang would end it."""
        return self.state is State.SAVING and not self.has_deadline


class Decision(msgspec.Struct, frozen=True):
    model: Model
    actions: tuple[act.Action, ...] = ()


def suspects(failed: tuple[tuple[FailureKind, str], ...]) -> tuple[str, ...]:
    """Returns the node that caused all of several failures; nothing where no node is to blame."""
    # A wrong program fails on any node. So one failure, or several on different nodes, blame none.
    nodes = {node for _, node in failed}
    return tuple(nodes) if len(failed) >= _ENOUGH_TO_BLAME and len(nodes) == 1 and nodes != {""} else ()
