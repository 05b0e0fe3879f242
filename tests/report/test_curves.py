"""Rows of steps added up: what counts is drawn once, and unknown loops are drawn, too."""

from typing import Any

import pytest

from verl_slurm.report.curves import Steps
from verl_slurm.report.report_facts import RunCurve


def rows(*steps: int, attempt: int = 1, **columns: float) -> list[dict[str, Any]]:
    return [{"step": float(step), "attempt": attempt, **columns} for step in steps]


def curve(steps: Steps, name: str) -> RunCurve:
    return next(one for one in steps.curves() if one.name == name)


def test_a_step_that_is_done_again_is_drawn_once_with_its_newest_value() -> None:
    steps = Steps([*rows(1, 2, 3, reward=0.1), *rows(2, 3, 4, attempt=2, reward=0.5)])
    assert curve(steps, "reward").points == [(1.0, 0.1), (2.0, 0.5), (3.0, 0.5), (4.0, 0.5)]
    assert steps.attempts_at() == [(1, 1), (2, 2)]
    assert steps.last == 4


def test_tokens_used_count_once_and_those_thrown_back_apart() -> None:
    sampled = {"tokens_per_second": 50.0, "generate_s": 2.0, "response_tokens": 10.0}
    again = {"tokens_per_second": 0.0, "generate_s": 1.0, "response_tokens": 10.0}
    steps = Steps([*rows(1, 2, **sampled), *rows(2, **again)], responses=10)
    found = steps.tokens()
    assert (found.sampled, found.used, found.repeated) == (200, 200, 100)
    assert curve(steps, "tokens_per_second").points == [(1.0, 50.0)], "a replayed step sampled nothing"
    found = Steps(rows(1, response_tokens=10.0)).tokens()
    assert (found.sampled, found.used, found.repeated) == (None, None, None), (
        "not known of how many responses"
    )


def test_a_long_run_is_drawn_with_means_of_neighbours_and_its_last_step() -> None:
    steps = Steps({"step": float(n), "attempt": 1, "reward": n % 2} for n in range(1, 10_001))
    found = curve(steps, "reward")
    assert (len(found.points), found.each) == (500, 20)
    assert found.points[-1] == (10_000.0, 0.5)
    assert (found.least, found.most) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("column", "name", "title"),
    [
        ("critic/score/mean", "reward", "Reward"),
        ("actor/pg_loss", "loss", "Policy loss"),
        ("loss", "loss", "Loss"),
        ("response_length/mean", "length", "Response length (tokens)"),
    ],
)
def test_the_columns_of_other_loops_are_known(column: str, name: str, title: str) -> None:
    found = curve(Steps(rows(1, 2, **{column: 3.0})), name)
    assert (found.title, found.source) == (title, column)


def test_of_an_unknown_loop_the_first_columns_are_drawn() -> None:
    columns = {"wheels": 4.0, "doors": 3.0, "<b>": 2.0, "seats": 1.0, "lights": 0.0}
    names = [one.name for one in Steps(rows(1, 2, step_s=1.0, **columns)).curves()]
    assert names == ["wheels", "doors", "<b>", "seats", "step_s"]


def test_values_that_are_no_numbers_are_passed_over() -> None:
    steps = Steps([{"step": 1, "attempt": 1, "reward": "high", "kl": None, "loss": True, "entropy": 1}])
    assert [one.name for one in steps.curves()] == ["entropy"]


def test_a_stall_belongs_to_the_save_before_it() -> None:
    stalls = {3: 0.25, 4: 0.25, 6: 1.0}
    steps = Steps({"step": float(n), "attempt": 1, "stall_s": stalls.get(n, 0.0)} for n in range(1, 8))
    assert steps.stall_after([2, 5, 7]) == [0.5, 1.0, None]
    assert Steps(rows(1, 2, 3)).stall_after([1]) == [None]


def test_phases_add_up_to_the_steps() -> None:
    parts = {"timing_s/gen": 3.0, "timing_s/update_weights": 0.5, "step_s": 5.0}
    assert Steps(rows(1, 2, **parts)).phases() == {"sampling": 6.0, "weight sync": 1.0, "other": 3.0}
