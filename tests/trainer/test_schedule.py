"""Learning rates: by hand, and against those of transformers where it has the same schedule."""

import warnings
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from verl_slurm.config.schema import TrainConfig
from verl_slurm.trainer.objective.optimizers import learning_rate, schedule_record

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
    [
        ("linear", 0.8, 0.2 + 0.6 / 8),
        ("cosine", 0.8, 0.2 + 0.6 * 0.03806),
        ("wsd", 0.8, 0.2 + 0.6 / 4),
    ],
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
        (
            "wsd",
            "warmup_stable_decay",
            {"num_decay_steps": 12, "decay_type": "linear"},
            0.0,
        ),
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
