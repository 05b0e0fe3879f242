"""How far a run is, how long its last steps took, how much training is left, and what its nodes do."""

from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

LOOKED_AT = 30
"""Last steps that count: a run's pace changes with the length of its responses."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Steps done, and the time of those to come."""

    steps_done: int
    steps: int | None
    """Of the whole run; None: its loop does not say."""
    step_s: float | None
    """The median of the last steps; None: no step has a time yet."""
    steps_timed: int
    seconds_left: float | None
    """Of training, at this pace: no wait in a queue, no save and no restart is in it. None: it cannot be known."""

    @property
    def share(self) -> float | None:
        """Of the steps, those that are done: 0 to 1."""
        return min(self.steps_done / self.steps, 1.0) if self.steps else None


def pace_of(rows: Sequence[Mapping[str, Any]], steps_done: int, steps: int | None) -> Pace:
    """Returns the pace. `rows`: of the last steps, oldest first. `steps`: of all; None or 0: not known."""
    times = [
        time for row in rows[-LOOKED_AT:] if (time := number(row.get("step_s"))) is not None and time > 0
    ]
    usual = median(times) if times else None
    left = None if usual is None or not steps else usual * max(steps - steps_done, 0)
    return Pace(
        steps_done=steps_done,
        steps=steps or None,
        step_s=usual,
        steps_timed=len(times),
        seconds_left=0.0 if steps and steps_done >= steps else left,
    )


def steps_of_equal_rewards(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the steps whose rewards were all equal, and taught nothing: by our numbers, TRL's or verl's."""
    found = []
    for row in rows:
        shares = [
            row.get(name) for name in ("equal_rewards", "frac_reward_zero_std", "train/frac_reward_zero_std")
        ]
        low, high = number(row.get("critic/score/min")), number(row.get("critic/score/max"))
        step = number(row.get("step"))
        if step is not None and (1.0 in map(number, shares) or (low is not None and low == high)):
            found.append(step)
    return found


def number(value: object) -> float | None:
    """Returns a row's value as a float; None if it is no number, or one that no float can hold or compare."""
    # A row comes from a file, and an integer beyond all floats would be a traceback.
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or abs(value) > 1 << 53
        or value != value
    ):
        return None
    return float(value)


NODE_STATES = {
    "starting": "starting",
    "launching": "starting",
    "running": "training",
    "saving": "saving",
    "checking": "saving",
    "paused": "restarting",
    "leaving": "leaving",
}
"""The state of a lead (`verl_slurm_daemon.decide.lead_model`) -> that of the nodes whose ranks it leads."""


def node_states(
    status: Mapping[str, Any], lost: Collection[str], avoided: Collection[str], *, has_nodes: bool
) -> dict[str, list[str]]:
    """Returns the nodes by what they do; a state without nodes is left out.

    `avoided`: the next job stays away from them. `has_nodes`: the run's job is running.
    """
    found: dict[str, list[str]] = {}
    if has_nodes:
        doing = NODE_STATES.get(str(status.get("state")), "waiting")
        spare = [str(node) for node in status.get("spare_nodes", ())]
        trained = [str(node) for node in status.get("train_nodes", ())]
        found[doing] = [node for node in trained if node not in lost]
        found["spare"] = [node for node in spare if node not in lost]
        found["lost"] = list(lost)
    found["avoided"] = list(avoided)
    return {state: nodes for state, nodes in found.items() if nodes}
