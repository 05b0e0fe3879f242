"""A loop's checkpoint that another user prepared: none of it is unpickled, and it names no code."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import verl_slurm
from tests.hostile.resealed import put
from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.loops.loop_state import MAX_TREE_BYTES
from verl_slurm.runtime_state.codec import decode, encode

pytestmark = [pytest.mark.torch, pytest.mark.scenario("SEC18")]


class Evil:
    """Makes a directory as soon as it is unpickled."""

    def __init__(self, sign: Path) -> None:
        self._sign = sign

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self._sign),)


def loop(run_dir: Path, steps: int) -> Path | None:
    with verl_slurm.run(run_dir=run_dir, model=torch.nn.Linear(2, 2)) as run:
        for step in run.steps(steps):
            run.log(loss=float(step))
    return run.resume


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    loop(tmp_path / "run", 1)
    return tmp_path / "run/checkpoints/step_000001"


def test_a_pickle_that_the_loop_never_wrote_is_not_opened(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("guest/.metadata", "guest/common.pt", "guest/rank_0000.pt", "guest/sharded/.metadata"):
        put(checkpoint, name, pickle.dumps(Evil(tmp_path / "sign")))
    assert loop(tmp_path / "run", 2) == checkpoint
    assert not (tmp_path / "sign").exists()


@pytest.mark.parametrize(
    "mark",
    [
        ["tensor", "model/weight", "load", [2, 2]],
        ["tensor", "model/weight", "os", [2, 2]],
        ["tensor", "../../other", "float32", [2, 2]],
        ["int", "__import__('os')"],
        ["array"],
        7,
    ],
)
def test_a_mark_in_the_place_of_a_tensor_names_no_code_and_no_other_file(
    checkpoint: Path, tmp_path: Path, mark: Any
) -> None:
    bias = {"__verl_slurm__": ["tensor", "model/bias"]}
    _put_tree(checkpoint, {"model": {"weight": {"__verl_slurm__": mark}, "bias": bias}})
    with pytest.raises(VerlSlurmError, match="loading the state failed|reading the state failed"):
        loop(tmp_path / "run", 2)


@pytest.mark.parametrize("tree", [b"\xc1", b"\x91" * 100_000, b"\x80" * (MAX_TREE_BYTES + 1)])
def test_a_tree_that_is_none_or_too_large_is_refused_before_it_is_built(
    checkpoint: Path, tmp_path: Path, tree: bytes
) -> None:
    _put_tree(checkpoint, tree)
    with pytest.raises(VerlSlurmError, match="the state of a rank cannot be read"):
        loop(tmp_path / "run", 2)


def _put_tree(checkpoint: Path, tree: object) -> None:
    name = "runtime_state.rank_0000.msgpack.zst"
    data = tree if isinstance(tree, bytes) else msgspec.msgpack.encode(tree)
    state = decode((checkpoint / name).read_bytes())
    put(
        checkpoint, name, encode(msgspec.structs.replace(state, loop={"tree": np.frombuffer(data, np.uint8)}))
    )
