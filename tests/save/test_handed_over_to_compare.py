"""`verl-slurm inspect --bits` with another user's checkpoint: memory, and tensors larger than what is read at once."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hostile.measured import Measured, measured
from tests.hostile.resealed import HOLE, MIB, ROOM_MB, one_line, put, reseal
from tests.save.parts import Parts, checkpoint_saver, contents, runtime
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.runtime_state.codec import encode

pytestmark = [pytest.mark.torch, pytest.mark.scenario("SEC04")]
STATE = "runtime_state.rank_0000.msgpack.zst"


def saved(root: Path) -> Path:
    checkpoints = checkpoint_saver(root, Parts())
    try:
        checkpoints.begin(contents()).result()
    finally:
        checkpoints.close()
    return RunPaths(root).checkpoints / "step_000002"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """The comparison of two good checkpoints."""
    root = tmp_path_factory.mktemp("good")
    done = measured("inspect", "--bits", saved(root / "a"), saved(root / "b"))
    assert done.code == 0, done.err
    return done


def index_of(dtype: str, **tensors: tuple[list[int], list[dict[str, Any]]]) -> bytes:
    shown = {
        name: {"dtype": dtype, "pieces": pieces, "shape": shape} for name, (shape, pieces) in tensors.items()
    }
    return json.dumps({"format": 1, "tensors": shown}).encode()


def piece(at: int, offset: list[int], shape: list[int]) -> dict[str, Any]:
    return {"at": at, "file": "rank_0000.bin", "offset": offset, "shape": shape}


@pytest.mark.long
def test_a_state_that_swells_when_it_is_decoded_is_compared_in_little_memory(
    tmp_path: Path, good: Measured
) -> None:
    a, b = saved(tmp_path / "a"), saved(tmp_path / "b")
    zeros = np.zeros(HOLE, np.uint8)
    put(a, STATE, encode(runtime(rollouts={"response_ids": zeros, "same": zeros[:8]})))
    put(b, STATE, encode(runtime(rollouts={"response_ids": zeros[:-1], "same": zeros[:8]})))
    assert (a / STATE).stat().st_size < 4 * MIB
    done = measured("inspect", "--bits", a, b, "--json")
    assert done.code == ExitCode.DIFFERENT, done.err
    assert json.loads(done.out)["differing"] == [f"{STATE}/rollouts/response_ids"]
    assert done.peak_mb < good.peak_mb + ROOM_MB


@pytest.mark.long
@pytest.mark.variant
def test_a_hole_in_the_place_of_a_state_is_not_read_into_memory(tmp_path: Path, good: Measured) -> None:
    a, b = saved(tmp_path / "a"), saved(tmp_path / "b")
    put(a, STATE, None)
    done = measured("inspect", "--bits", a, b)
    assert done.code == ExitCode.CORRUPT
    assert "does not begin as a record" in one_line(done)
    assert done.peak_mb < good.peak_mb + ROOM_MB


@pytest.mark.long
@pytest.mark.variant
def test_a_tensor_that_is_a_hole_is_compared_in_little_memory(tmp_path: Path, good: Measured) -> None:
    a, b = saved(tmp_path / "a"), saved(tmp_path / "b")
    for side in (a, b):
        os.truncate(side / "actor/rank_0000.bin", HOLE)
        reseal(side, "actor/rank_0000.bin")
        put(side, "actor/index.json", index_of("int8", w=([1, HOLE], [piece(0, [0, 0], [1, HOLE])])))
    done = measured("inspect", "--bits", a, b)
    assert done.code == 0, done.err
    assert done.peak_mb < good.peak_mb + ROOM_MB


@pytest.mark.long
def test_tensors_that_share_their_bytes_are_refused_before_they_are_read(
    tmp_path: Path, good: Measured
) -> None:
    a, b = saved(tmp_path / "a"), saved(tmp_path / "b")
    size = 64 * MIB
    os.truncate(a / "actor/rank_0000.bin", size)
    reseal(a, "actor/rank_0000.bin")
    same = {f"w{number:05}": ([size], [piece(0, [0], [size])]) for number in range(10_000)}
    put(a, "actor/index.json", index_of("int8", **same))
    done = measured("inspect", "--bits", a, b)
    assert done.code == ExitCode.CORRUPT
    assert f"pieces of {10_000 * size} bytes" in one_line(done)
    assert done.seconds < good.seconds + 60
