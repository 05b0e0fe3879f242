"""Decides from the rows of the metric history whether the loss is volatile. Pure.

A value is an OUTLIER when it lies far from the values before it, by the modified z-score

    z = |x - median(B)| / max(1.4826 * MAD(B), 0.01 * |median(B)|)        outlier: z > 3.5, or x not finite

with B the BASELINE values that precede the newest NEWEST ones, and MAD the median of |b - median(B)|. 1.4826 makes MAD
the standard deviation of normal values. 3.5 is the cut of Iglewicz and Hoaglin, "How to detect and handle outliers"
(1993). A coefficient of variation would not work: the policy loss of PPO lies around zero. B leaves out the newest
values, so that a burst does not excuse itself.

The verdict has hysteresis: volatile from ENTER outliers among the NEWEST values of a metric, until there is none. Rows
older than the history (256) are forgotten, so a loss that stays at a new level becomes the new normal. The history is
the same on every rank and after every resume, to the bit; so is the verdict.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["BASELINE", "ENTER", "METRICS", "NEWEST", "Volatility", "judge_volatility", "outliers"]

METRICS = ("policy_loss", "value_loss")
NEWEST = 8
ENTER = 3
BASELINE = 32
_LEAST_BASELINE = 16
_CUT = 3.5
_NORMAL = 1.4826
_LEAST_SPREAD = 0.01
_TINY = 1e-12


@dataclass(frozen=True, kw_only=True)
class Volatility:
    """The verdict, and its basis in words."""

    volatile: bool
    reason: str


def outliers(values: Sequence[float]) -> int | None:
    """Counts the outliers among the NEWEST of `values` (oldest first); None: too few values to tell."""
    baseline = [value for value in values[:-NEWEST][-BASELINE:] if math.isfinite(value)]
    if len(baseline) < _LEAST_BASELINE:
        return None
    middle = median(baseline)
    spread = _NORMAL * median(abs(value - middle) for value in baseline)
    scale = max(spread, _LEAST_SPREAD * abs(middle), _TINY)
    return sum(not math.isfinite(value) or abs(value - middle) > _CUT * scale for value in values[-NEWEST:])


def judge_volatility(history: Sequence[Mapping[str, float]]) -> Volatility:
    """Walks the history from its oldest row, calm at first, and returns the final verdict.

    Args:
        history: rows of metrics, oldest first; a metric that a row lacks counts as not finite.
    """
    found = {name: _judge([row.get(name, math.nan) for row in history]) for name in METRICS}
    volatile = [
        f"{name} ({count} of the last {NEWEST} outliers)" for name, (on, count) in found.items() if on
    ]
    if volatile:
        return Volatility(volatile=True, reason=f"volatile: {', '.join(volatile)}")
    if len(history) < _LEAST_BASELINE + NEWEST:
        return Volatility(volatile=False, reason="too few steps to call the loss volatile")
    return Volatility(volatile=False, reason="the loss is calm")


def _judge(values: Sequence[float]) -> tuple[bool, int]:
    on, count = False, 0
    for end in range(_LEAST_BASELINE + NEWEST, len(values) + 1):
        count = outliers(values[max(0, end - NEWEST - BASELINE) : end]) or 0
        on = count >= ENTER or (on and count > 0)
    return on, count
