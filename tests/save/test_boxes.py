"""Any way of cutting a tensor, read back by any other."""

import ctypes
import itertools
import random

import pytest
import torch

from verl_slurm.checkpoint.format.tensor_index import Piece
from verl_slurm.save.ranks.boxes import Box, dtype_name, overlap

pytestmark = pytest.mark.torch


def _cuts(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[Box]:
    """A grid over `shape` with `parts` cells a dimension, the last ones smaller or empty, as torch shards."""
    axes = []
    for size, count in zip(shape, parts, strict=True):
        step = -(-size // count)
        axes.append([(min(i * step, size), max(0, min(step, size - i * step))) for i in range(count)])
    return [Box(tuple(at for at, _ in cell), tuple(n for _, n in cell)) for cell in itertools.product(*axes)]


@pytest.mark.parametrize("seed", range(40))
def test_every_box_is_filled_from_any_other_cutting(seed: int) -> None:
    numbers = random.Random(seed)
    shape = tuple(numbers.randint(1, 7) for _ in range(numbers.randint(1, 3)))
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    saved, wanted = (_cuts(shape, tuple(numbers.randint(1, 4) for _ in shape)) for _ in range(2))
    for box in wanted:
        target = torch.full(box.shape, -1.0)
        for cut in saved:
            piece = Piece(file="rank_0000.bin", at=0, offset=cut.offset, shape=cut.shape)
            lies = whole[
                tuple(slice(o, o + n) for o, n in zip(cut.offset, cut.shape, strict=True))
            ].contiguous()
            common = overlap(piece, box, 4)
            if common is None:
                continue
            rows = torch.empty(common.rows)
            ctypes.memmove(rows.data_ptr(), lies.data_ptr() + common.skip, rows.numel() * 4)
            target[common.target].copy_(rows[common.source])
            if common.whole_rows:
                assert target[common.target].is_contiguous()
                assert rows.shape == target[common.target].shape
        assert torch.equal(
            target, whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
        )


def test_a_scalar_is_its_own_box() -> None:
    piece = Piece(file="rank_0000.bin", at=0, offset=(), shape=())
    assert overlap(piece, Box((), ()), 8) is not None
    assert overlap(piece, Box((0,), (1,)), 8) is None


def test_types_that_no_checkpoint_holds_are_refused() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"
    with pytest.raises(TypeError, match="complex64"):
        dtype_name(torch.complex64)
