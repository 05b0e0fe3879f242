"""Assigns the responses of each update for any number of ranks, and sends them to the ranks that train on them.

A step's responses have one order, that of their sample ids. Each epoch of a step shuffles them by a function of (seed,
step, epoch). The result is cut into mini-batches, and each mini-batch into one equal piece for each data-parallel rank,
in rank order. So an update is the same in every shape with the same global batch and global mini-batch
(`config.changes`): other shapes add the same terms in another order.

A rank therefore trains mostly on responses that other ranks sampled. One all-to-all per step, before its
first update in a process, sends each rank the rows that it needs in any epoch. The buffers stay as they were.

The cost, with N responses per rank and step, `dp` ranks and E epochs: a rank holds at most min(E, dp) x N
rows more on its host until the step ends. During the exchange it is twice that; where dp is 1, nothing. A row
has 17 bytes per response token, 9 per prompt token. A critic adds 8 per response token, the KL in the loss 4.
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

Rows = NDArray[np.int64]


def trained_columns(train: TrainConfig) -> tuple[str, ...]:
    """Lists the columns of a response that an update reads; the rest is not sent."""
    columns = ["prompt_ids", "prompt_mask", "response_ids", "response_mask", "old_logprobs", "advantages"]
    columns += ["old_values", "returns"] if "critic" in trained_roles(train) else []
    columns += ["ref_logprobs"] if train.kl_in == "loss" else []
    return tuple(columns)


@dataclass(frozen=True, kw_only=True)
class Deal:
    """Maps each response of a step to the rank that sampled it and those that train on it. Pure.

    A row is a response, counted over all ranks in the order of sample ids.
    """

    order: Rows
    """[epochs, mini-batches, dp, responses per rank] → row."""
    generation: int
    """Rows of one generation micro-batch: each rank has every dp-th of these consecutive rows."""

    @classmethod
    def of(cls, config: RunConfig, step: int) -> "Deal":
        """Returns the deal of the `step`-th step, counted from 0."""
        train, dp_size = config.train, config.distributed.dp_size
        # The key leaves out the rank: this order must not depend on how many there are.
        orders = [
            permutation(
                config.seed, Purpose.MINI_BATCH_ORDER, (step, epoch), train.batch_size_per_device * dp_size
            )
            for epoch in range(train.ppo_epochs)
        ]
        # One order, cut into mini-batches and then into ranks: an update has the same rows in any shape.
        order = np.stack(orders).reshape(train.ppo_epochs, -1, dp_size, train.mini_batch_size_per_device)
        return cls(order=order, generation=config.rollout.micro_batch_size_per_device)

    @property
    def dp_size(self) -> int:
        """Returns the number of data-parallel ranks."""
        return int(self.order.shape[2])

    def rows(self, index: int, rank: int) -> Rows:
        """Returns the rows that `rank` trains on in the `index`-th update of the step, in this order."""
        epoch, mini_batch = divmod(index, self.order.shape[1])
        rows: Rows = self.order[epoch, mini_batch, rank]
        return rows

    def sent(self, source: int, target: int) -> Rows:
        """Returns the rows that `source` sampled and `target` trains on in any epoch, each once, in rising order."""
        # Of all epochs at once: one exchange a step, and a row that two epochs need is sent once.
        rows = np.unique(self.order[:, :, target])
        mine: Rows = rows[rows // self.generation % self.dp_size == source]
        return mine

    def place(self, rows: Rows) -> Rows:
        """Returns the positions of `rows` in the buffers of the rank that sampled them."""
        # A buffer has a rank's micro-batches one after the other; in the order the others' lie between them.
        return rows // (self.generation * self.dp_size) * self.generation + rows % self.generation


class MiniBatches:
    """A rank's piece of each mini-batch of a step. Its construction is collective, once a step.

    Args:
        batch: this rank's rows of the whole step as they were sampled, on the CPU; kept if there is one rank.
    """

    def __init__(self, config: RunConfig, step: int, batch: Mapping[str, Tensor], ranks: Collective) -> None:
        self.step = step
        self._deal, self._rank = Deal.of(config, step), ranks.rank
        self._columns = {name: batch[name] for name in trained_columns(config.train)}
        self._packed: Tensor | None = None
        if ranks.world_size == 1:
            return
        deal, me, everyone = self._deal, ranks.rank, range(ranks.world_size)
        # Computed by both sides from the same order, so the counts need not be exchanged.
        going = [deal.sent(me, other) for other in everyone]
        coming = [deal.sent(other, me) for other in everyone]
        # One matrix of bytes: one all-to-all instead of one for each column.
        mine = _packed(self._columns.values(), torch.from_numpy(deal.place(np.concatenate(going))))
        self._packed = ranks.exchange(mine, [len(rows) for rows in going], [len(rows) for rows in coming])
        arrived = np.concatenate(coming)
        self._at = np.zeros(deal.order[0].size, dtype=np.int64)
        # From a row's global number to its place among what arrived.
        self._at[arrived] = np.arange(len(arrived))
        # From here on only dtype and shape of the columns are needed.
        self._columns = {
            name: column.new_empty((0, *column.shape[1:])) for name, column in self._columns.items()
        }

    def piece(self, index: int) -> Batch:
        """Returns the columns that this rank trains on in the `index`-th update of the step."""
        rows = self._deal.rows(index, self._rank)
        if self._packed is None:
            return {name: column[torch.from_numpy(rows)] for name, column in self._columns.items()}
        return _unpacked(self._packed, self._columns, torch.from_numpy(self._at[rows]))


def _packed(columns: Iterable[Tensor], rows: Tensor) -> Tensor:
    """Packs columns side by side as bytes, uint8 [len(rows), bytes of a row]."""
    parts = [column.reshape(len(column), -1).view(torch.uint8) for column in columns]
    packed = torch.empty((len(rows), sum(part.shape[1] for part in parts)), dtype=torch.uint8)
    begin = 0
    for part in parts:
        packed[:, begin : begin + part.shape[1]] = part[rows]
        begin += part.shape[1]
    return packed


def _unpacked(packed: Tensor, like: Mapping[str, Tensor], rows: Tensor) -> Batch:
    """Unpacks `rows` of what `_packed` made from columns `like` these."""
    batch: Batch = {}
    begin = 0
    for name, column in like.items():
        end = begin + column.shape[1:].numel() * column.element_size()
        # Indexing by rows copies into new memory, aligned for any type.
        batch[name] = packed[:, begin:end][rows].view(column.dtype).reshape(len(rows), *column.shape[1:])
        begin = end
    return batch
