"""Numbers that depend on their name alone."""

import random

import numpy as np
import pytest
import torch

from verl_slurm.trainer.objective.counter_rng import Purpose, permutation, uniforms

pytestmark = pytest.mark.torch


def test_the_numbers_are_the_published_ones_for_ever() -> None:
    # Computed once with numpy 2.4.6; they must never change, or resumed runs would sample other tokens.
    assert uniforms(7, 3, [11], 2).tolist() == [[0.6924860880957484, 0.1388267138404261]]
    assert permutation(7, Purpose.DATA_ORDER, (1,), 8).tolist() == [3, 0, 1, 5, 4, 6, 7, 2]


def test_a_row_depends_neither_on_its_neighbours_nor_on_how_many_columns_are_asked_for() -> None:
    together = uniforms(1, 2, [5, 6, 7], 9)
    assert np.array_equal(together[1:2], uniforms(1, 2, [6], 9))
    assert np.array_equal(together[:, :4], uniforms(1, 2, [5, 6, 7], 4))


def test_every_part_of_the_name_changes_the_numbers() -> None:
    base = uniforms(1, 2, [3], 4).tolist()
    others = [
        uniforms(2, 2, [3], 4),
        uniforms(1, 3, [3], 4),
        uniforms(1, 2, [4], 4),
        uniforms(1, 2, [3], 4, sample_index=1),
    ]
    assert all(other.tolist() != base for other in others)


def test_uniforms_are_uniform() -> None:
    sample = uniforms(0, 0, range(2000), 10).ravel()
    assert sample.min() >= 0.0
    assert sample.max() < 1.0
    counts, _ = np.histogram(sample, bins=20, range=(0, 1))
    # chi-square with 19 degrees of freedom: 43.8 is passed by chance once in a thousand; the seed is fixed
    assert ((counts - 1000.0) ** 2 / 1000.0).sum() < 43.8


def test_a_permutation_holds_each_index_once_and_differs_by_purpose() -> None:
    order = permutation(0, Purpose.DATA_ORDER, (4,), 100)
    assert sorted(order.tolist()) == list(range(100))
    assert order.tolist() != permutation(0, Purpose.MINI_BATCH_ORDER, (4,), 100).tolist()
    assert order.tolist() != permutation(0, Purpose.DATA_ORDER, (5,), 100).tolist()


def test_no_global_generator_is_touched() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    uniforms(0, 0, [1, 2], 3)
    permutation(0, Purpose.DATA_ORDER, (0,), 10)
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


@pytest.mark.parametrize(("seed", "step"), [(-1, 0), (2**64, 0), (0, -1)])
def test_a_name_that_does_not_fit_is_refused_instead_of_wrapped(seed: int, step: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        uniforms(seed, step, [0], 1)
