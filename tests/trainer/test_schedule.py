"""Learning rates, the map of a warm start, and numbers that depend on their name alone."""

import random
import warnings
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers import get_scheduler

from verl_slurm.config.schema import TrainConfig
from verl_slurm.trainer.objective.counter_rng import Purpose, permutation, uniforms
from verl_slurm.trainer.objective.optimizers import learning_rate, schedule_record
from verl_slurm.trainer.objective.warm_start import IDENTITY, Affine, blended, matching

pytestmark = pytest.mark.torch


BASE = 0.8
# 2 steps of warm-up, then 8 more.
BY_HAND = {
    "constant": [0.4, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8],
    "linear": [0.4, 0.8, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1],
    # (1 + cos(pi k / 8)) / 2: 1, 0.9619, 0.8536, 0.6913, 0.5, 0.3087, 0.1464, 0.0381
    "cosine": [0.4, 0.8, 0.8, 0.769552, 0.682843, 0.553073, 0.4, 0.246927, 0.117157, 0.030448],
    # sqrt(2 / (step - 2 + 2)): 1, sqrt(2/3), sqrt(1/2), ...
    "inverse_sqrt": [0.4, 0.8, 0.8, 0.653197, 0.565685, 0.505964, 0.46188, 0.427618, 0.4, 0.377124],
    # the last 4: 4/4, 3/4, 2/4, 1/4
    "wsd": [0.4, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.6, 0.4, 0.2],
}


def _config(schedule: Any, **values: Any) -> TrainConfig:
    decay = 4 if schedule == "wsd" else 0
    return TrainConfig(
        **({"steps": 10, "warmup_steps": 2, "lr_schedule": schedule, "lr_decay_steps": decay} | values)
    )


@pytest.mark.parametrize("schedule", sorted(BY_HAND))
def test_every_schedule_is_what_one_reckons_by_hand(schedule: str) -> None:
    config = _config(schedule)
    assert [learning_rate(BASE, config, step) for step in range(10)] == pytest.approx(
        BY_HAND[schedule], abs=1e-6
    )


@pytest.mark.parametrize(
    ("schedule", "first", "last"),
    [("linear", 0.8, 0.2 + 0.6 / 8), ("cosine", 0.8, 0.2 + 0.6 * 0.03806), ("wsd", 0.8, 0.2 + 0.6 / 4)],
)
def test_what_falls_falls_to_the_floor_and_no_lower(schedule: str, first: float, last: float) -> None:
    config = _config(schedule, lr_min_ratio=0.25)
    assert learning_rate(BASE, config, 2) == first
    assert learning_rate(BASE, config, 9) == pytest.approx(last, abs=1e-5)
    assert learning_rate(BASE, config, 10) == learning_rate(BASE, config, 1000) == BASE * 0.25


def test_an_inverse_root_stops_at_the_floor_and_knows_no_last_step() -> None:
    config = _config("inverse_sqrt", lr_min_ratio=0.25)
    assert learning_rate(BASE, config, 32) == BASE * 0.25  # sqrt(2 / 32)
    assert learning_rate(BASE, config, 31) > BASE * 0.25
    assert learning_rate(BASE, config, 33) == BASE * 0.25


def test_without_a_warm_up_the_first_step_has_the_whole_rate() -> None:
    for schedule in BY_HAND:
        assert learning_rate(BASE, _config(schedule, warmup_steps=0), 0) == BASE


def test_the_cosine_has_the_bits_it_always_had() -> None:
    import math

    config = _config("cosine", steps=24, warmup_steps=3)
    for step in range(3, 24):
        before = 5e-4 * 0.5 * (1.0 + math.cos(math.pi * min((step - 3) / 21, 1.0)))
        assert learning_rate(5e-4, config, step) == before


