"""The adaptive KL coefficient, by hand."""

import pytest

from verl_slurm.trainer.objective.advantages import AdaptiveKL

pytestmark = pytest.mark.torch


def test_the_coefficient_follows_the_mean_of_the_window() -> None:
    kl = AdaptiveKL(coef=0.5, target=1.0, size=2)
    kl = kl.update(1.1)  # mean 1.1, error 0.1: 0.5 * 1.01
    assert kl.coef == pytest.approx(0.505)
    kl = kl.update(0.9)  # mean 1.0, error 0
    assert kl.coef == pytest.approx(0.505)
    kl = kl.update(0.8)  # 1.1 has left: mean 0.85, error -0.15: * 0.985
    assert kl.window == (0.9, 0.8)
    assert kl.coef == pytest.approx(0.505 * 0.985)


def test_one_step_changes_the_coefficient_by_two_percent_at_most() -> None:
    kl = AdaptiveKL(coef=1.0, target=0.1, size=1)
    assert kl.update(1e9).coef == pytest.approx(1.02)
    assert kl.update(-5.0).coef == pytest.approx(0.98)


def test_a_penalty_that_is_off_stays_off() -> None:
    assert AdaptiveKL(coef=0.0, target=0.1, size=4).update(7.0).coef == 0.0


def test_a_fixed_coefficient_stays_and_its_window_is_kept() -> None:
    kl = AdaptiveKL(coef=0.5, target=None, size=2).update(9.0).update(7.0).update(8.0)
    assert (kl.coef, kl.window) == (0.5, (7.0, 8.0))


def test_continuing_from_coef_and_window_is_the_same_as_never_stopping() -> None:
    whole = AdaptiveKL(coef=0.02, target=0.1, size=3)
    history = [0.05, 0.3, 0.11, 0.02, 0.4]
    for value in history:
        whole = whole.update(value)
    part = AdaptiveKL(coef=0.02, target=0.1, size=3)
    for value in history[:3]:
        part = part.update(value)
    part = AdaptiveKL(coef=part.coef, target=0.1, size=3, window=part.window)
    for value in history[3:]:
        part = part.update(value)
    assert part == whole


@pytest.mark.parametrize("kl", [float("nan"), float("inf"), float("-inf")])
def test_a_kl_that_is_not_finite_is_refused(kl: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        AdaptiveKL(coef=0.1, target=0.1, size=2).update(kl)
