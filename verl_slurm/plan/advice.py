"""From inputs to a plan: what to expect of the run as it is configured, and what each change would buy. Pure.

What an option saves is the difference from the run as configured with the same seed (`simulate.random_strikes`).
"""

from collections.abc import Callable, Sequence
from math import ceil, inf
from typing import NamedTuple

import msgspec

from verl_slurm.base.one_line import counted
from verl_slurm.checks.cluster_rules import advised_lead_s, usable_s
from verl_slurm.config.schema import CheckpointConfig, RunConfig
from verl_slurm.loops.reach import reach
from verl_slurm.plan.plan_inputs import Inputs, cadence_of, interval_of, model_of, schedule_of
from verl_slurm.plan.simulate import (
    Dice,
    RunModel,
    SimulatedOutcome,
    Spent,
    Strikes,
    random_strikes,
    simulate,
)

# Saves and strikes over all simulations: some seconds.
_MOST_EVENTS = 600_000
# Simulations of one option.
_FEWEST = 4


class SimulatedSpread(msgspec.Struct, frozen=True):
    """Of a number over the simulations."""

    mean: float
    median: float
    low: float
    """5 %."""
    high: float
    """95 %."""


class Advice(msgspec.Struct, frozen=True):
    """Whether something suffices, in words."""

    topic: str
    good: bool
    found: str
    remedy: str = ""


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run, and how its simulations came out."""

    change: str
    """As against the configuration; empty: none."""
    goodput: SimulatedSpread
    ettr: SimulatedSpread
    wall_s: SimulatedSpread
    node_hours: SimulatedSpread
    """Of all nodes, spare ones included."""
    saved_s: SimulatedSpread
    """Of `wall_s`, as against the run as configured; below 0: it takes longer."""
    spent: Spent
    """Mean seconds by label."""
    queued_s: float
    strikes: dict[str, float]
    """Mean number by kind."""
    unsaved: float
    """Mean number of warnings without a save in time."""
    finished: float
    """Share of the simulations that came to their end."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `verl-slurm plan`."""

    inputs: Inputs
    verdicts: list[Advice]
    options: list[Option]
    """The first is the run as configured."""
    simulations: int


class _Way(NamedTuple):
    change: str
    cadence: CheckpointConfig
    model: RunModel


def make_plan(
    inputs: Inputs,
    config: RunConfig,
    dice: Callable[[str], Dice],
    *,
    simulations: int,
    again: Callable[[float], Strikes] | None = None,
) -> Plan:
    """Simulates the run as configured, and with each change.

    Args:
        dice: new ones for a seed.
        simulations: of each way; fewer where a run saves or is struck very often.
        again: given the least warning of a notice, strikes that are to happen instead of random ones.
    """
    model = model_of(inputs, config)
    ways = _ways(inputs, config, model)
    saves = model.steps / min(interval_of(way.cadence, way.model)[0] for way in ways)
    per_s = model.notices_per_s + model.crashes_per_s + model.losses_per_node_s * model.nodes
    events = (saves + 2.0 * per_s * model.steps * model.step_s) * len(ways)
    count = min(simulations, max(int(_MOST_EVENTS / (events + 1.0)), _FEWEST))
    runs = [_outcomes(way, dice, count, again, model.warning_s) for way in ways]
    return Plan(
        inputs=inputs,
        verdicts=_verdicts(inputs, config, model),
        options=[_option(way, outcomes, runs[0]) for way, outcomes in zip(ways, runs, strict=True)],
        simulations=count,
    )


def needed_s(model: RunModel) -> float:
    """Returns the warning that a save needs at the worst moment, the daemon's margin left out."""
    if not model.at_step_end:
        return model.emergency_s
    # As if it came at a step's beginning, by the numbers of the session.
    found = reach(seconds_left=inf, running_s=0.0, steps_s=[model.step_s], save_s=model.emergency_s)
    return found.needed_s or 0.0


