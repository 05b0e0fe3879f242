"""When a save is due: every rule as a sentence, and what no rule may ever do."""

import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from verl_slurm.checkpoint.decide.cadence import (
    Costs,
    Interval,
    SaveDue,
    daly_interval_s,
    decide,
    is_partial_due,
    plan_interval,
)
from verl_slurm.config.schema import CheckpointConfig, StepInterval

HOUR = 3600.0
TABLE = (StepInterval(until_step=1000, every=100), StepInterval(every=500))
CALM = [{"policy_loss": 0.01 * (-1) ** i, "value_loss": 1.0 + 0.02 * (-1) ** i} for i in range(64)]
VOLATILE = [*CALM, *({"policy_loss": 3.0, "value_loss": 1.0} for _ in range(4))]


def config(cadence: str = "adaptive", **changes: Any) -> CheckpointConfig:
    return CheckpointConfig(cadence=cadence, **changes)  # type: ignore[arg-type]


def saved_steps(
    checkpoint: CheckpointConfig, total: int, *, history: Any = (), costs: Costs | None = None
) -> list[int]:
    """The steps at which a run that meets no trouble saves."""
    last, found = 0, []
    for step in range(1, total + 1):
        interval = plan_interval(checkpoint, step=step, history=history, costs=costs)
        if decide(checkpoint, step=step, total_steps=total, last_save=last, interval=interval).save:
            last = step
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("says", "checkpoint", "total", "expected"),
    [
        (
            "fixed saves at multiples of either number, and at the end",
            config("fixed", every_steps=10, runtime_every_steps=4),
            22,
            [4, 8, 10, 12, 16, 20, 22],
        ),
        (
            "adaptive without a table uses the shorter of the two",
            config(every_steps=10, runtime_every_steps=4),
            10,
            [4, 8, 10],
        ),
        (
            "the table's rows follow one another, the last step of a row included",
            config(intervals=(StepInterval(until_step=6, every=2), StepInterval(every=5))),
            16,
            [2, 4, 6, 10, 15, 16],
        ),
        (
            "where a new row's multiple comes late, the interval itself is kept",
            config(intervals=(StepInterval(until_step=7, every=7), StepInterval(every=4))),
            13,
            [7, 8, 12, 13],
        ),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_the_steps_of_a_whole_run(
    says: str, checkpoint: CheckpointConfig, total: int, expected: list[int]
) -> None:
    assert saved_steps(checkpoint, total) == expected, says


def test_the_interval_halves_while_the_loss_is_volatile_and_says_why() -> None:
    checkpoint = config(intervals=TABLE)
    assert plan_interval(checkpoint, step=50, history=CALM).steps == 100
    halved = plan_interval(checkpoint, step=50, history=VOLATILE)
    assert halved.steps == 50
    assert halved.reason == "half of 100, volatile: policy_loss (4 of the last 8 outliers)"
    assert plan_interval(checkpoint, step=1001, history=VOLATILE).steps == 250
    one = config(intervals=(StepInterval(every=1),))
    assert plan_interval(one, step=1, history=VOLATILE).steps == 1


@pytest.mark.parametrize(
    ("says", "changes", "steps"),
    [
        ("not below the floor", {"min_every_steps": 80}, 80),
        ("a floor above the interval leaves the interval", {"min_every_steps": 700}, 100),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_how_far_the_halving_goes(says: str, changes: dict[str, Any], steps: int) -> None:
    assert plan_interval(config(intervals=TABLE, **changes), step=1, history=VOLATILE).steps == steps, says


def test_fixed_is_not_moved_by_a_volatile_loss_or_by_costs() -> None:
    checkpoint = config("fixed", every_steps=10, runtime_every_steps=10)
    costs = Costs(step_s=1.0, save_s=1.0, mtbi_s=1.0)
    assert saved_steps(checkpoint, 25, history=VOLATILE, costs=costs) == [10, 20, 25]


@pytest.mark.parametrize(
    ("save_s", "mtbi_s", "expected"),
    [
        # By hand: sqrt(2*300*86400) = 7200; C/2M = 1/576; 7200 * (1 + 1/72 + 1/5184) - 300.
        (300.0, 86400.0, 7200.0 * (1 + 1 / 72 + 1 / 5184) - 300.0),
        (10.0, 20.0, 20.0 * (1 + 0.5 / 3 + 0.25 / 9) - 10.0),
        (0.0, 100.0, 0.0),
        (200.0, 100.0, 100.0),
        (1e9, 100.0, 100.0),
        (1.0, math.inf, math.inf),
    ],
)
def test_daly_s_formula_by_hand(save_s: float, mtbi_s: float, expected: float) -> None:
    assert daly_interval_s(save_s, mtbi_s) == pytest.approx(expected)


@given(st.floats(1e-3, 1e4), st.floats(1.0, 1e8))
def test_daly_s_interval_is_near_the_best_that_any_interval_can_do(save_s: float, mtbi_s: float) -> None:
    """Against the exact expected time under exponential failures, of which the formula is the series."""

    def expected_time(tau: float) -> float:
        return mtbi_s * math.expm1((tau + save_s) / mtbi_s) / tau

    tau = daly_interval_s(save_s, mtbi_s)
    if save_s > mtbi_s / 2:
        assert 0.0 < tau <= 2 * mtbi_s
        return
    others = [tau * factor for factor in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0) if tau * factor < 50 * mtbi_s]
    assert all(expected_time(tau) <= expected_time(other) * 1.01 for other in others)


@pytest.mark.parametrize(
    ("says", "costs", "steps"),
    [
        ("the cost of a save is not known: save soon, to learn it", Costs(step_s=1.0), 2),
        ("the time of a step is not known yet", Costs(save_s=1.0, mtbi_s=HOUR), 400),
        ("nothing is known yet, and the first step will tell", Costs(), 400),
        ("the optimum in steps", Costs(save_s=2.0, step_s=1.0, mtbi_s=HOUR), 119),
        ("hardly ever interrupted: at least every_steps", Costs(save_s=9.0, step_s=1.0, mtbi_s=1e9), 400),
        ("saves for nothing: at most min_every_steps", Costs(save_s=0.0, step_s=1.0, mtbi_s=HOUR), 2),
        ("steps of an hour: every min_every_steps", Costs(save_s=2.0, step_s=HOUR, mtbi_s=HOUR), 2),
        (
            "not before the last one is durable and a step without a save was timed",
            Costs(save_s=2.0, step_s=1.0, durable_s=300.0, mtbi_s=HOUR),
            301,
        ),
        ("no interruption at all", Costs(save_s=2.0, step_s=1.0, mtbi_s=math.inf), 400),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_young_daly_from_what_was_measured(says: str, costs: Costs, steps: int) -> None:
    checkpoint = config("young_daly", every_steps=400, min_every_steps=2)
    interval = plan_interval(checkpoint, step=7, costs=costs)
    assert interval.steps == steps, says
    assert interval.reason


def test_young_daly_counts_from_the_last_save_and_waits_for_one_that_is_being_written() -> None:
    """Not in multiples; and not beyond its longest interval, nor at the end."""
    checkpoint, interval = config("young_daly", every_steps=40), Interval(steps=10, reason="measured")

    def save(step: int, *, under_way: bool = False) -> bool:
        return decide(
            checkpoint, step=step, total_steps=99, last_save=13, interval=interval, under_way=under_way
        ).save

    assert [save(step) for step in (20, 22, 23, 24)] == [False, False, True, True]
    assert [save(step, under_way=True) for step in (24, 52, 53, 99)] == [False, False, True, True]


def test_continuous_saves_at_the_first_step_that_ends_behind_the_save_before() -> None:
    checkpoint = config("continuous", every_steps=40)
    done: list[int] = []
    for step in range(1, 100):
        under_way = bool(done) and step - done[-1] < 3  # a save takes two steps and a little
        interval = plan_interval(checkpoint, step=step, history=VOLATILE)
        due = decide(
            checkpoint,
            step=step,
            total_steps=99,
            last_save=done[-1] if done else 0,
            interval=interval,
            under_way=under_way,
        )
        done += [step] * due.save
    assert done == [*range(1, 99, 3), 99]


def test_continuous_keeps_to_its_shortest_and_its_longest_interval() -> None:
    checkpoint = config("continuous", every_steps=40, min_every_steps=10)
    interval = plan_interval(checkpoint, step=5)
    assert interval.steps == 10
    saved = {
        under_way: [
            step
            for step in range(1, 45)
            if decide(
                checkpoint, step=step, total_steps=99, last_save=0, interval=interval, under_way=under_way
            ).save
        ]
        for under_way in (False, True)
    }
    assert saved == {False: [*range(10, 45)], True: [*range(40, 45)]}


def test_a_partial_save_gives_way_to_a_full_one() -> None:
    checkpoint = config("fixed", components=("actor",), partial_every_steps=5)
    no, full = SaveDue(save=False, reason=""), SaveDue(save=True, reason="")
    assert [is_partial_due(checkpoint, step=step, full=no).save for step in (0, 4, 5, 10)] == [
        False,
        False,
        True,
        True,
    ]
    assert not is_partial_due(checkpoint, step=5, full=full).save
    assert not is_partial_due(config("fixed"), step=5, full=no).save


rows = st.lists(
    st.fixed_dictionaries(
        {"policy_loss": st.floats(allow_nan=True), "value_loss": st.floats(allow_nan=True)}
    ),
    max_size=40,
)
measured = st.none() | st.floats(0.0, 1e12)


@given(
    cadence=st.sampled_from(["fixed", "adaptive", "young_daly"]),
    every=st.integers(1, 60),
    runtime=st.integers(1, 60),
    floor=st.integers(1, 60),
    total=st.integers(1, 120),
    history=rows,
    flips=st.lists(st.booleans(), min_size=120, max_size=120),
    costs=st.builds(
        Costs, step_s=measured, save_s=measured, durable_s=measured, mtbi_s=st.floats(1e-9, math.inf)
    ),
)
def test_whatever_is_measured_no_two_saves_are_further_apart_than_configured(
    cadence: str,
    every: int,
    runtime: int,
    floor: int,
    total: int,
    history: list[dict[str, float]],
    flips: list[bool],
    costs: Costs,
) -> None:
    checkpoint = config(cadence, every_steps=every, runtime_every_steps=runtime, min_every_steps=floor)
    longest = every if cadence == "young_daly" else min(every, runtime)
    last = 0
    for step in range(1, total + 1):
        rows = [*CALM, *history] if flips[step - 1] else CALM
        interval = plan_interval(checkpoint, step=step, history=rows if step % 7 == 0 else (), costs=costs)
        assert 1 <= interval.steps <= longest
        due = decide(checkpoint, step=step, total_steps=total, last_save=last, interval=interval)
        assert due.reason
        if due.save:
            last = step
        assert step - last < longest
    assert last == total
