"""Which checkpoints are the best by a metric of their step. Pure.

A checkpoint has the numbers of the step that it ends (`Manifest.metrics`); one from the middle of a step has none, and
is never among the best. Of equal ones the earlier is the better: to reach the same later is no gain, and what is kept
does not change for nothing.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from verl_slurm.checkpoint.info import CheckpointInfo
from verl_slurm.config.schema import CheckpointConfig
from verl_slurm.config.train_checks import EVAL_PREFIX

__all__ = ["Best", "Rank", "is_new_best", "metrics_of", "rank_best"]

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


def rank_best(infos: Iterable[CheckpointInfo], best: Best) -> dict[str, Rank]:
    """The best `best.keep` of the committed ones that have the metric: name → its place.

    Called by: checkpoint.retention, cli.checkpoints.
    """
    found = [
        (info.metrics[best.metric], info)
        for info in infos
        if info.kind == "committed" and best.metric in info.metrics
    ]
    sign = -1.0 if best.mode == "max" else 1.0
    found.sort(key=lambda pair: (sign * pair[0], pair[1].order))
    return {
        info.name: Rank(number=number, value=value)
        for number, (value, info) in enumerate(found[: best.keep], start=1)
    }


def is_new_best(history: Sequence[Mapping[str, float]], best: Best) -> bool:
    """Whether the newest row has a metric of the evaluation that is better than in all rows before it.

    Only of the evaluation: those are rare, and made to judge by. Another metric may set a new best at every step, and
    saving every step is nobody's wish.

    Called by: trainer.pace.
    """
    if not best.keep or not history or not best.metric.startswith(EVAL_PREFIX):
        return False
    newest = history[-1].get(best.metric)
    if newest is None or not math.isfinite(newest):
        return False
    earlier = [row[best.metric] for row in history[:-1] if math.isfinite(row.get(best.metric, math.nan))]
    return all(best.beats(newest, value) for value in earlier)


def metrics_of(row: Mapping[str, float]) -> dict[str, float]:
    """Of a step's row, what a manifest holds: no step, which it has, and no NaN, which JSON has not."""
    kept = [
        (name, value)
        for name, value in row.items()
        if name != "step" and len(name) <= _MAX_NAME and math.isfinite(value)
    ]
    return dict(kept[:_MAX_METRICS])
