"""Measures seconds of named parts of a step: by the clock on a CPU, by stream events on a GPU.

`watch_collectives` measures each FSDP2 collective: on a CPU with the wait for slower ranks, on a GPU from
begin to end on its own stream, where a part that overlaps computation costs nothing.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

_Mark = Any
"""Seconds of the clock, or a `torch.cuda.Event`, which has no types."""


class Stopwatch:
    """Adds up measurements by name since the last `take`.

    Two ways to measure may overlap: laps (`start`, then a `lap` after each part) and spans (a `with` block).
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._on_gpu, self._clock = device.type == "cuda", clock
        self._parts: list[tuple[str, _Mark, _Mark]] = []
        self._seconds: dict[str, float] = {}
        self._since: _Mark = None

    def start(self) -> None:
        """Begins the next lap here."""
        self._since = self._mark()

    def lap(self, name: str) -> None:
        """Counts the time since `start` or the previous lap as `name`."""
        now = self._mark()
        self._note(name, self._since, now)
        self._since = now

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Counts the block as `name`; a block that raises counts nothing."""
        began = self._mark()
        yield
        self._note(name, began, self._mark())

    def take(self) -> dict[str, float]:
        """Returns seconds by name and resets them to zero. On a GPU it waits for the measured work to finish."""
        parts, self._parts = self._parts, []
        seconds, self._seconds = self._seconds, {}
        # Events are read once a step: waiting for the device at each measurement would stop what is measured.
        if parts:
            torch.cuda.synchronize()
        for name, began, ended in parts:
            seconds[name] = seconds.get(name, 0.0) + began.elapsed_time(ended) / 1000.0
        return seconds

    def _mark(self) -> _Mark:
        # On a GPU calls return early: the clock would measure the calls, and events on the stream measure the work.
        if not self._on_gpu:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _note(self, name: str, began: _Mark, ended: _Mark) -> None:
        # Kept as events: asking for their time now would wait for the GPU.
        if self._on_gpu:
            self._parts.append((name, began, ended))
        else:
            self._seconds[name] = self._seconds.get(name, 0.0) + ended - began


def memory_bytes(device: torch.device) -> int:
    """Returns this process's peak memory so far in bytes: of the GPU, or without one of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


class GpuMemory:
    """How full this rank's GPU is, read at most once a second."""

    def __init__(
        self,
        device: torch.device,
        *,
        clock: Callable[[], float] = time.monotonic,
        look: Callable[[torch.device], tuple[int, int]] = torch.cuda.mem_get_info,
    ) -> None:
        self._device, self._clock, self._look = device, clock, look
        self._due, self._percent = 0.0, 0.0

    def percent(self) -> float | None:
        """Returns the percent of memory in use, also by other processes; None: no GPU, or no answer."""
        if self._device.type != "cuda":
            return None
        now = self._clock()
        # The driver takes some ten microseconds to answer, and this runs at every safe point.
        if now >= self._due:
            # Also where the look fails: a driver in trouble must not be asked at every safe point.
            self._due = now + 1.0
            try:
                free, total = self._look(self._device)
            except RuntimeError:  # of the driver; training meets the same fault by itself
                return None
            self._percent = 100.0 * (total - free) / total
        return self._percent


COMMUNICATION = "communication_s"


# Not public, but required by `set_custom_all_gather`. torch is pinned, and a test runs this on real ranks.
class _AllGather(DefaultAllGather):
    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def __call__(self, *args: Any, **options: Any) -> Any:
        # On a CPU the call returns once the slowest rank is there, so the wait for it counts.
        with self._watch.span(COMMUNICATION):
            return super().__call__(*args, **options)


class _ReduceScatter(DefaultReduceScatter):
    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def __call__(self, *args: Any, **options: Any) -> Any:
        with self._watch.span(COMMUNICATION):
            return super().__call__(*args, **options)


def watch_collectives(models: Iterable[nn.Module | None], watch: Stopwatch) -> None:
    """Makes `watch` measure the collectives of the sharded ones among `models`; their bits stay the same."""
    gather, scatter = _AllGather(watch), _ReduceScatter(watch)
    for model in models:
        for module in model.modules() if model is not None else ():
            if isinstance(module, FSDPModule):
                with contextlib.suppress(ValueError):  # parameters of several meshes: not measured
                    module.set_custom_all_gather(gather)
                    module.set_custom_reduce_scatter(scatter)
