"""A device that computes wrongly is found before a model is loaded."""

import pytest
import torch

from verl_slurm.checks import WrongProduct
from verl_slurm.trainer import place as module
from verl_slurm.trainer.place import WrongSum, check_product, check_sum

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


def test_a_right_product_passes_and_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    check_product(CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_one_wrong_value_of_a_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch.Tensor.__matmul__

    def wrong(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = multiply(left, right)
        if len(product) > 7:  # the device's, not the known result
            product[300, 17] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    with pytest.raises(WrongProduct, match="1 of 200704 values differ"):
        check_product(CPU)


@pytest.mark.parametrize("lost", [0.0, 1.0])
def test_a_wrong_sum_over_the_ranks_is_found(monkeypatch: pytest.MonkeyPatch, lost: float) -> None:
    """Three ranks: the stand-in adds what the two others would send."""

    def reduce(mine: torch.Tensor) -> None:
        places = torch.arange(len(mine)) % 7
        mine += places * 2 + places * 3
        mine[5] -= lost

    monkeypatch.setattr(module.dist, "all_reduce", reduce)
    if not lost:
        check_sum(CPU, 0, 3)
        return
    with pytest.raises(WrongSum, match="1 of 1048576 values differ"):
        check_sum(CPU, 0, 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT RUN: there is no GPU")
def test_a_gpu_multiplies_as_is_known() -> None:
    check_product(torch.device("cuda", 0))
