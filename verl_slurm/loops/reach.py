"""Decides whether the running step can end, and be saved, before the deadline. Pure.

A guest saves at the end of a step only: in the middle of one, only its own code knows its state. A step of RL takes
minutes and a grace period seconds, so often the answer is no. Measurements decide; without any, the answer is yes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

STEPS_LOOKED_AT = 5
"""The longest of this many steps counts: steps of RL grow with the length of the responses."""
_STEP_MARGIN = 1.1
_SAVE_MARGIN = 1.5
"""A save before the end meets the storage at its worst: all jobs of the partition save at once."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The decision, one line for people, and the seconds until the save would be done (None: not reckoned)."""

    ok: bool
    reason: str
    needed_s: float | None = None


def reach(
    *, seconds_left: float | None, running_s: float, steps_s: Sequence[float], save_s: float | None
) -> Reach:
    """Decides.

    Args:
        seconds_left: until the ranks must be gone; None: no deadline.
        running_s: seconds since the running step began.
        steps_s: durations of the last steps, oldest first; the last `STEPS_LOOKED_AT` count.
        save_s: duration of the last save; None: there was none.
    """
    if seconds_left is None:
        return Reach(ok=True, reason="there is no deadline")
    # The lead ends the ranks at the deadline; a save that begins now would be killed.
    if seconds_left <= 0:
        return Reach(ok=False, reason="the deadline is over")
    # The longest of few: the mean would promise the end of a step that has long responses.
    last = list(steps_s)[-STEPS_LOOKED_AT:]
    # Never measured: taken for nothing. Waiting costs the rest of a grace period, leaving costs the step.
    save = 0.0 if save_s is None else save_s * _SAVE_MARGIN
    # The first step of a start is not measured: it includes warm-up.
    if not last:
        if save > seconds_left:
            reason = f"a save takes about {save:.0f} s, and {seconds_left:.0f} s are left"
            return Reach(ok=False, reason=reason, needed_s=save)
        return Reach(ok=True, reason="no step was measured yet: the end of this one is waited for")
    longest = max(last)
    # A step that is longer than all earlier ones may end at any moment.
    rest = max(0.0, longest * _STEP_MARGIN - running_s)
    needed = rest + save
    story = (
        f"steps take up to {longest:.1f} s, this one runs for {running_s:.1f} s, a save takes "
        + (f"{save_s:.1f} s" if save_s is not None else "an unknown time")
        + f": {needed:.0f} s needed, {seconds_left:.0f} s left"
    )
    return Reach(ok=needed <= seconds_left, reason=story, needed_s=needed)
