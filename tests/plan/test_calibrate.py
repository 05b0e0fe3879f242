"""What a journal tells a simulation, by the journals of real runs on the embedded Slurm; and how near it then comes."""

import time
from collections.abc import Callable

import pytest

from benchmarks.plan_validation import CALIBRATION, PREDICTED, RECORDED, Compared, compare, read
from tests.journals import make_events
from verl_slurm.journal.history import History
from verl_slurm.plan.calibrate import happened, measure, strikes_again
from verl_slurm.plan.simulate import NEVER

_NEAR = 0.05
_DISTURBED = {"killed"}
"""Other programs slowed this run's steps for a while: it is told in docs/plan.md, and held to nothing here."""


def at(seconds: float) -> str:
    return f"2026-11-01T00:{int(seconds) // 60:02}:{seconds % 60:06.3f}+00:00"


def line(event: str, when: float, attempt: int = 1, /, **fields: object) -> dict[str, object]:
    return {"event": event, "time": at(when), "attempt": attempt, **fields}


def row(step: int, end: float, seconds: float, generate: float = 1.0) -> dict[str, object]:
    return {"time": at(end), "attempt": 1, "step": step, "step_s": seconds, "generate_s": generate}


JOURNAL = History(
    make_events(
        [
            line("started", 0),
            line("restart", 1, number=1),
            line("training", 8),
            line("saved", 19.5, name="step_2", seconds=1.0, num_bytes=500),
            line("verified", 19.75, name="step_2"),
            line("crash", 27, kind="crash"),
            line("restart", 28, number=2, resume="step_2"),
            line("training", 32, step=2),
            line("cause", 48, cause="preemption", seconds_left=29.0),
            line("saved", 48.5, name="step_5_sp1", seconds=0.25, num_bytes=500, emergency=True),
            line("verified", 49, name="step_5_sp1"),
            line("ended", 49.5, exit_code=25),
            line("started", 60, 2),
            line("restart", 61, 2, number=1, resume="step_5_sp1"),
            line("training", 66, 2, step=5),
            line("ended", 72, 2, exit_code=0),
        ]
    )
)
ROWS = [
    row(1, 13, 5.0),  # with a second of warm-up
    row(2, 17, 4.0),
    row(3, 21.5, 4.5),  # beside the save
    row(4, 25.5, 4.0),
    row(3, 37, 4.0, 0.1),  # the first of a start, and done again
    row(4, 40.1, 3.1, 0.1),
    row(5, 44.1, 4.0),
    row(6, 70, 2.0),
]


def test_a_journal_gives_each_time_that_a_simulation_asks_for() -> None:
    found = {name: known.value for name, known in measure(JOURNAL, ROWS, 24.0).items()}
    assert found == pytest.approx(
        {
            "step_s": 4.0,
            "warm_up_s": 1.0,
            "sampling_share": 0.25,
            "replay_cost": 0.1,
            "save_s": 0.5,
            "durable_s": 1.0,
            "state_bytes": 500.0,
            "first_start_s": 8.0,
            "in_place_s": 5.0,
            "warning_s": 29.0,
            "emergency_s": 1.0,
            "leave_s": 0.5,
            "queue_s": 10.5,
            "start_s": 6.0,
            "finish_s": 2.0,
        }
    )


def test_what_happened_happens_again_at_the_same_step() -> None:
    past = happened(JOURNAL, ROWS)
    assert [(strike.kind, strike.position) for strike in past.strikes] == [
        ("crash", pytest.approx(4.375)),
        ("notice", 5.95),
    ]
    again = strikes_again(past)
    # For a run that is beyond that step by then: as long after its ranks train as it came.
    assert [again(0.0, 100.0).at, again(130.0, 140.0).at, again(200.0, 210.0)] == [119.0, 156.0, NEVER]
    assert [strike.warning_s for strike in past.strikes] == [0.0, 29.0]
    assert past.steps == 6


def test_a_run_that_lived_for_minutes_tells_no_rates() -> None:
    assert not {"notices_per_day", "crashes_per_day"} & measure(JOURNAL, ROWS, 24.0).keys()


# ---- real runs


@pytest.fixture(params=[name for name in PREDICTED if name not in _DISTURBED])
def compared(request: pytest.FixtureRequest) -> Compared:
    return compare(request.param, RECORDED)


def test_the_goodput_of_a_real_run_is_predicted_within_5_percent(compared: Compared) -> None:
    assert abs(compared.off) <= _NEAR, compared


@pytest.mark.parametrize(
    "wrong",
    [
        lambda model: {"in_place_s": 0.0, "start_s": 0.0},
        lambda model: {"steps": model.steps // 2},
    ],
)
def test_a_wrong_model_does_not_come_near(wrong: Callable[..., dict[str, object]]) -> None:
    offs = [abs(compare(name, RECORDED, wrong).off) for name in PREDICTED if name not in _DISTURBED]
    assert max(offs) > 2 * _NEAR


def test_the_runs_of_the_prediction_were_interrupted_as_the_page_says() -> None:
    kinds = {name: [one.kind for one in happened(*read(name, RECORDED)).strikes] for name in PREDICTED}
    assert kinds["calm"] == []
    assert kinds["preempted"] == ["notice"] * 3
    assert CALIBRATION not in kinds


def test_the_time_grows_with_the_journal_and_not_with_its_square() -> None:
    def seconds(lives: int) -> float:
        lines = []
        for attempt in range(1, lives + 1):
            # Within one hour, at which `at` ends.
            begin = attempt * 3000.0 / lives
            lines += [line("started", begin, attempt), line("training", begin, attempt, step=attempt)]
            lines += [line("saved", begin, attempt, name=f"step_{attempt}", seconds=0.1, num_bytes=1)]
            lines += [line("cause", begin, attempt, cause="preemption", seconds_left=1.0)]
            lines += [line("ended", begin, attempt, exit_code=25)]
        history = History(make_events(lines))
        rows = [row(step, step * 3000.0 / lives, 0.1) for step in range(1, lives + 1)]
        began = time.process_time()
        measure(history, rows, 24.0)
        happened(history, rows)
        return time.process_time() - began

    # Eight times the journal: 64 times as long before.
    assert seconds(8000) < 24 * seconds(1000)
