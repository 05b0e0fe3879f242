"""Run by test_resharding under torchrun: `reshard_worker.py ROOT MESH SOURCE STEP`.

Makes two small models and their AdamW on MESH (`2`: FSDP2 over two ranks; `2x2`: FSDP2 times tensor parallel), fills
them from checkpoint SOURCE of ROOT (`-`: trains two updates instead), and saves them as STEP.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.save.parts import contents, provenance, runtime
from verl_slurm.base.paths import RunPaths
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.loader import load_tensors
from verl_slurm.save.ranks.saver import CheckpointSaver, SaveContents
from verl_slurm.save.ranks.tensors import initialise_adamw, model_tensors, optimizer_tensors


class Block(nn.Module):
    """Odd sizes: no number of ranks divides them all."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10, dtype=dtype)
        self.down = nn.Linear(10, 6, dtype=dtype)
        self.norm = nn.LayerNorm(6, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(self.up(x).relu()))


def _model(dtype: torch.dtype, mesh: str) -> nn.Module:
    torch.manual_seed(5)
    model = nn.Sequential(*(Block(dtype) for _ in range(2)))
    if "x" in mesh:
        dp, tp = (int(size) for size in mesh.split("x"))
        device_mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        for block in model:
            parallelize_module(block, device_mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=device_mesh["dp"])
        return fully_shard(model, mesh=device_mesh["dp"])
    device_mesh = init_device_mesh("cpu", (int(mesh),), mesh_dim_names=("dp",))
    for block in model:
        fully_shard(block, mesh=device_mesh)
    return fully_shard(model, mesh=device_mesh)


def _tensors(models: dict[str, tuple[nn.Module, torch.optim.Optimizer]]) -> dict[str, Any]:
    return {
        "actor": model_tensors(models["actor"][0]),
        "critic": model_tensors(models["critic"][0]),
        "optimizer": optimizer_tensors(models),
    }


def main(root: Path, mesh: str, source: str, step: int) -> None:
    dist.init_process_group("gloo")
    ranks = Collective(dist.group.WORLD)
    models = {}
    for role, dtype in (("actor", torch.bfloat16), ("critic", torch.float32)):
        model = _model(dtype, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        initialise_adamw(optimizer)
        models[role] = (model, optimizer)
    tensors = _tensors(models)
    if source == "-":
        for update in range(2):
            for model, optimizer in models.values():
                dtype = next(model.parameters()).dtype
                model(torch.full((2, 6), 1.0 + ranks.rank + update, dtype=dtype)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    else:
        load_tensors(root / "checkpoints" / source, tensors, ranks)
    state = runtime(step, rank=ranks.rank, world_size=ranks.world_size)
    mine = contents(step, state)
    saver = CheckpointSaver(RunPaths(root), tensors, provenance(), ranks, attempt_check=lambda: None)
    saver.begin(SaveContents(runtime=state, texts=mine.texts if ranks.rank == 0 else {})).result()
    saver.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)  # trainer.__main__ says why
