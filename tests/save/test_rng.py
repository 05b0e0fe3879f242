"""Generators are captured and put back exactly."""

import random
import struct

import numpy as np
import pytest
import torch

from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.save.ranks import rng

pytestmark = pytest.mark.torch


def _draw() -> list[float]:
    """Numbers of every generator and kind; an odd count of normals, so that a spare one is pending."""
    return [
        random.random(),
        random.gauss(),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(())),
        *torch.randn(3).tolist(),
    ]


def test_after_a_restore_the_same_numbers_come_again() -> None:
    rng.seed_all(5, 1)
    _draw()
    state = rng.capture()
    first = _draw()
    _draw()
    rng.restore(state)
    assert _draw() == first


def test_capturing_draws_nothing_and_each_rank_has_its_own_stream() -> None:
    rng.seed_all(5, 1)
    first = _draw()
    rng.seed_all(5, 1)
    rng.capture()
    assert _draw() == first
    rng.seed_all(5, 0)
    assert _draw() != first


@pytest.mark.parametrize(("position", "has_gauss"), [(625, 0), (2**31 - 1, 0), (2**32 - 1, 0), (624, 2)])
def test_a_position_outside_of_the_table_is_refused(position: int, has_gauss: int) -> None:
    """numpy takes it, and ends in a segmentation fault at the next draw."""
    state = rng.capture()
    assert isinstance(state["numpy"], bytes)
    hostile = state["numpy"][: 4 * 624] + struct.pack("<IId", position, has_gauss, 0.0)
    with pytest.raises(CheckpointCorrupt):
        rng.restore(state | {"numpy": hostile})
    rng.restore(state)


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
def test_a_missing_or_short_state_is_refused(name: str) -> None:
    state = rng.capture()
    with pytest.raises(CheckpointCorrupt):
        rng.restore({key: value for key, value in state.items() if key != name})
    with pytest.raises(CheckpointCorrupt):
        rng.restore(state | {name: state[name][:7]})
