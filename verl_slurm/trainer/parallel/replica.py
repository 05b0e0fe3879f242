"""Makes the ranks of one replica act as one: find, sample and score the same rows, bit for bit.

For a replica of one rank (dp alone) this adds nothing. In a larger one

* one rank, the leader, reads the ledger, journals and counts; the others receive what it found;
* every rank has a whole copy of the policy to sample with and samples an equal part of the micro-batch's prompts. All
  parts are exchanged: no rank samples what another does;
* one rank (the last pipeline stage's first) sends the output of a forward pass, and the reward, to all. No other rank
  asks the reward.

So all of them hold the same buffers however their kernels round. A sample's noise has its own key (`counter_rng`), so
the split of the prompts changes nothing but the batch that a matrix kernel sees. Samples equal those of a data-parallel
run to its rounding, and have the same bits in the same shape.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
import torch

from verl_slurm.trainer.data import Batch
from verl_slurm.trainer.parallel.grid import Grid


class Sampler(Protocol):
    """Samples responses (`trainer.rollout.engines.RolloutEngine`)."""

    @property
    def collective(self) -> bool:
        """Returns whether every rank must call `generate`, even with prompts of no rows."""
        ...

    def generate(self, prompts: Batch, step: int) -> Batch:
        """Samples one response for each prompt."""
        ...


class _Column(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def encode_batch(batch: Batch) -> bytes:
    """Encodes CPU columns as bytes, without pickle."""
    arrays = {name: column.detach().contiguous().numpy() for name, column in batch.items()}
    columns = {name: _Column(a.dtype.str, a.shape, a.tobytes()) for name, a in arrays.items()}
    return msgspec.msgpack.encode(columns)


def decode_batch(data: bytes) -> Batch:
    """Decodes the columns that `encode_batch` was given, into their own memory."""
    columns = msgspec.msgpack.decode(data, type=dict[str, _Column])
    # bytearray: torch wants memory that it may write.
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
        """The model's output is known on this rank first."""

    def found(self, look: Callable[[], Batch | None]) -> Batch | None:
        """Returns what the leader finds, or None, on all ranks alike."""
        # Data parallelism alone: no copy, no collective.
        if self._ranks.world_size == 1:
            return look()
        # One rank reads for all: two nodes may see different ends of one ledger file for a moment.
        mine = look() if self.is_leader else None
        data = self._ranks.share(encode_batch(mine) if mine is not None else b"", source=0)
        return decode_batch(data) if data else None

    def sample(self, sampler: Sampler, prompts: Batch, step: int) -> Batch:
        """Returns one response for each prompt; each rank samples its part."""
        size = self._ranks.world_size
        if size == 1:
            return sampler.generate(prompts, step)
        num = len(prompts["sample_id"])
        # Consecutive parts, gathered in rank order: the rows are in the order of the prompts again.
        mine = slice(self._ranks.rank * num // size, (self._ranks.rank + 1) * num // size)
        # A rank without a prompt sends nothing, and comes to a collective sampler all the same.
        part = b""
        if mine.start < mine.stop or sampler.collective:
            part = encode_batch(sampler.generate({k: v[mine] for k, v in prompts.items()}, step))
        parts = [decode_batch(data) for data in self._ranks.gather(part) if data]
        return {name: torch.cat([made[name] for made in parts]) for name in parts[-1]}

    def told(self, batch: Batch) -> Batch:
        """Returns the speaker's `batch` on all ranks. The others' is ignored."""
        if self._ranks.world_size == 1:
            return batch
        # Told, not computed by each: kernels would mostly round alike, and these columns decide what is trained next.
        data = self._ranks.share(encode_batch(batch) if self.speaks else b"", source=self._speaker)
        return batch if self.speaks else decode_batch(data)

    def told_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Returns the speaker's numbers on all ranks."""
        if self._ranks.world_size == 1:
            return list(numbers)
        data = self._ranks.share(msgspec.msgpack.encode(list(numbers)), source=self._speaker)
        return msgspec.msgpack.decode(data, type=list[float])
