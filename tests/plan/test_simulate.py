"""The simulation agrees with the published formulas where these hold, and keeps its books where they do not."""

import math
from random import Random
from statistics import fmean, stdev

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from verl_slurm.checkpoint.decide.cadence import daly_interval_s
from verl_slurm.config.schema import CheckpointConfig
from verl_slurm.plan.plan_inputs import schedule_of
from verl_slurm.plan.simulate import (
    NEVER,
    RunModel,
    SimulatedOutcome,
    Strike,
    Strikes,
    random_strikes,
    simulate,
)

PLAIN = RunModel(steps=200, step_s=10.0)


def saves_each(steps: int) -> CheckpointConfig:
    return CheckpointConfig(every_steps=steps, runtime_every_steps=steps)


def run(model: RunModel, every: int = 10, seed: int = 0, strikes: Strikes | None = None) -> SimulatedOutcome:
    schedule = schedule_of(saves_each(every), model)
    return simulate(
        model, schedule, strikes or random_strikes(model, Random(f"strikes {seed}")), Random(f"waits {seed}")
    )


def struck(*strikes: Strike) -> Strikes:
    left = iter(strikes)
    return lambda begins, trains: next(left, NEVER)


def fates(model: RunModel, every: int, seeds: int) -> list[SimulatedOutcome]:
    return [run(model, every, seed) for seed in range(seeds)]


# ---- Daly (2006): blocking saves, restarts that can fail, no ledger

_MTBF_S, _SAVE_S, _RESTART_S = 3600.0, 20.0, 60.0
_DALY = RunModel(
    steps=2000,
    step_s=10.0,
    save_s=_SAVE_S,
    durable_s=_SAVE_S,
    in_place_s=_RESTART_S,
    crashes_per_s=1 / _MTBF_S,
)


def dalys_total_s(interval_s: float) -> float:
    """Expected time with everything: the cost function of Daly, "A higher order estimate of the optimum checkpoint
    interval for restart dumps" (2006)."""
    segments = _DALY.steps * _DALY.step_s / interval_s
    return (
        _MTBF_S
        * math.exp(_RESTART_S / _MTBF_S)
        * (math.exp((interval_s + _SAVE_S) / _MTBF_S) - 1.0)
        * segments
    )


@pytest.mark.parametrize("every", [10, 36, 100])
def test_the_time_of_a_run_is_what_daly_expects(every: int) -> None:
    total = [one.allocated_s for one in fates(_DALY, every, 60)]
    error = 4.0 * stdev(total) / math.sqrt(len(total))
    assert fmean(total) == pytest.approx(dalys_total_s(every * _DALY.step_s), abs=error)


def test_the_best_interval_is_young_and_dalys() -> None:
    best = daly_interval_s(_SAVE_S, _MTBF_S) / _DALY.step_s
    took = {
        every: fmean(one.allocated_s for one in fates(_DALY, every, 60)) for every in (9, 18, 37, 74, 148)
    }
    assert 36 < best < 38
    assert min(took, key=lambda every: took[every]) == 37


# ---- by hand


def test_a_run_without_strikes_is_its_parts() -> None:
    model = msgspec.structs.replace(PLAIN, first_start_s=30.0, warm_up_s=5.0, save_s=1.0, finish_s=3.0)
    outcome = run(model, every=50)
    assert outcome.spent.step == 2005.0
    assert outcome.spent.save == 3.0
    assert outcome.allocated_s == 30.0 + 2005.0 + 3.0 + 3.0
    assert outcome.goodput == pytest.approx(2008.0 / 2041.0)
    assert outcome.ettr == pytest.approx(2005.0 / 2041.0)


def test_a_save_in_time_loses_nothing_but_the_first_part_of_a_step() -> None:
    model = msgspec.structs.replace(
        PLAIN, emergency_s=4.0, leave_s=1.0, queue_s=(100.0,), start_s=20.0, margin_s=3.0
    )
    outcome = run(model, strikes=struck(Strike("notice", 126.0, 30.0)))
    assert outcome.spent.again == 0.0
    assert outcome.spent.part == 6.0
    assert outcome.spent.step == 2000.0 - 6.0
    assert outcome.spent.leave == 5.0
    assert outcome.queued_s == 100.0