def _ways(inputs: Inputs, config: RunConfig, model: RunModel) -> list[_Way]:
    cadence = cadence_of(config)
    ways = [_Way("", cadence, model)]
    replace = msgspec.structs.replace
    free = replace(cadence, cadence="young_daly", every_steps=max(model.steps, 1), min_every_steps=1)
    every, _ = interval_of(free, model)
    if every != interval_of(cadence, model)[0]:
        fixed = replace(cadence, cadence="fixed", every_steps=every, runtime_every_steps=every)
        ways.append(_Way(f"a save in {counted(every, 'step')}", fixed, model))
    if cadence.cadence != "continuous" and not model.at_step_end:
        ways.append(_Way("checkpoint.cadence=continuous", replace(cadence, cadence="continuous"), model))
    if model.nodes > 1:
        more = model.spare_nodes + 1
        ways.append(_Way(f"slurm.spare_nodes={more}", cadence, replace(model, spare_nodes=more)))
    if model.local_durable_s is None:
        local = replace(model, local_durable_s=inputs["local_durable_s"].value, same_nodes=0.5)
        ways.append(_Way("checkpoint.local_dir", cadence, local))
    grace = _grace_for(model)
    if grace > model.warning_s:
        ways.append(_Way(f"a grace time of {grace} s", cadence, replace(model, warning_s=float(grace))))
    lead = advised_lead_s(needed_s(model), model.margin_s)
    if needed_s(model) > usable_s(model.lead_s, model.margin_s) and lead < model.limit_s:
        ways.append(_Way(f"slurm.signal_lead_s={lead}", cadence, replace(model, lead_s=float(lead))))
    return ways


def _grace_for(model: RunModel) -> int:
    return ceil(needed_s(model) + model.margin_s)


def _outcomes(
    way: _Way,
    dice: Callable[[str], Dice],
    count: int,
    again: Callable[[float], Strikes] | None,
    usual_s: float,
) -> list[SimulatedOutcome]:
    schedule = schedule_of(way.cadence, way.model)
    # What happened had its own warnings; a longer grace time would have made them longer.
    least_s = way.model.warning_s if way.model.warning_s > usual_s else 0.0
    return [
        # Two sets of dice: how many waits are drawn must not change what strikes.
        simulate(
            way.model,
            schedule,
            again(least_s) if again else random_strikes(way.model, dice(f"strikes {seed}")),
            dice(f"waits {seed}"),
        )
        for seed in range(count)
    ]


def _option(
    way: _Way,
    outcomes: Sequence[SimulatedOutcome],
    base: Sequence[SimulatedOutcome],
) -> Option:
    nodes = way.model.nodes + way.model.spare_nodes
    count = len(outcomes)
    fields = Spent.__struct_fields__
    kinds = sorted({kind for one in outcomes for kind in one.strikes})
    return Option(
        change=way.change,
        goodput=_spread([one.goodput for one in outcomes]),
        ettr=_spread([one.ettr for one in outcomes]),
        wall_s=_spread([one.wall_s for one in outcomes]),
        node_hours=_spread([one.allocated_s / 3600.0 * nodes for one in outcomes]),
        saved_s=_spread([a.wall_s - b.wall_s for a, b in zip(base, outcomes, strict=True)]),
        spent=Spent(**{name: sum(getattr(one.spent, name) for one in outcomes) / count for name in fields}),
        queued_s=sum(one.queued_s for one in outcomes) / count,
        strikes={kind: sum(one.strikes.get(kind, 0) for one in outcomes) / count for kind in kinds},
        unsaved=sum(one.unsaved for one in outcomes) / count,
        finished=sum(one.finished for one in outcomes) / count,
    )


def _spread(values: Sequence[float]) -> SimulatedSpread:
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    return SimulatedSpread(sum(ordered) / len(ordered), at(0.5), at(0.05), at(0.95))


def _verdicts(inputs: Inputs, config: RunConfig, model: RunModel) -> list[Advice]:
    cadence = cadence_of(config)
    every, reason = interval_of(cadence, model)
    longest = msgspec.structs.replace(cadence, cadence="young_daly", every_steps=max(model.steps, 1))
    best, why = interval_of(longest, model)
    need, margin = needed_s(model), model.margin_s
    what = "the end of a step and a save take up to" if model.at_step_end else "a verified save takes"
    found = [
        Advice(
            "cadence",
            every <= 2 * best,
            f"a save in {counted(every, 'step')} ({reason}); by cost: {best} ({why})",
        ),
        _deadline(
            "preemption", model.warning_s, need, margin, what, f"a grace time of {_grace_for(model)} s"
        ),
    ]
    lead = advised_lead_s(need, margin)
    remedy = f"slurm.signal_lead_s={lead}"
    found.append(_deadline("time limit", model.lead_s, need, margin, what, remedy))
    return found


def _deadline(topic: str, warning_s: float, need: float, margin: float, what: str, remedy: str) -> Advice:
    enough = need <= usable_s(warning_s, margin)
    found = f"{what} {need:.3g} s; the warning leaves {warning_s:.0f} s, of which the daemon keeps {margin:g} s back"
    return Advice(topic, enough, found, "" if enough else remedy)
