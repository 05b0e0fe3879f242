"""Which tensors of a loop all ranks have alike: they are written once."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from tests.save.nodes import Ranks
from verl_slurm.loops import state_files

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("digests", "alike"),
    [
        ([[b"a", b"b"], [b"a", b"b"], [b"a", b"b"]], [[True, True]] * 3),
        ([[b"a", b"x"], [b"a", b"y"], [b"a", b"x"]], [[True, False]] * 3),
        # A stage of a pipeline has other tensors, in another number.
        ([[b"a", b"b"], [b"b"], [b"c", b"b", b"a"]], [[False, True], [True], [False, True, False]]),
        ([[], [b"a"], [b"a"]], [[], [False], [False]]),
    ],
)
def test_a_tensor_is_common_if_every_rank_has_the_same(
    digests: list[list[bytes]], alike: list[list[bool]]
) -> None:
    store = dist.HashStore()

    def rank(number: int) -> list[bool]:
        return state_files._alike(digests[number], Ranks(store, number, len(digests)))

    with ThreadPoolExecutor(len(digests)) as pool:
        assert list(pool.map(rank, range(len(digests)))) == alike
