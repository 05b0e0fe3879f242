"""Reads from a run's journal what a simulation needs to know of it. Pure: history and rows of steps in, values out.

A value of which the journal has no example is left out: `plan_inputs.complete` says then what is assumed.

A PLAIN step is neither the first of a start, nor done again, nor beside a save. A save's cost is what the steps
beside it took longer than plain ones, as `trainer.save_pace.CostMeter` counts it.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from itertools import accumulate
from math import inf
from statistics import fmean, median
from typing import Any, NamedTuple

from verl_slurm.journal.causes import meaning_of
from verl_slurm.journal.events import Ended
from verl_slurm.journal.history import History, SaveHistory, mean_time_between
from verl_slurm.plan.plan_inputs import KnownValue
from verl_slurm.plan.simulate import NEVER, Strike, Strikes

# A line of `steps.jsonl`.
Row = dict[str, Any]

_DAY_S = 86400.0
# A rate from a shorter time would say more of the hour than of the cluster.
_LONG_ENOUGH_S = 3600.0


def measure(history: History, rows: Sequence[Row], expected_mtbi_h: float) -> dict[str, KnownValue]:
    """Returns what the journal and `rows`, oldest first, tell, by the names of `plan_inputs.LABELS`."""
    return {**_of_steps(history, rows), **_of_lives(history, rows), **_rates(history, expected_mtbi_h)}


# ---- steps and saves


def _of_steps(history: History, rows: Sequence[Row]) -> dict[str, KnownValue]:
    saves = _saves(history)
    starts = [at for at, _ in _trained(history)]
    # Each save that begins before a step's end, and of these the one that ends last, by bisection: a journal has
    # 300,000 lines.
    begins = sorted(began for began, _, _ in saves)
    ends = list(accumulate((done for _, done, _ in sorted(saves, key=lambda save: save[0])), max))
    plain: list[Row] = []
    first: list[float] = []
    again: list[float] = []
    beside: list[float] = []
    reached, last_end = 0, 0.0
    for row in rows:
        end = _at(row)
        if end is None or not _positive(row.get("step_s"), row.get("step")):
            continue
        seconds, step = float(row["step_s"]), int(row["step"])
        begin = end - seconds
        is_first = bisect_left(starts, last_end) < bisect_left(starts, end)
        if step <= reached:
            again += [row["generate_s"]] if _positive(row.get("generate_s")) else []
        elif is_first:
            # A step that went on in its middle is no whole one.
            first += [seconds] if step == 1 else []
        elif (before := bisect_left(begins, end)) and ends[before - 1] > begin:
            beside.append(seconds)
        else:
            plain.append(row)
        reached, last_end = max(reached, step), end
    if not plain:
        return {}
    # Means where a sum has to come out right (steps, saves), medians of what comes seldom (restarts, queue).
    step_s = fmean(float(row["step_s"]) for row in plain)
    found = {"step_s": _known(step_s, f"the mean of {len(plain)} steps")}
    if first:
        found["warm_up_s"] = _known(max(first[0] - step_s, 0.0), "the first step of the run")
    sampling = [
        row["generate_s"] / row["step_s"] for row in plain if _positive(row.get("generate_s"), row["step_s"])
    ]
    if sampling:
        share = fmean(sampling)
        found["sampling_share"] = _known(share, f"the mean of {len(sampling)} steps")
        if again and share:
            cost = fmean(again) / (share * step_s)
            found["replay_cost"] = _known(min(cost, 1.0), f"{len(again)} steps that were done again")
    periodic = [save.event for _, _, save in saves if not save.event.emergency]
    if beside and periodic:
        extra = (sum(beside) - len(beside) * step_s) / len(periodic)
        found["save_s"] = _known(max(extra, 0.0), f"{len(beside)} steps beside {len(periodic)} saves")
    if periodic:
        durable = median(save.seconds or 0.0 for save in periodic)
        found["durable_s"] = _known(durable, f"the median of {len(periodic)} saves")
        sizes = [save.num_bytes for save in periodic if save.num_bytes]
        if sizes:
            found["state_bytes"] = _known(float(sizes[-1]), "the last save")
    return found


def _saves(history: History) -> list[tuple[float, float, SaveHistory]]:
    """(begin, end, save) of each save, in seconds since 1970."""
    return [
        # To the end of reading back, which takes cores, too.
        (save.at - save.event.seconds, max(save.at, save.read_at or 0.0), save)
        for save in history.all_saves
        if save.event.seconds is not None and save.at is not None
    ]


def _trained(history: History) -> list[tuple[float, int]]:
    """(time, step) of each first safe point."""
    restarts = [restart for attempt in history.attempts for restart in attempt.restarts]
    return sorted((one.trained_at, one.step) for one in restarts if one.trained_at is not None)


# ---- starts, ends, restarts


def _of_lives(history: History, rows: Sequence[Row]) -> dict[str, KnownValue]:
    seen: dict[str, list[float]] = defaultdict(list)
    last_row = max((at for row in rows if (at := _at(row)) is not None), default=inf)
    for number, attempt in enumerate(history.attempts):
        seen["queue_s"] += [] if attempt.queue_s is None else [attempt.queue_s]
        for first, restart in enumerate(attempt.restarts):
            if restart.trained_at is None:
                continue
            if restart.crashed_at is not None:
                in_place = "standby_s" if restart.standby else "in_place_s"
                name = "spare_s" if restart.replaced else in_place
                seen[name].append(restart.trained_at - restart.crashed_at)
            elif not first:
                seen["start_s" if number else "first_start_s"].append(restart.trained_at - attempt.began)
        causes = [cause for _, cause in attempt.causes if cause.cause == "preemption"]
        seen["warning_s"] += [cause.seconds_left for cause in causes if cause.seconds_left is not None]
        cause_at = attempt.causes[0][0] if attempt.causes else inf
        read = [save.read_at for save in attempt.saves if save.read_at and save.read_at >= cause_at]
        seen["emergency_s"] += [at - cause_at for at in read[:1]]
        if isinstance(attempt.end, Ended):
            seen["leave_s"] += [attempt.last - at for at in read[-1:] if not attempt.end.is_final]
            # An end before the last row: the run was submitted again.
            if attempt.end.is_final and attempt.last >= last_row:
                seen["finish_s"].append(attempt.last - last_row)
    found = {name: _seen(values) for name, values in seen.items() if values}
    # Without a second start, the first one is what is known.
    if "start_s" not in found and "first_start_s" in found:
        found["start_s"] = KnownValue(found["first_start_s"].value, "measured", "as the first start")
    return found


def _seen(values: list[float]) -> KnownValue:
    words = "one seen" if len(values) == 1 else f"the median of {len(values)}"
    return KnownValue(median(values), "measured", words, tuple(round(value, 3) for value in values))


# ---- how often


def _rates(history: History, expected_mtbi_h: float) -> dict[str, KnownValue]:
    run_s, num_lossy = history.allocated_seconds(), history.num_lossy
    if run_s < _LONG_ENOUGH_S:
        return {}
    days = run_s / _DAY_S
    causes = [outage.cause for outage in history.outages if outage.cause != "time_limit"]
    notices = sum(meaning_of(cause).strike == "notice" for cause in causes)
    mtbi_s = mean_time_between(num_lossy, run_s, expected_mtbi_h * 3600.0)
    lived = f"in {run_s / 3600.0:.3g} h of this run"
    return {
        "notices_per_day": _known(notices / days, f"{notices} {lived}"),
        # As `young_daly` weighs them: `mean_time_between`.
        "crashes_per_day": _known(
            _DAY_S / mtbi_s, f"{num_lossy} that lost work {lived}, and the belief before"
        ),
        # Counted among those.
        "losses_per_node_day": _known(0.0, "counted among the crashes"),
    }


# ---- what happened, to happen again


class Happened(NamedTuple):
    """The interruptions of a run; `Strike.at` counts from when its ranks last trained."""

    strikes: tuple[Strike, ...]
    steps: int
    """The last step, so far."""


def happened(history: History, rows: Sequence[Row]) -> Happened:
    """Returns the run's interruptions; `rows`: oldest first."""
    trained = _trained(history)
    ended = sorted(
        (at, int(row["step"])) for row in rows if (at := _at(row)) is not None and _positive(row.get("step"))
    )
    warnings = [(at, cause.seconds_left) for one in history.attempts for at, cause in one.causes]
    latest = list(accumulate((at for at, _ in warnings), max))
    usual_s = known.value if (known := _of_steps(history, rows).get("step_s")) else 0.0
    strikes = []
    for outage in history.outages:
        began = datetime.fromisoformat(outage.began).timestamp()
        since, step = _last_until(trained, began) or (began, 0)
        # Whole steps since then, and what can be of the next one.
        if (done := _last_until(ended, began)) and done[0] > since:
            last, step = done
        else:
            last = since
        position = step + min((began - last) / usual_s, 0.95) if usual_s and began > since else None
        # What Slurm said first; without a deadline there is time for any save.
        first = bisect_left(latest, began)
        left = warnings[first][1] if first < len(warnings) else None
        kind, warning_s = meaning_of(outage.cause).strike, 1e9 if left is None else left
        strikes.append(Strike(kind, began - since, warning_s if kind == "notice" else 0.0, position))
    return Happened(tuple(strikes), max((step for _, step in ended), default=0))


def _last_until(each: Sequence[tuple[float, int]], moment: float) -> tuple[float, int] | None:
    """Returns the last of those (sorted) that are no later than the moment."""
    number = bisect_right(each, (moment, inf))
    return each[number - 1] if number else None


def strikes_again(past: Happened, least_warning_s: float = 0.0) -> Strikes:
    """Returns the same strikes in the same order, each at the same step."""
    left = iter(past.strikes)

    def next_strike(begins: float, trains: float) -> Strike:
        strike = next(left, None)
        if strike is None:
            return NEVER
        # Beyond that step already: as long after the ranks train as it came then.
        return strike._replace(
            at=max(trains + strike.at, begins), warning_s=max(strike.warning_s, least_warning_s)
        )

    return next_strike


def _at(row: Row) -> float | None:
    try:
        return datetime.fromisoformat(row["time"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return None


def _known(value: float, basis: str) -> KnownValue:
    return KnownValue(value, "measured", basis)


def _positive(*values: object) -> bool:
    return all(isinstance(value, int | float) and value > 0 for value in values)
