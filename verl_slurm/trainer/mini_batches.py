"""Which responses an update trains on, whatever the number of ranks, and how they come to who trains on them.

A step's responses have one order, that of their sample ids. For each epoch of a step they are put into a random order
of their own, a function of (seed, step, epoch). It is cut into mini-batches, and each mini-batch into as many equal
pieces as there are data-parallel ranks, the first for rank 0. So an update is the same one in every shape that has the
same global batch and the same global mini-batch (`config.layout`): other shapes add the same terms in another order.

What a rank trains on is then mostly what others have sampled. Once a step, before the first update or the first one
after a start, each rank sends each other one the rows which that one will need in any epoch: one all-to-all. The
buffers stay as they were sampled, so a save among the updates is what it was, and a start exchanges again.

What it costs, with N responses to a rank and step, `dp` ranks and E epochs: a rank holds at most min(E, dp) x N rows
more on its host until the step ends, twice that during the exchange, and nothing at all where dp is 1. A row has 17
bytes a response token and 9 a prompt token, with a critic 8 more a response token, with the KL in the loss 4. A step of
1024 responses of 8192 tokens with a critic is 210 MB in all: over 8 ranks, 26 MB more on each for every epoch. The
ranks of a replica, which hold the same rows, exchange them in as many groups side by side.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verl_slurm.config.roles import trained_roles
from verl_slurm.config.schema import RunConfig, TrainConfig
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer.data import Batch
from verl_slurm.trainer.objective.counter_rng import Purpose, permutation

__all__ = ["Deal", "MiniBatches", "trained_columns"]

Rows = NDArray[np.int64]


def trained_columns(train: TrainConfig) -> tuple[str, ...]:
    """What an update reads of a response; the rest is not sent."""
    columns = ["prompt_ids", "prompt_mask", "response_ids", "response_mask", "old_logprobs", "advantages"]
    columns += ["old_values", "returns"] if "critic" in trained_roles(train) else []
    columns += ["ref_logprobs"] if train.kl_in == "loss" else []
    return tuple(columns)


@dataclass(frozen=True, kw_only=True)
class Deal:
    """Who has sampled and who trains on which response of a step. Pure; the same on every rank.

    A row is a response, counted over all ranks in the order of sample ids.
    """

    order: Rows
    """[epochs, mini-batches, dp, responses to a rank] → row."""
    generation: int
    """Rows of one generation micro-batch: of these, one after the other, each rank has every dp-th."""

    @classmethod
    def of(cls, config: RunConfig, step: int) -> "Deal":
        """That of the `step`-th step from 0."""
        train, dp_size = config.train, config.distributed.dp_size
        # Without the rank in its name: this order must not know how many there are.
        orders = [
            permutation(
                config.seed,
                Purpose.MINI_BATCH_ORDER,
                (step, epoch),
                train.batch_size_per_device * dp_size,
            )
            for epoch in range(train.ppo_epochs)
        ]
        order = np.stack(orders).reshape(train.ppo_epochs, -1, dp_size, train.mini_batch_size_per_device)
        return cls(order=order, generation=config.rollout.micro_batch_size_per_device)

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks."""
        return int(self.order.shape[2])

    def rows(self, index: int, rank: int) -> Rows:
        """What `rank` trains on in the `index`-th update of the step, in this order."""
        epoch, mini_batch = divmod(index, self.order.shape[1])
        rows: Rows = self.order[epoch, mini_batch, rank]
        return rows

    def sent(self, source: int, target: int) -> Rows:
        """What `target` trains on in any epoch and `source` has sampled, each row once, in rising order."""
        rows = np.unique(self.order[:, :, target])
        mine: Rows = rows[rows // self.generation % self.dp_size == source]
        return mine

    def place(self, rows: Rows) -> Rows:
        """Where `rows` are in the buffers of the rank that has sampled them."""
        return rows // (self.generation * self.dp_size) * self.generation + rows % self.generation


class MiniBatches:
    """A rank's piece of each mini-batch of a step. Making it is collective among the data-parallel ranks.

    Args:
        batch: this rank's rows as they were sampled, all of a step, on the CPU; at least `trained_columns`. Kept, not
            copied, where there is one rank; with more, what the others need of it is sent, and nothing of it is kept.

    Runs once per step.
    """

    def __init__(self, config: RunConfig, step: int, batch: Mapping[str, Tensor], ranks: Collective) -> None:
        self.step = step
        self._deal, self._rank = Deal.of(config, step), ranks.rank
        self._columns = {name: batch[name] for name in trained_columns(config.train)}
        self._packed: Tensor | None = None
        if ranks.world_size == 1:
            return
        deal, me, everyone = self._deal, ranks.rank, range(ranks.world_size)
        going = [deal.sent(me, other) for other in everyone]
        coming = [deal.sent(other, me) for other in everyone]
        mine = _packed(self._columns.values(), torch.from_numpy(deal.place(np.concatenate(going))))
        self._packed = ranks.exchange(mine, [len(rows) for rows in going], [len(rows) for rows in coming])
        arrived = np.concatenate(coming)
        self._at = np.zeros(deal.order[0].size, dtype=np.int64)
        self._at[arrived] = np.arange(len(arrived))
        # Only what the columns look like is needed from here on.
        self._columns = {
            name: column.new_empty((0, *column.shape[1:])) for name, column in self._columns.items()
        }

    def piece(self, index: int) -> Batch:
        """The columns of what this rank trains on in the `index`-th update of the step."""
        rows = self._deal.rows(index, self._rank)
        if self._packed is None:
            return {name: column[torch.from_numpy(rows)] for name, column in self._columns.items()}
        return _unpacked(self._packed, self._columns, torch.from_numpy(self._at[rows]))


def _packed(columns: Iterable[Tensor], rows: Tensor) -> Tensor:
    """Columns side by side as bytes, uint8 [len(rows), bytes of a row]."""
    parts = [column.reshape(len(column), -1).view(torch.uint8) for column in columns]
    packed = torch.empty((len(rows), sum(part.shape[1] for part in parts)), dtype=torch.uint8)
    begin = 0
    for part in parts:
        packed[:, begin : begin + part.shape[1]] = part[rows]
        begin += part.shape[1]
    return packed


def _unpacked(packed: Tensor, like: Mapping[str, Tensor], rows: Tensor) -> Batch:
    """What `_packed` has made of columns `like` these; only `rows` of it."""
    batch: Batch = {}
    begin = 0
    for name, column in like.items():
        end = begin + column.shape[1:].numel() * column.element_size()
        # Taking rows makes memory of its own, aligned for any type.
        batch[name] = packed[:, begin:end][rows].view(column.dtype).reshape(len(rows), *column.shape[1:])
        begin = end
    return batch
