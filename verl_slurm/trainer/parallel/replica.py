"""What the ranks of one replica do as one: find, sample and score the same rows, bit for bit.

A replica of one rank (dp alone) does nothing here that it would not do anyway. In a larger one

* one rank, the leader, reads and writes the ledger, and counts; the others are given what it found;
* every rank has a whole copy of the policy to sample with, takes an equal part of the micro-batch's prompts, and
  all parts are exchanged: no rank samples what another does;
* what a forward pass says, and the reward, which is asked by no other rank, is told by one rank (the last pipeline
  stage's first) to all.

So all of them hold the same buffers whatever their kernels round to. A sample's noise has its own name
(`counter_rng`), so how the prompts are dealt out decides nothing but the batch that a matrix kernel sees: samples are
those of a data-parallel run to its rounding, and always the same bits in the same shape.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
import torch

from verl_slurm.trainer.data import Batch
from verl_slurm.trainer.parallel.grid import Grid

__all__ = ["Replica", "Sampler", "decode_batch", "encode_batch"]


class Sampler(Protocol):
    """What samples (`trainer.rollout.engines.RolloutEngine`)."""

    @property
    def collective(self) -> bool:
        """Whether every rank must call `generate`, if with prompts of no rows."""
        ...

    def generate(self, prompts: Batch, step: int) -> Batch:
        """Sample one response for each prompt."""
        ...


class _Column(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def encode_batch(batch: Batch) -> bytes:
    """CPU columns to bytes, without pickle."""
    arrays = {name: column.detach().contiguous().numpy() for name, column in batch.items()}
    columns = {name: _Column(a.dtype.str, a.shape, a.tobytes()) for name, a in arrays.items()}
    return msgspec.msgpack.encode(columns)


def decode_batch(data: bytes) -> Batch:
    """The columns that `encode_batch` was given, in memory of their own."""
    columns = msgspec.msgpack.decode(data, type=dict[str, _Column])
    return {
        name: torch.from_numpy(np.frombuffer(bytearray(c.data), dtype=c.dtype).reshape(c.shape))
        for name, c in columns.items()
    }


class Replica:
    """The ranks of one data-parallel index. Every method is collective among them.

    Runs on every rank.
    """

    def __init__(self, grid: Grid) -> None:
        self._ranks, self._speaker = grid.replica, grid.speaker
        self.is_leader = grid.is_leader
        self.speaks = grid.speaks
        """What the model said is known here first."""

    def found(self, look: Callable[[], Batch | None]) -> Batch | None:
        """What the leader finds, or None, on all alike."""
        if self._ranks.world_size == 1:
            return look()
        mine = look() if self.is_leader else None
        data = self._ranks.share(encode_batch(mine) if mine is not None else b"", source=0)
        return decode_batch(data) if data else None

    def sample(self, sampler: Sampler, prompts: Batch, step: int) -> Batch:
        """One response for each prompt, each rank having sampled its part."""
        size = self._ranks.world_size
        if size == 1:
            return sampler.generate(prompts, step)
        num = len(prompts["sample_id"])
        mine = slice(self._ranks.rank * num // size, (self._ranks.rank + 1) * num // size)
        part = b""
        if mine.start < mine.stop or sampler.collective:
            part = encode_batch(sampler.generate({k: v[mine] for k, v in prompts.items()}, step))
        parts = [decode_batch(data) for data in self._ranks.gather(part) if data]
        return {name: torch.cat([made[name] for made in parts]) for name in parts[-1]}

    def told(self, batch: Batch) -> Batch:
        """The speaker's `batch`, on all. The others' is not looked at."""
        if self._ranks.world_size == 1:
            return batch
        data = self._ranks.share(encode_batch(batch) if self.speaks else b"", source=self._speaker)
        return batch if self.speaks else decode_batch(data)

    def told_numbers(self, numbers: Sequence[float]) -> list[float]:
        """The speaker's numbers, on all."""
        if self._ranks.world_size == 1:
            return list(numbers)
        data = self._ranks.share(msgspec.msgpack.encode(list(numbers)), source=self._speaker)
        return msgspec.msgpack.decode(data, type=list[float])