@pytest.mark.parametrize(
    ("schedule", "theirs", "more", "floor"),
    [
        ("constant", "constant_with_warmup", {}, 0.0),
        ("linear", "linear", {}, 0.0),
        ("cosine", "cosine", {}, 0.0),
        ("cosine", "cosine_with_min_lr", {"min_lr_rate": 0.1}, 0.1),
        ("inverse_sqrt", "inverse_sqrt", {}, 0.0),
        ("wsd", "warmup_stable_decay", {"num_decay_steps": 12, "decay_type": "linear"}, 0.0),
        (
            "wsd",
            "warmup_stable_decay",
            {"num_decay_steps": 12, "decay_type": "linear", "min_lr_ratio": 0.1},
            0.1,
        ),
    ],
)
def test_behind_the_warm_up_every_rate_is_that_of_transformers(
    schedule: str, theirs: str, more: dict[str, Any], floor: float
) -> None:
    """Theirs begins the warm-up at a rate of 0, which is a step for nothing; ours is theirs of one step later."""
    steps, warmup = 60, 5
    decay = 12 if schedule == "wsd" else 0
    config = TrainConfig(
        steps=steps,
        warmup_steps=warmup,
        lr_schedule=schedule,  # type: ignore[arg-type]
        lr_decay_steps=decay,
        lr_min_ratio=floor,
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = get_scheduler(
            theirs,
            optimizer,
            num_warmup_steps=warmup,
            num_training_steps=steps,
            scheduler_specific_kwargs=more,
        )
        rates = []
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    ours = [learning_rate(BASE, config, step) for step in range(steps)]
    assert ours[warmup:] == pytest.approx(rates[warmup:], rel=1e-12)
    if (schedule, floor) == ("wsd", 0.1):
        return  # theirs warms up from the floor, ours from 0 as everywhere
    assert ours[: warmup - 1] == pytest.approx(rates[1:warmup], rel=1e-12)


def test_the_record_of_a_checkpoint_says_all_that_the_rate_follows_from() -> None:
    record = schedule_record(_config("wsd", lr_min_ratio=0.25), 8)["actor"]
    assert record == {
        "schedule": "wsd",
        "warmup_steps": 2,
        "decay_steps": 4,
        "min_ratio": 0.25,
        "base_lr": 1e-3,
        "step": 8,
        "lr": pytest.approx(1e-3 * (0.25 + 0.75 * 0.5)),
    }


OLD = torch.tensor([0.0, 0.5, 1.0])
NEW = torch.tensor([-12.0, 0.0, 12.0])


def test_the_new_scores_get_the_old_mean_and_deviation() -> None:
    full = matching(OLD, NEW)
    assert full is not None
    assert (full.scale, full.offset) == pytest.approx((1 / 24, 0.5))  # by hand: 0.5 / 12, and both centred
    torch.testing.assert_close(full(NEW), OLD)


def test_over_all_ranks_and_not_over_each() -> None:
    parts = [(OLD, NEW), (OLD[:0], NEW[:0]), (torch.tensor([2.0]), torch.tensor([3.0]))]
    old, new = (torch.cat(group).double() for group in zip(*parts, strict=True))
    for part in parts:
        answers = iter(_totals(old, new))  # what the ranks' sums come to
        full = matching(*part, lambda _, answers=answers: next(answers))
        assert full is not None
        assert float(full(new).double().mean()) == pytest.approx(float(old.mean()), abs=1e-6)
        assert float(full(new).double().std()) == pytest.approx(float(old.std()), abs=1e-6)


def _totals(old: torch.Tensor, new: torch.Tensor) -> list[list[float]]:
    first = [float(len(old)), float(old.sum()), float(new.sum())]
    return [first, [float(((x - x.mean()) ** 2).sum()) for x in (old, new)]]


@pytest.mark.parametrize(("old", "new"), [([1.0, 1.0], [3.0, 5.0]), ([1.0, 2.0], [7.0, 7.0]), ([1.0], [9.0])])
def test_where_one_does_not_vary_only_the_means_are_matched(old: list[float], new: list[float]) -> None:
    full = matching(torch.tensor(old), torch.tensor(new))
    assert full is not None
    assert full.scale == 1.0
    assert float(full(torch.tensor(new)).mean()) == pytest.approx(sum(old) / len(old))


def test_without_responses_there_is_no_map() -> None:
    assert matching(OLD[:0], NEW[:0]) is None


@pytest.mark.parametrize("full", [Affine(1 / 24, 0.5), Affine(500.0, -3.0), Affine(1.0, 4.0)])
def test_it_fades_from_all_to_nothing_and_never_turns_the_order(full: Affine) -> None:
    steps = [blended(full, done, 8) for done in range(10)]
    assert (steps[0].scale, steps[0].offset) == pytest.approx((full.scale, full.offset))
    assert steps[8:] == [IDENTITY, IDENTITY]
    ratios = [after.scale / before.scale for before, after in pairwise(steps[:9])]
    assert ratios == pytest.approx([full.scale ** (-1 / 8)] * 8)  # the same factor each step
    assert all(step.scale > 0 for step in steps)
    means = [float(step(NEW).mean()) for step in steps]
    assert means == sorted(means) or means == sorted(means, reverse=True)


def test_no_map_changes_no_bit() -> None:
    scores = torch.rand(100)
    assert blended(Affine(2.0, 1.0), 0, 0)(scores) is scores


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
