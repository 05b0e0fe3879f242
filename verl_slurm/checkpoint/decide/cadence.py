"""Decides when a periodic save is due. Pure: no clock, no file, no rank. Called at whole steps.

`fixed`: at every multiple of `every_steps` and of `runtime_every_steps`.

`adaptive`: at every multiple of the interval that `intervals` gives for the step; or so long after a save.

`young_daly`: at the number of steps after the last save that costs the least total time for saving and for repeating
lost work. Young (1974) found sqrt(2 C M) seconds for a save that costs C and a mean time M between interruptions. Daly,
"A higher order estimate of the optimum checkpoint interval for restart dumps" (2006), found for C < 2M

    sqrt(2 C M) * (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C         and M for all others.

C is the training time that one save takes (`trainer.save_pace`), not the time until it is durable. M is counted
from the journal (`journal/history.py`). The formula assumes that all work since the last save is repeated.
Here the ledger replays the rollouts, so the run saves too often rather than too seldom.

`continuous`: at the end of a step, as soon as the save before is durable, and at least every `every_steps`.

In `adaptive` and `young_daly` the interval is halved while the loss is volatile (see below), but not below
`min_every_steps`. At the last step a save is always due. In `young_daly` all ranks decide by rank 0's number.

Whether the loss is volatile is judged from the rows of the metric history. A value is an OUTLIER when it lies far
from the values before it, by the modified z-score

    z = |x - median(B)| / max(1.4826 * MAD(B), 0.01 * |median(B)|)        outlier: z > 3.5, or x not finite

with B the BASELINE values that precede the newest NEWEST ones, and MAD the median of |b - median(B)|.

The verdict has hysteresis: volatile from ENTER outliers among the NEWEST values of a metric, until there is none. Rows
older than the history (256) are forgotten, so a loss that stays at a new level becomes the new normal. The history is
the same on every rank and after every resume, to the bit; so is the verdict.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from verl_slurm.config.schema import CheckpointConfig

METRICS = ("policy_loss", "value_loss")
NEWEST = 8
ENTER = 3
BASELINE = 32
_LEAST_BASELINE = 16
# Of Iglewicz and Hoaglin, "How to detect and handle outliers" (1993).
_CUT = 3.5
# Makes MAD the standard deviation of normal values.
_NORMAL = 1.4826
# A loss that hardly moves has a MAD near zero: its level bounds the scale from below.
_LEAST_SPREAD = 0.01
# For a baseline of zeros, which has neither spread nor level.
_TINY = 1e-12


@dataclass(frozen=True, kw_only=True)
class Volatility:
    """The verdict, and its basis in words."""

    volatile: bool
    reason: str


def outliers(values: Sequence[float]) -> int | None:
    """Counts the outliers among the NEWEST of `values` (oldest first); None: too few values to tell."""
    # Without the newest values, so that a burst does not excuse itself.
    baseline = [value for value in values[:-NEWEST][-BASELINE:] if math.isfinite(value)]
    if len(baseline) < _LEAST_BASELINE:
        return None
    middle = median(baseline)
    spread = _NORMAL * median(abs(value - middle) for value in baseline)
    # Not a coefficient of variation: the policy loss of PPO lies around zero.
    scale = max(spread, _LEAST_SPREAD * abs(middle), _TINY)
    return sum(not math.isfinite(value) or abs(value - middle) > _CUT * scale for value in values[-NEWEST:])


def judge_volatility(history: Sequence[Mapping[str, float]]) -> Volatility:
    """Walks the history from its oldest row, calm at first, and returns the final verdict."""
    # A row without the metric counts as an outlier, as a loss that is not finite does.
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
    # Replayed from the oldest row: the verdict is a function of the history alone, so a resume comes to the same one.
    for end in range(_LEAST_BASELINE + NEWEST, len(values) + 1):
        count = outliers(values[max(0, end - NEWEST - BASELINE) : end]) or 0
        # Hysteresis: one value near the limit must not switch the interval to and fro.
        on = count >= ENTER or (on and count > 0)
    return on, count


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Measured costs; None: not measured yet.

    Attributes:
        step_s: seconds of a training step, without saves.
        save_s: training time that a save takes.
        durable_s: seconds from the start of a save until it is durable; the next one cannot begin before.
        mtbi_s: mean time between interruptions that lose work.
    """

    step_s: float | None = None
    save_s: float | None = None
    durable_s: float | None = None
    mtbi_s: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Steps between two saves, and the reason."""

    steps: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class SaveDue:
    """The decision to save now or not, and its reason."""

    save: bool
    reason: str


def daly_interval_s(save_s: float, mtbi_s: float) -> float:
    """Returns the seconds between two saves, by the formula above; C at least 0, M above 0 or infinite."""
    # Outside of the series' range, which holds for C < 2M.
    if save_s >= 2 * mtbi_s:
        return mtbi_s
    # Before the arithmetic: infinity times zero is no number.
    if math.isinf(mtbi_s):
        return math.inf
    part = save_s / (2 * mtbi_s)
    return math.sqrt(2 * save_s * mtbi_s) * (1 + math.sqrt(part) / 3 + part / 9) - save_s


def plan_interval(
    config: CheckpointConfig,
    *,
    step: int,
    history: Sequence[Mapping[str, float]] = (),
    costs: Costs | None = None,
) -> Interval:
    """Plans the interval that holds at `step`, by the newest rows of metrics, oldest first."""
    if config.cadence == "fixed":
        return Interval(steps=min(config.every_steps, config.runtime_every_steps), reason="as configured")
    if config.cadence == "continuous":
        shortest = min(config.min_every_steps, config.every_steps)
        return Interval(steps=shortest, reason="the save before is durable")
    interval = (
        _from_table(config, step) if config.cadence == "adaptive" else _from_costs(config, costs or Costs())
    )
    return _halved(interval, config, history)


def decide(
    config: CheckpointConfig,
    *,
    step: int,
    total_steps: int,
    last_save: int,
    interval: Interval,
    under_way: bool = False,
) -> SaveDue:
    """Decides whether a save is due when `step` whole steps are done. Runs on every rank.

    Args:
        last_save: the step of the last attempted save, or the first step of this attempt.
        interval: the same number on every rank.
        under_way: the last save is still being written.
    """
    if step <= 0:
        return SaveDue(save=False, reason="nothing has been done yet")
    # Before the cadence: the end of a run is a result, whatever its number.
    if step == total_steps:
        return SaveDue(save=True, reason="the last step")
    if config.cadence == "fixed":
        for key, every in (
            ("every_steps", config.every_steps),
            ("runtime_every_steps", config.runtime_every_steps),
        ):
            if step % every == 0:
                return SaveDue(save=True, reason=f"a multiple of {key}={every}")
        return SaveDue(save=False, reason="not a multiple of every_steps or runtime_every_steps")
    # Multiples give predictable names. If the interval has just changed, the next multiple may come too late.
    if config.cadence == "adaptive" and step % interval.steps == 0:
        return SaveDue(save=True, reason=f"a multiple of {interval.steps}: {interval.reason}")
    since = step - last_save
    # Training would wait for the save before: the arena holds one state.
    if under_way and config.cadence in ("young_daly", "continuous") and since < config.every_steps:
        return SaveDue(save=False, reason="the save before is still being written")
    if since >= interval.steps:
        return SaveDue(save=True, reason=f"{since} steps since the last save: {interval.reason}")
    return SaveDue(save=False, reason=f"{since} of {interval.steps} steps since the last save")


def is_partial_due(config: CheckpointConfig, *, step: int, full: SaveDue) -> SaveDue:
    """Returns whether a partial save is due."""
    every = config.partial_every_steps
    if not every or not config.components:
        return SaveDue(save=False, reason="no partial saves are configured")
    if step <= 0 or step % every:
        return SaveDue(save=False, reason=f"not a multiple of partial_every_steps={every}")
    # It contains the partial one.
    if full.save:
        return SaveDue(save=False, reason="a full save is made at this step")
    return SaveDue(save=True, reason=f"a multiple of partial_every_steps={every}")


def _from_table(config: CheckpointConfig, step: int) -> Interval:
    for row in config.intervals:
        if row.until_step is None:
            return Interval(steps=row.every, reason="the last row of intervals")
        if step <= row.until_step:
            return Interval(steps=row.every, reason=f"intervals up to step {row.until_step}")
    return Interval(
        steps=min(config.every_steps, config.runtime_every_steps), reason="no intervals configured"
    )


def _from_costs(config: CheckpointConfig, costs: Costs) -> Interval:
    longest, shortest = config.every_steps, min(config.min_every_steps, config.every_steps)
    if costs.step_s is None or costs.step_s <= 0.0:
        return Interval(steps=longest, reason="it is not known yet how long a step takes")
    if costs.save_s is None:
        return Interval(steps=shortest, reason="the first save, to learn what one costs")
    wanted_s = daly_interval_s(costs.save_s, costs.mtbi_s)
    reason = f"Young/Daly: a save costs {costs.save_s:.3g} s, work is lost every {costs.mtbi_s / 3600:.3g} h"
    # One step between two saves has no save in it: by that step the cost of a save is measured.
    if costs.durable_s is not None and costs.durable_s + costs.step_s > wanted_s:
        wanted_s = costs.durable_s + costs.step_s
        reason = f"a save is durable only after {costs.durable_s:.3g} s, and one step without a save follows"
    # Compared as floats: the quotient may be too large for an int.
    steps = wanted_s / costs.step_s
    # Bounded by the configuration, whatever was measured.
    if steps >= longest:
        return Interval(steps=longest, reason=f"{reason}; at least every_steps={longest}")
    if steps <= shortest:
        return Interval(steps=shortest, reason=f"{reason}; at most every min_every_steps={shortest}")
    return Interval(steps=max(round(steps), shortest), reason=f"{reason}, a step takes {costs.step_s:.3g} s")


def _halved(interval: Interval, config: CheckpointConfig, history: Sequence[Mapping[str, float]]) -> Interval:
    half = max(interval.steps // 2, min(config.min_every_steps, interval.steps), 1)
    # Before the history is judged, which takes a median for each of up to 256 rows.
    if half == interval.steps:
        return interval
    verdict = judge_volatility(history)
    if not verdict.volatile:
        return interval
    return Interval(steps=half, reason=f"half of {interval.steps}, {verdict.reason}")
