"""Any layout to any other: weights and optimizer state are the same bits after the round trip."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import python_path
from verl_slurm.checkpoint.store.reader import CheckpointReader
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.save.ranks.loader import read_index, read_whole

pytestmark = [pytest.mark.torch, pytest.mark.long]

WORKER = Path(__file__).with_name("reshard_worker.py")
DOMAINS = ("actor", "critic", "optimizer")


def _run(root: Path, mesh: str, source: str, step: int) -> Path:
    ranks = 1
    for size in mesh.split("x"):
        ranks *= int(size)
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    argv += [str(WORKER), str(root), mesh, source, str(step)]
    environ = os.environ | python_path() | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return root / "checkpoints" / f"step_{step:06d}"


def _bits(directory: Path) -> dict[str, bytes]:
    import torch

    return {
        f"{domain}/{name}": tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for domain in DOMAINS
        for name, tensor in read_whole(directory, domain).items()
    }


def _bits_by_dcp(directory: Path) -> dict[str, bytes]:
    """The same through torch.distributed.checkpoint, with its own planner."""
    import torch
    import torch.distributed.checkpoint as dcp

    from verl_slurm.save.ranks.dcp_storage import CheckpointReaderForDCP

    found = {}
    for domain in DOMAINS:
        tensors = {
            name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            for name, entry in read_index(CheckpointReader(directory), domain).tensors.items()
        }
        dcp.load(tensors, storage_reader=CheckpointReaderForDCP(directory, domain), no_dist=True)
        for name, tensor in tensors.items():
            found[f"{domain}/{name}"] = tensor.view(-1).view(torch.uint8).numpy().tobytes()
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_bit_survives_the_way_through_other_layouts(tmp_path: Path) -> None:
    """Two ranks → two times two with tensor parallelism → three ranks."""
    first = _run(tmp_path, "2", "-", 1)
    expected = _bits(first)
    assert len(expected) > 60
    source = first
    for step, mesh in enumerate(("2x2", "3"), start=2):
        source = _run(tmp_path, mesh, source.name, step)
        assert verify(source).ok
        assert _bits(source) == expected, mesh
    assert _bits_by_dcp(tmp_path / "checkpoints/step_000002") == expected
    index = read_index(CheckpointReader(tmp_path / "checkpoints/step_000002"), "actor")
    assert max(len(entry.pieces) for entry in index.tensors.values()) == 4, "cut along both dimensions"
    assert {entry.dtype for entry in index.tensors.values()} == {"bfloat16"}