def test_a_save_too_late_goes_back_to_the_newest_durable_one() -> None:
    model = msgspec.structs.replace(PLAIN, emergency_s=28.0, durable_s=5.0, margin_s=3.0)
    outcome = run(model, strikes=struck(Strike("notice", 126.0, 30.0)))
    assert outcome.unsaved == 1
    assert outcome.spent.again == 26.0
    # The warning is waited for in vain.
    assert outcome.spent.leave == 27.0


def test_a_save_that_is_still_written_does_not_count() -> None:
    model = msgspec.structs.replace(PLAIN, durable_s=30.0)
    assert run(model, strikes=struck(Strike("crash", 126.0))).steps_again == pytest.approx(12.6)
    assert run(model, strikes=struck(Strike("crash", 131.0))).steps_again == pytest.approx(3.1)


def test_what_was_sampled_once_is_replayed() -> None:
    model = msgspec.structs.replace(PLAIN, sampling_share=0.6, replay_cost=0.1, crashes_per_s=0.0)
    outcome = run(model, strikes=struck(Strike("crash", 83.0)))
    # Eight steps again, of which sampling takes a tenth of 6 s; of the ninth 3 s had been sampled.
    assert outcome.spent.step == pytest.approx(200 * 10.0 - 8 * 5.4 - 3.0 * 0.9)
    assert outcome.spent.again == 83.0


def test_a_guest_that_cannot_end_its_step_in_time_leaves_at_once() -> None:
    guest = RunModel(steps=50, step_s=100.0, at_step_end=True, emergency_s=5.0, margin_s=3.0)
    late = run(guest, strikes=struck(Strike("notice", 40.0, 30.0)))
    assert (late.unsaved, late.spent.leave) == (1, 0.0)
    soon = run(guest, strikes=struck(Strike("notice", 95.0, 30.0)))
    assert (soon.unsaved, soon.spent.leave) == (0, 5.0)
    assert soon.spent.again == 0.0


def test_verl_saves_the_step_before_where_the_end_of_this_one_is_too_far() -> None:
    verl = RunModel(
        steps=50, step_s=100.0, at_step_end=True, keeps_step_before=True, emergency_s=5.0, margin_s=3.0
    )
    outcome = run(verl, strikes=struck(Strike("notice", 340.0, 30.0)))
    assert (outcome.unsaved, outcome.spent.leave, outcome.spent.again) == (0, 5.0, 40.0)


def test_a_spare_node_saves_the_requeue() -> None:
    model = msgspec.structs.replace(
        PLAIN, nodes=10**9, spare_nodes=1, spare_s=5.0, lost_node_s=300.0, queue_s=(900.0,)
    )
    both = struck(Strike("lost_node", 105.0), Strike("lost_node", 405.0))
    outcome = run(model, strikes=both)
    # The first takes the spare one, the second finds none.
    assert (outcome.spent.start, outcome.queued_s, outcome.spent.leave) == (5.0, 900.0, 300.0)


def test_a_copy_on_the_nodes_serves_a_restart_in_place() -> None:
    model = msgspec.structs.replace(PLAIN, durable_s=60.0, local_durable_s=1.0)
    outcome = run(model, strikes=struck(Strike("crash", 126.0)))
    assert outcome.steps_again == pytest.approx(2.6)


def test_a_run_that_gets_nowhere_is_given_up() -> None:
    hopeless = RunModel(steps=100, step_s=100.0, crashes_per_s=1.0, in_place_s=10.0)
    assert not run(hopeless).finished


def test_a_strike_at_a_step_comes_there_however_long_steps_take() -> None:
    strike = Strike("crash", 7.0, position=23.25)
    for model in (PLAIN, msgspec.structs.replace(PLAIN, step_s=3.0, first_start_s=50.0, limit_s=1e6)):
        outcome = run(model, strikes=struck(strike))
        assert outcome.spent.again == pytest.approx(3.25 * model.step_s)
    # Beyond it by then: at its time.
    twice = run(PLAIN, strikes=struck(strike, Strike("crash", 300.0, position=19.0)))
    assert twice.spent.again == pytest.approx(32.5 + (300.0 - 232.5))


def test_the_same_seed_gives_the_same_run() -> None:
    model = msgspec.structs.replace(PLAIN, crashes_per_s=1e-3, notices_per_s=1e-3, queue_s=(1.0, 50.0, 700.0))
    assert run(model, seed=3) == run(model, seed=3)
    assert run(model, seed=3) != run(model, seed=4)


