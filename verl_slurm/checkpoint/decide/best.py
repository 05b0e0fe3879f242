"""Ranks checkpoints by a metric of their step (`Manifest.metrics`). Pure.

One from the middle of a step has none, and is never among the best. Numbers by a reward that was replaced are
ranked only until a checkpoint has one by the present reward. Of equal checkpoints the earlier is the better.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.config.roles import EVAL_PREFIX
from verl_slurm.config.schema import CheckpointConfig

REWARD_NUMBER = "reward_number"
"""Column of a step's row: how often the reward had been replaced; absent before the first time."""

_MAX_METRICS = 256
_MAX_NAME = 128


@dataclass(frozen=True, kw_only=True)
class Best:
    """The request for the best `keep` checkpoints (0: none) by `metric`, a column of a step's row."""

    keep: int
    metric: str = "eval/reward"
    mode: Literal["max", "min"] = "max"

    @classmethod
    def of(cls, config: CheckpointConfig) -> "Best":
        return cls(keep=config.keep_best, metric=config.best_metric, mode=config.best_mode)

    def beats(self, value: float, other: float) -> bool:
        """Returns whether `value` is better than `other`; equal is not better."""
        return value > other if self.mode == "max" else value < other


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A place among the best, from 1."""

    number: int
    value: float


def reward_of(row: Mapping[str, float]) -> float:
    """Returns the number, counted from 0, of the reward that a row belongs to."""
    return row.get(REWARD_NUMBER, 0.0)


def latest_reward(infos: Iterable[CheckpointInfo], best: Best) -> float:
    """Returns the newest reward number among the committed checkpoints with the metric."""
    found = (i for i in infos if i.kind == "committed" and best.metric in i.metrics)
    return max((reward_of(info.metrics) for info in found), default=0.0)


def rank_best(infos: Iterable[CheckpointInfo], best: Best) -> dict[str, Rank]:
    """Ranks the best `best.keep` committed checkpoints that have the metric, by the last reward: name → place."""
    infos = list(infos)
    # Once there is a number by the present reward, numbers by former ones say nothing about it.
    latest = latest_reward(infos, best)
    found = [
        (info.metrics[best.metric], info)
        for info in infos
        if info.kind == "committed" and best.metric in info.metrics and reward_of(info.metrics) == latest
    ]
    sign = -1.0 if best.mode == "max" else 1.0
    # By order within equal values: the earlier one stays, and the kept set does not change without need.
    found.sort(key=lambda pair: (sign * pair[0], pair[1].order))
    return {
        info.name: Rank(number=number, value=value)
        for number, (value, info) in enumerate(found[: best.keep], start=1)
    }


def is_new_best(history: Sequence[Mapping[str, float]], best: Best) -> bool:
    """Returns whether the newest row has a metric of the evaluation that beats all earlier rows of the same reward."""
    # Evaluations are rare and made for judging. Any other metric may set a new best at every step, and a save at every
    # step is not wanted.
    if not best.keep or not history or not best.metric.startswith(EVAL_PREFIX):
        return False
    newest, reward = history[-1].get(best.metric), reward_of(history[-1])
    if newest is None or not math.isfinite(newest):
        return False
    # Of the same reward: numbers by another one cannot be compared.
    earlier = (row.get(best.metric, math.nan) for row in history[:-1] if reward_of(row) == reward)
    return all(best.beats(newest, value) for value in earlier if math.isfinite(value))


def metrics_of(row: Mapping[str, float]) -> dict[str, float]:
    """Selects the part of a step's row that a manifest holds: finite numbers, without the step."""
    kept = [
        (name, value)
        for name, value in row.items()
        if name != "step" and len(name) <= _MAX_NAME and math.isfinite(value)
    ]
    # JSON lacks NaN, and the manifest has the step already.
    # Within the manifest's own limits: a manifest that no reader accepts would lose the checkpoint.
    return dict(kept[:_MAX_METRICS])
