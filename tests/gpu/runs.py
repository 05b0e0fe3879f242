"""Runs of one rank on a device, made and given their lives as tests/trainer does it."""

from pathlib import Path

from tests.builders import new_training
from tests.ledger_stats import ledger_stats
from tests.trainer import test_grpo, test_loop
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.inspect.compare import compare
from verl_slurm.config.schema import (
    TrainConfig,
)

STEPS = test_grpo.STEPS


class Runs(test_grpo.Runs):
    """`live` gives many lives in one process, `start` one in processes of its own.

    The safe points of each: 0 step 0, 1 generate, 2-3 score, 4 advantage, 5-8 update; 9 step 1, ... 18 the end.
    """

    start = test_loop.Runs.start

    def make_on(
        self,
        device: str,
        name: str,
        train: TrainConfig,
        *,
        mixed_precision: str = "none",
        engine: str = "hf",
        every_steps: int = STEPS,
        enforce_eager: bool = True,
    ) -> RunPaths:
        return new_training(
            self._root / f"{device}-{name}",
            self._model,
            self._data,
            name=name,
            engine=engine,
            max_new_tokens=5,
            samples_per_prompt=test_grpo.GROUP,
            gpu_memory_utilization=0.2,
            enforce_eager=enforce_eager,
            train=train,
            device=device,
            mixed_precision=mixed_precision,
            every_steps=every_steps,
            keep_last=3,
            gpus_per_node=int(device == "cuda"),
        )


def final(paths: RunPaths) -> Path:
    return paths.checkpoint(STEPS)


def assert_same(paths: RunPaths, twin: RunPaths) -> None:
    """Every bit of both ends, and no rollout sampled twice."""
    result = compare(final(twin), final(paths))
    assert result.same, result.differing
    assert result.num_tensors > 60
    journal = ledger_stats(paths)
    assert (journal.duplicates, journal.problems) == ((), ())
