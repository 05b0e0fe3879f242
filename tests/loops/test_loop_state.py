"""A loop's state as tensors by name and a tree: which tensors are common, and what comes back."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.builders import new_run
from tests.save.nodes import Ranks
from tests.save.parts import ALONE
from verl_slurm.base.errors import ConfigError
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.files import private_dir
from verl_slurm.checkpoint.store.loop_checkpoint import LoopSave, clear_work, commit_tree
from verl_slurm.checkpoint.store.reader import CheckpointReader
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.loops.loop_state import (
    MAX_TREE_BYTES,
    Objects,
    common_of,
    encode_state,
    join,
    load_state,
    split,
    write_state,
)

pytestmark = pytest.mark.torch


class Holds:
    def __init__(self, state: dict[Any, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


@pytest.mark.parametrize(
    ("digests", "common"),
    [
        ([[b"a", b"b"], [b"a", b"b"], [b"a", b"b"]], {b"a", b"b"}),
        ([[b"a", b"x"], [b"a", b"y"], [b"a", b"x"]], {b"a"}),
        # A stage of a pipeline has other tensors, in another number.
        ([[b"a", b"b"], [b"b"], [b"c", b"b", b"a"]], {b"b"}),
        ([[], [b"a"], [b"a"]], set()),
    ],
)
def test_a_tensor_is_common_if_every_rank_has_the_same(
    digests: list[list[bytes]], common: set[bytes]
) -> None:
    store = dist.HashStore()

    def rank(number: int) -> set[bytes]:
        mine = {str(at): digest for at, digest in enumerate(digests[number])}
        return common_of(mine, Ranks(store, number, len(digests)))

    with ThreadPoolExecutor(len(digests)) as pool:
        assert list(pool.map(rank, range(len(digests)))) == [common] * len(digests)


def test_every_value_comes_back_as_it_was_given() -> None:
    tied = torch.arange(6.0)
    state = {
        1: (1, [2.5, None, True], "text"),
        "big": -(2**100),
        "nan": float("nan"),
        "scalar": np.float64(0.1),
        "array": np.arange(4, dtype=np.uint32),
        "complex": torch.full((2, 3), 1 + 2j),
        "transposed": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
        "nothing": torch.zeros(0, 3),
        "tied": [tied, tied],
    }
    tree, leaves = split(state)
    assert len(leaves.plain) == 5, "tied tensors are one"
    found = join(tree, {name: tensor.clone() for name, tensor in leaves.plain.items()})
    assert (found[1], found["big"], found["scalar"]) == (state[1], state["big"], 0.1)
    assert np.isnan(found["nan"])
    assert found["array"].dtype == np.uint32
    assert found["array"].tolist() == [0, 1, 2, 3]
    for name in ("complex", "transposed", "nothing"):
        assert found[name].dtype == state[name].dtype
        assert torch.equal(found[name], state[name])
    assert found["tied"][0] is found["tied"][1]


def test_what_is_saved_beside_a_frameworks_own_files_comes_back_from_their_checkpoint(tmp_path: Path) -> None:
    paths = new_run(tmp_path / "run")
    attempt = take_attempt(paths, job_id="1", restart=0).attempt
    written = private_dir(clear_work(paths, attempt) / "guest")
    (written / "trainer_state.json").write_text("{}")
    private_dir(written / "trl")
    held = Holds({"steps": [1, 2], "kept": torch.arange(3.0)})
    entries = write_state(Objects({"trainer": held}), written, 4, ALONE, domain="trl")
    below = [msgspec.structs.replace(entry, path=f"guest/{entry.path}") for entry in entries]
    save = LoopSave(guest="loop", step=4, attempt=attempt, world_size=1)
    done = paths.checkpoints / commit_tree(paths, save, {"guest": written}, sealed=below).name
    assert verify(done).ok
    found = Holds({})
    load_state(
        Objects({"trainer": found}), CheckpointReader(done), ALONE, domain="guest/trl", states="guest/trl"
    )
    assert found.state["steps"] == [1, 2]
    assert torch.equal(found.state["kept"], held.state["kept"])


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"deep": [object()]}, "odd/deep/0"),
        ({"one": {1: 1, "1": 2}}, "odd/one"),
        ({"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}}, "odd/a/b"),
        ({"text": np.array(["a"])}, "odd/text"),
        ({"sparse": torch.eye(2).to_sparse()}, "odd/sparse"),
        ({"long": "x" * MAX_TREE_BYTES}, "odd"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name(state: dict[Any, Any], where: str) -> None:
    with pytest.raises(ConfigError, match=rf": {where}\b"):
        encode_state(Objects({"odd": Holds(state)}))
