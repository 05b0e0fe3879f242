"""Computes what is known beforehand, on each rank, before a model is loaded: a product of matrices, and a sum over all
ranks. A GPU whose arithmetic is wrong raises no error; it spoils a run.

All values are small integers, so float32 is exact in any order of summation, and with TF32: no tolerance is needed. It
takes 0.02 s on a CPU and no random number.
"""

import torch
import torch.distributed as dist

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.checks import WrongProduct

_PERIOD = 7
_BLOCKS = {"cpu": 64, "cuda": 585}
"""Width of the matrices in periods: 448, and 4095, which occupies all of a GPU's processors."""
_ROUNDS = {"cpu": 1, "cuda": 8}
_SUMMED = 1 << 20


class WrongSum(VerlSlurmError):
    """A sum over all ranks came out wrong here. Any of them, or the network, may be the cause."""

    exit_code = ExitCode.INTERNAL


def check_product(device: torch.device) -> None:
    """Multiplies two matrices on `device`.

    Raises:
        WrongProduct: the result is not the known one.
    """
    rows = torch.arange(_PERIOD, dtype=torch.float32)
    # Values from -3 to 3. Both matrices repeat a small block, so the product repeats the blocks' product.
    left = (rows[:, None] * 2 + rows[None, :] * 3) % _PERIOD - 3
    right = (rows[:, None] * 4 + rows[None, :]) % _PERIOD - 3
    blocks = _BLOCKS[device.type]
    expected = (left @ right * blocks).to(device).repeat(blocks, blocks)
    a, b = (block.to(device).repeat(blocks, blocks) for block in (left, right))
    for _ in range(_ROUNDS[device.type]):
        wrong = int((a @ b != expected).sum())
        if wrong:
            raise WrongProduct(
                "a product of matrices is wrong",
                where=device,
                found=f"{wrong} of {expected.numel()} values differ from the known result",
                remedy="the node is left; tell those who run it",
            )


def check_sum(device: torch.device, rank: int, world_size: int) -> None:
    """Sums over all ranks, on their default group. All ranks call it.

    Raises:
        WrongSum: the result is not the known one.
    """
    places = torch.arange(_SUMMED, dtype=torch.float32, device=device) % _PERIOD
    summed = places * (rank + 1)
    dist.all_reduce(summed)
    wrong = int((summed != places * (world_size * (world_size + 1) // 2)).sum())
    if wrong:
        raise WrongSum(
            "a sum over all ranks is wrong",
            where=device,
            found=f"{wrong} of {_SUMMED} values differ from the known result",
        )
