"""A loop's checkpoint that another user prepared: its `.metadata`, a pickle, names no code and no other file."""

import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from tests.hostile.test_handed_over import put
from tests.processes import captured

pytestmark = [pytest.mark.torch, pytest.mark.scenario("SEC18")]

_LOOP = """
import os, sys, torch, torch.distributed as dist, verl_slurm
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
run_dir, steps, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
model = torch.nn.Linear(2, 2)
if kind == "sharded":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = distribute_module(model, init_device_mesh("cpu", (1,)))
with verl_slurm.run(run_dir=run_dir, model=model) as run:
    for step in run.steps(steps):
        run.log(loss=1.0)
    print("went on from", run.resume)
sys.stdout.flush()
os._exit(0)
"""
METADATA = "guest/sharded/.metadata"


def loop(run: Path, steps: int, kind: str) -> subprocess.CompletedProcess[str]:
    return captured(
        [sys.executable, "-c", _LOOP, str(run), str(steps), kind],
        timeout=240,
        env=dict(os.environ) | {"OMP_NUM_THREADS": "1"},
    )


class Evil:
    """Makes a directory as soon as it is unpickled."""

    def __init__(self, sign: Path) -> None:
        self._sign = sign

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self._sign),)


CHANGES_A_CLASS = b"\x80\x04cpathlib\nPosixPath\n(N}(X\x07\x00\x00\x00is_filectorch\nSize\nutb."
"""PosixPath.is_file = torch.Size, by pickle's BUILD."""


def test_an_object_in_the_place_of_a_tensor_is_not_unpickled(tmp_path: Path) -> None:
    """DCP unpickles what the metadata calls bytes, whatever the loop asked for."""
    run, sign = tmp_path / "run", tmp_path / "sign"
    assert loop(run, 1, "sharded").returncode == 0
    checkpoint = run / "checkpoints" / "step_000001"
    data = "guest/sharded/__0_0.distcp"
    torch.save(Evil(sign), evil := io.BytesIO())
    there = (checkpoint / data).read_bytes()
    metadata = pickle.loads((checkpoint / METADATA).read_bytes())
    name = next(iter(metadata.state_dict_metadata))
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    metadata.storage_data = {key: at for key, at in metadata.storage_data.items() if key.fqn != name}
    metadata.storage_data[MetadataIndex(name)] = _StorageInfo(
        data.rpartition("/")[2], len(there), len(evil.getvalue())
    )
    put(checkpoint, data, there + evil.getvalue())
    put(checkpoint, METADATA, pickle.dumps(metadata))
    done = loop(run, 2, "sharded")
    assert not sign.exists()
    assert done.returncode != 0
    assert "BytesStorageMetadata" in done.stderr.splitlines()[-1], done.stderr


def test_a_pickle_that_the_loop_never_wrote_is_not_opened(tmp_path: Path) -> None:
    run, sign = tmp_path / "run", tmp_path / "sign"
    assert loop(run, 1, "plain").returncode == 0
    put(run / "checkpoints" / "step_000001", METADATA, pickle.dumps(Evil(sign)))
    done = loop(run, 2, "plain")
    assert not sign.exists()
    assert done.returncode == 0, done.stderr
    assert "step_000001" in done.stdout


@pytest.mark.long
@pytest.mark.variant
def test_metadata_of_a_stranger_runs_no_code_and_reads_no_other_file(tmp_path: Path) -> None:
    run, sign = tmp_path / "run", tmp_path / "sign"
    assert loop(run, 1, "sharded").returncode == 0
    checkpoint = run / "checkpoints" / "step_000001"
    good = (checkpoint / METADATA).read_bytes()
    outside = tmp_path / "elsewhere.distcp"
    outside.write_bytes((checkpoint / "guest/sharded/__0_0.distcp").read_bytes())
    elsewhere = pickle.loads(good)
    for piece in elsewhere.storage_data.values():
        piece.relative_path = str(outside)
    for data, word in (
        (pickle.dumps(Evil(sign)), "posix.mkdir"),
        (pickle.dumps(elsewhere), "elsewhere.distcp"),
        (pickle.dumps(Path("/")), "PosixPath"),
        (CHANGES_A_CLASS, "sets attributes"),
    ):
        put(checkpoint, METADATA, data)
        done = loop(run, 2, "sharded")
        assert not sign.exists()
        assert done.returncode != 0
        assert word in done.stderr.splitlines()[-1], done.stderr
    put(checkpoint, METADATA, good)
    done = loop(run, 2, "sharded")
    assert done.returncode == 0, done.stderr
    assert "step_000001" in done.stdout
