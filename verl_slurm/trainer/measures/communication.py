"""Measures how long a step communicates, with a stopwatch around each FSDP2 collective.

On a CPU a collective blocks the rank for its whole duration, including the wait for slower ranks. On a GPU it is the
time from begin to end on its own stream. The part that overlaps computation costs nothing.
"""

import contextlib
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

# Not public, but required by `set_custom_all_gather`. torch is pinned, and a test runs this on real ranks.
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from verl_slurm.trainer.measures.stopwatch import Stopwatch

__all__ = ["COMMUNICATION", "watch_collectives"]

COMMUNICATION = "communication_s"


class _AllGather(DefaultAllGather):
    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def __call__(self, *args: Any, **options: Any) -> Any:
        with self._watch.span(COMMUNICATION):
            return super().__call__(*args, **options)


class _ReduceScatter(DefaultReduceScatter):
    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def __call__(self, *args: Any, **options: Any) -> Any:
        with self._watch.span(COMMUNICATION):
            return super().__call__(*args, **options)


def watch_collectives(models: Iterable[nn.Module | None], watch: Stopwatch) -> None:
    """Makes `watch` measure the collectives of the sharded ones among `models`. The collectives and their bits stay the
    same.
    """
    gather, scatter = _AllGather(watch), _ReduceScatter(watch)
    for model in models:
        for module in model.modules() if model is not None else ():
            if isinstance(module, FSDPModule):
                with contextlib.suppress(ValueError):  # parameters of several meshes: not measured
                    module.set_custom_all_gather(gather)
                    module.set_custom_reduce_scatter(scatter)
