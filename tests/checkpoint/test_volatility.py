"""When the loss counts as volatile, and when no longer."""

import math
import random

import pytest
from hypothesis import given, strategies as st

from verl_slurm.checkpoint.decide.cadence import BASELINE, ENTER, NEWEST, judge_volatility, outliers


def noise(count: int, *, level: float = 0.0, width: float = 1.0, seed: int = 1) -> list[float]:
    dice = random.Random(seed)
    return [level + dice.gauss(0.0, width) for _ in range(count)]


def is_volatile(values: list[float]) -> bool:
    return judge_volatility([{"policy_loss": value, "value_loss": 1.0} for value in values]).volatile


BURST = [50.0] * ENTER


@pytest.mark.parametrize(
    ("says", "values", "expected"),
    [
        ("no history", [], False),
        ("too short a history", [0.0] * 20 + [math.nan] * 3, False),
        ("noise around zero", noise(256), False),
        ("noise around a level", noise(256, level=1e6), False),
        ("a constant", [0.7] * 256, False),
        ("one wild value is none", [*noise(100), 50.0], False),
        ("a burst", [*noise(100), *BURST], True),
        ("a burst that is not finite", [*noise(100), *([math.nan] * ENTER)], True),
        (
            "a burst that ends stays volatile while any of it is among the newest",
            [*noise(100), *BURST, *([0.0] * (NEWEST - 1))],
            True,
        ),
        ("and is over after that", [*noise(100), *BURST, *([0.0] * NEWEST)], False),
        ("a new level is volatile at first", [*noise(100), *noise(NEWEST, level=50.0)], True),
        ("and normal in the end", [*noise(100), *noise(BASELINE + NEWEST, level=50.0)], False),
        ("a slow drift is not", [index * 0.05 for index in range(200)], False),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_what_is_volatile(says: str, values: list[float], expected: bool) -> None:
    assert is_volatile(values) is expected, says


def test_either_loss_alone_is_enough_and_is_named() -> None:
    rows = [{"policy_loss": 0.1, "value_loss": value} for value in [*noise(50), *BURST]]
    assert judge_volatility(rows).reason == "volatile: value_loss (3 of the last 8 outliers)"


def test_it_takes_less_to_stay_volatile_than_to_become_so() -> None:
    """The same newest values, once after a burst and once after none."""
    newest = [0.0] * (NEWEST - 1) + [50.0]
    assert not is_volatile([*noise(100), *newest])
    assert is_volatile([*noise(100), *BURST, *newest])


@given(st.lists(st.floats(), max_size=120))
def test_no_values_are_too_strange_and_the_count_is_one(values: list[float]) -> None:
    count = outliers(values)
    assert count is None or 0 <= count <= NEWEST
    first = judge_volatility([{"policy_loss": value} for value in values])
    assert first == judge_volatility([{"policy_loss": value} for value in values])
