"""The states of a lead and the possible transitions. The policy decides when a transition is made.

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
"""Allowed successors of each state; a state may also follow itself. `policy.decide` is checked against this table
after every event.
"""
