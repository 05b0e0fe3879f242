"""A rollout batch and a runtime state with everything in it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.runtime_state.format import Arrays, RuntimeState


def batch_of(seed: int, n: int = 4) -> Arrays:
    draw = np.random.default_rng(seed)
    return {
        "sample_id": np.arange(seed * n, seed * n + n, dtype=np.int64),
        "prompt_ids": draw.integers(0, 300, (n, 5)),
        "response_mask": np.tile(np.array([True, True, False]), (n, 1)),
        "logprobs": draw.standard_normal((n, 3)).astype(np.float32),
    }


@pytest.fixture
def batch() -> Callable[..., Arrays]:
    """`batch(seed, n=4)` → arrays; the same for the same seed. Two of three response tokens count."""
    return batch_of


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(private_dir(tmp_path / "run"))


@pytest.fixture
def state() -> RuntimeState:
    return RuntimeState(
        rank=1,
        world_size=2,
        step=12,
        phase="update",
        index=3,
        safe_point=7,
        rollout_offset=1536,
        episode_id=1500,
        kl_coef=0.02,
        kl_window=[0.1, 0.25],
        rng={"python": b"\x00state", "torch": bytes(range(100))},
        rollouts=batch_of(1),
        rewards={"scores": np.array([0.5, np.nan, -np.inf]), "scalar": np.array(3, np.int32)},
        history=[{"reward": 0.5, "loss": float("nan")}, {"reward": 0.75}],
    )
