"""Which checkpoints are the best by a metric of their step. Pure.

A checkpoint has the numbers of the step that it ends (`Manifest.metrics`); one from the middle of a step has none, and
is never among the best. Where the reward was replaced, numbers from before say nothing of the present one: as soon as
there is one by it, those by it are ranked and no others. Of equal ones the earlier is the better: to reach the same
later is no gain, and what is kept does not change for nothing.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.config.metric_names import EVAL_PREFIX
from verl_slurm.config.schema import CheckpointConfig

__all__ = [
    "REWARD_NUMBER",
    "Best",
    "Rank",
    "is_new_best",
    "latest_reward",
    "metrics_of",
    "rank_best",
    "reward_of",
]

REWARD_NUMBER = "reward_number"
"""A column of a step's row: how often the reward had been replaced; not there before the first time."""

_MAX_METRICS = 256
_MAX_NAME = 128


@dataclass(frozen=True, kw_only=True)
class Best:
    """What is asked for.

    Attributes:
        keep: how many; 0: none.
        metric: a column of a step's row.
        mode: whether more or less of it is better.
    """

    keep: int
    metric: str = "eval/reward"
    mode: Literal["max", "min"] = "max"

    @classmethod
    def of(cls, config: CheckpointConfig) -> "Best":
        return cls(keep=config.keep_best, metric=config.best_metric, mode=config.best_mode)

    def beats(self, value: float, other: float) -> bool:
        """Whether `value` is better than `other`; equal is not."""
        return value > other if self.mode == "max" else value < other


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A place among the best, from 1."""

    number: int
    value: float


def reward_of(row: Mapping[str, float]) -> float:
    """Which of the run's rewards a row is of, counted from 0."""
    return row.get(REWARD_NUMBER, 0.0)


def latest_reward(infos: Iterable[CheckpointInfo], best: Best) -> float:
    """The last reward that the committed ones with the metric are of."""
    found = (i for i in infos if i.kind == "committed" and best.metric in i.metrics)
    return max((reward_of(info.metrics) for info in found), default=0.0)


def rank_best(infos: Iterable[CheckpointInfo], best: Best) -> dict[str, Rank]:
    """The best `best.keep` of the committed ones that have the metric, by the last reward: name → its place."""
    infos = list(infos)
    latest = latest_reward(infos, best)
    found = [
        (info.metrics[best.metric], info)
        for info in infos
        if info.kind == "committed" and best.metric in info.metrics and reward_of(info.metrics) == latest
    ]
    sign = -1.0 if best.mode == "max" else 1.0
    found.sort(key=lambda pair: (sign * pair[0], pair[1].order))
    return {
        info.name: Rank(number=number, value=value)
        for number, (value, info) in enumerate(found[: best.keep], start=1)
    }


def is_new_best(history: Sequence[Mapping[str, float]], best: Best) -> bool:
    """Whether the newest row has a metric of the evaluation that is better than in all rows before it of the
    same reward.

    Only of the evaluation: those are rare, and made to judge by. Another metric may set a new best at every step, and
    saving every step is nobody's wish.
    """
    if not best.keep or not history or not best.metric.startswith(EVAL_PREFIX):
        return False
    newest, reward = history[-1].get(best.metric), reward_of(history[-1])
    if newest is None or not math.isfinite(newest):
        return False
    earlier = (row.get(best.metric, math.nan) for row in history[:-1] if reward_of(row) == reward)
    return all(best.beats(newest, value) for value in earlier if math.isfinite(value))


def metrics_of(row: Mapping[str, float]) -> dict[str, float]:
    """Of a step's row, what a manifest holds: no step, which it has, and no NaN, which JSON has not."""
    kept = [
        (name, value)
        for name, value in row.items()
        if name != "step" and len(name) <= _MAX_NAME and math.isfinite(value)
    ]
    return dict(kept[:_MAX_METRICS])