# ---- whatever the model

MODELS = st.builds(
    RunModel,
    steps=st.integers(1, 60),
    step_s=st.floats(0.5, 50.0),
    warm_up_s=st.floats(0.0, 20.0),
    sampling_share=st.floats(0.0, 1.0),
    replay_cost=st.floats(0.0, 1.0),
    save_s=st.floats(0.0, 5.0),
    durable_s=st.floats(0.0, 100.0),
    local_durable_s=st.none() | st.floats(0.0, 20.0),
    emergency_s=st.floats(0.0, 60.0),
    at_step_end=st.booleans(),
    keeps_step_before=st.booleans(),
    warning_s=st.floats(0.0, 60.0),
    margin_s=st.floats(0.0, 5.0),
    limit_s=st.just(math.inf) | st.floats(200.0, 2000.0),
    lead_s=st.floats(10.0, 100.0),
    leave_s=st.floats(0.0, 5.0),
    queue_s=st.lists(st.floats(0.0, 1000.0), min_size=1, max_size=4).map(tuple),
    start_s=st.floats(0.0, 60.0),
    in_place_s=st.floats(0.0, 60.0),
    standby_s=st.floats(0.0, 10.0),
    standby_after_s=st.just(math.inf) | st.floats(0.0, 200.0),
    spare_s=st.floats(0.0, 20.0),
    lost_node_s=st.floats(0.0, 300.0),
    finish_s=st.floats(0.0, 10.0),
    nodes=st.integers(1, 64),
    spare_nodes=st.integers(0, 3),
    same_nodes=st.floats(0.0, 1.0),
    notices_per_s=st.floats(0.0, 0.01),
    crashes_per_s=st.floats(0.0, 0.01),
    losses_per_node_s=st.floats(0.0, 0.001),
)


@settings(max_examples=200, deadline=None)
@given(MODELS, st.integers(1, 20), st.integers(0, 100))
def test_every_allocated_second_has_one_label(model: RunModel, every: int, seed: int) -> None:
    outcome = run(model, every, seed)
    assert outcome.spent.total == pytest.approx(outcome.clock_s, rel=1e-9, abs=1e-6)
    assert all(seconds >= -1e-9 for seconds in msgspec.structs.astuple(outcome.spent))
    assert 0.0 <= outcome.goodput <= 1.0
    if outcome.finished:
        # Nothing is done for less than its replay costs, and nothing counts twice.
        least = model.step_s * (1.0 - model.sampling_share * (1.0 - model.replay_cost))
        counted = outcome.spent.step + outcome.spent.part
        longest = model.steps * model.step_s + (sum(outcome.strikes.values()) + 1) * model.warm_up_s
        assert model.steps * least - 1e-6 <= counted <= longest + 1e-6


@settings(max_examples=15, deadline=None)
@given(st.floats(1e-4, 2e-3), st.floats(1.3, 4.0), st.sampled_from(["crashes_per_s", "notices_per_s"]))
def test_more_failures_never_raise_the_expected_goodput(rate: float, more: float, kind: str) -> None:
    model = msgspec.structs.replace(
        PLAIN,
        in_place_s=30.0,
        start_s=60.0,
        emergency_s=8.0,
        warning_s=30.0,
        sampling_share=0.5,
        replay_cost=0.1,
    )
    few, many = (
        [one.goodput for one in fates(msgspec.structs.replace(model, **{kind: each}), 10, 80)]
        for each in (rate, rate * more)
    )
    error = 3.0 * math.hypot(stdev(few), stdev(many)) / math.sqrt(80)
    assert fmean(many) <= fmean(few) + error


@settings(max_examples=40, deadline=None)
@given(st.floats(0.0, 60.0), st.floats(0.0, 60.0), st.floats(1.0, 1999.0))
def test_a_longer_warning_never_saves_less(shorter: float, longer: float, at: float) -> None:
    shorter, longer = sorted((shorter, longer))
    model = msgspec.structs.replace(PLAIN, emergency_s=20.0, durable_s=15.0, margin_s=3.0)
    less, more = (run(model, strikes=struck(Strike("notice", at, each))) for each in (shorter, longer))
    assert more.spent.again <= less.spent.again
    assert more.unsaved <= less.unsaved
