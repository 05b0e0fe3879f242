"""The same mini-batches whatever the number of ranks, and every row with whoever trains on it."""

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.builders import run_config
from verl_slurm.config.schema import RunConfig, TrainConfig
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer.data import Batch
from verl_slurm.trainer.parallel.mini_batches import Deal, MiniBatches, trained_columns

pytestmark = pytest.mark.torch

ROWS, MINI_BATCH, EPOCHS, STEP = 48, 12, 3, 5
UPDATES = EPOCHS * ROWS // MINI_BATCH


def _config(dp_size: int, generation: int = 4) -> RunConfig:
    return run_config(
        ranks=dp_size,
        sampled_at_once=generation,
        sizes=(ROWS // dp_size, MINI_BATCH // dp_size, 1),
        ppo_epochs=EPOCHS,
    )


def _columns(rows: Sequence[int]) -> Batch:
    """A row of the step's has its own numbers in every column, of all types that there are."""
    at = torch.tensor(rows, dtype=torch.int64)
    return {
        "prompt_ids": torch.stack([at, at + 100, at + 2**40], dim=1),
        "prompt_mask": torch.stack([at % 2 == 0, at % 3 == 0, at % 5 == 0], dim=1),
        "response_ids": at.unsqueeze(1) * 7,
        "response_mask": at.unsqueeze(1) % 7 == 0,
        "old_logprobs": (at + 0.25).float().unsqueeze(1),
        "old_values": (at + 0.5).float().unsqueeze(1),
        "advantages": torch.where(at % 2 == 0, at / 3, torch.nan).float().unsqueeze(1),
        "returns": (at * -1.0).float().unsqueeze(1),
        "scores": at.float(),
    }


def _sampled(rank: int, dp_size: int, generation: int) -> list[int]:
    """Which rows a rank has sampled, as `trainer.learner` does it: micro-batch `index * dp + rank`."""
    pieces = range(ROWS // generation // dp_size)
    starts = [(index * dp_size + rank) * generation for index in pieces]
    return [row for start in starts for row in range(start, start + generation)]


@pytest.mark.parametrize("dp_size", [2, 3, 4, 6])
def test_an_update_has_the_same_rows_in_the_same_order_however_many_ranks_share_it(dp_size: int) -> None:
    alone, deal = Deal.of(_config(1), STEP), Deal.of(_config(dp_size, 2), STEP)
    for index in range(UPDATES):
        pieces = [deal.rows(index, rank) for rank in range(dp_size)]
        assert {len(piece) for piece in pieces} == {MINI_BATCH // dp_size}
        assert np.concatenate(pieces).tolist() == alone.rows(index, 0).tolist()


def test_each_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    deal = Deal.of(_config(1), STEP)
    epochs = np.stack([deal.rows(index, 0) for index in range(UPDATES)]).reshape(EPOCHS, -1)
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs.tolist())
    orders = [*epochs.tolist(), Deal.of(_config(1), STEP + 1).rows(0, 0).tolist()]
    assert len({tuple(order[:MINI_BATCH]) for order in orders}) == EPOCHS + 1


class _Mail:
    """What the ranks of one process put into each other's boxes."""

    def __init__(self, world_size: int) -> None:
        self.boxes: dict[tuple[int, int], Tensor] = {}
        self.barrier = threading.Barrier(world_size, timeout=60)


class _Ranks(Collective):
    def __init__(self, rank: int, world_size: int, mail: _Mail) -> None:
        super().__init__(None)
        self.rank, self.world_size, self._mail = rank, world_size, mail

    def exchange(self, rows: Tensor, going: Sequence[int], coming: Sequence[int]) -> Tensor:
        for target, part in enumerate(rows.split(list(going))):
            self._mail.boxes[self.rank, target] = part
        self._mail.barrier.wait()
        found = [self._mail.boxes[source, self.rank] for source in range(self.world_size)]
        assert [len(part) for part in found] == list(coming)
        return torch.cat(found)


@pytest.mark.parametrize(("dp_size", "generation"), [(1, 4), (2, 4), (3, 2), (4, 12)])
def test_every_rank_gets_the_rows_it_trains_on_to_the_bit(dp_size: int, generation: int) -> None:
    config, mail = _config(dp_size, generation), _Mail(dp_size)
    found: list[list[Batch]] = [[]] * dp_size

    def rank(number: int) -> None:
        batch = _columns(_sampled(number, dp_size, generation))
        made = MiniBatches(config, STEP, batch, _Ranks(number, dp_size, mail))
        found[number] = [made.piece(index) for index in range(UPDATES)]

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(dp_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deal = Deal.of(config, STEP)
    for number in range(dp_size):
        for index in range(UPDATES):
            expected = _columns(deal.rows(index, number).tolist())
            assert (
                found[number][index].keys()
                == set(trained_columns(config.train))
                == expected.keys() - {"scores"}
            )
            for name, column in found[number][index].items():
                assert column.dtype == expected[name].dtype
                assert torch.equal(column.nan_to_num(-1.5), expected[name].nan_to_num(-1.5)), name


def test_a_row_goes_to_a_rank_once_however_many_epochs_there_are() -> None:
    """So no rank ever gets more than the whole step."""
    deal = Deal.of(_config(4), STEP)
    for target in range(4):
        rows = np.concatenate([deal.sent(source, target) for source in range(4)])
        assert len(set(rows.tolist())) == len(rows) < EPOCHS * ROWS // 4


def test_only_what_an_update_reads_is_sent() -> None:
    ppo, grpo = TrainConfig(), TrainConfig(algorithm="grpo", kl_in="loss")
    assert {"scores", "logprobs", "sample_id"}.isdisjoint(trained_columns(ppo))
    assert {"old_values", "returns"} <= set(trained_columns(ppo))
    assert set(trained_columns(grpo)) - set(trained_columns(ppo)) == {"ref_logprobs"}
    assert {"old_values", "returns"}.isdisjoint(trained_columns(grpo))
