"""Run by test_cut_families under torchrun: `cut_worker.py OUT NAME=DIRECTORY...`.

Each family is cut over the ranks as `build_models` does it, trained for two steps beside its whole self, and what came
of it is written to OUT by rank 0: the largest differences, or the error.
"""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from verl_slurm.checkpoint.format.specification import Topology
from verl_slurm.config.schema import DistributedConfig
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer.models import (
    build_models,
    clip_gradients,
    copy_weights,
    load_causal_lm,
    passage,
    read_logprobs,
    read_values,
    run_passes,
)
from verl_slurm.trainer.parallel.grid import Grid, make_grid

STEPS = 2
CPU = torch.device("cpu")


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(4, 9, dtype=torch.bool)
    mask[1, :4] = False
    mask[3, :7] = False
    return {
        "prompt_ids": torch.randint(0, 250, (4, 9), generator=generator),
        "prompt_mask": mask,
        "response_ids": torch.randint(0, 250, (4, 4), generator=generator),
        "response_mask": torch.ones(4, 4, dtype=torch.bool),
    }


def train(model: torch.nn.Module, grid: Grid | None) -> list[float]:
    """Two updates of two micro-batches each; the losses and the norms of the gradients."""
    given, told = batch(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)

    def loss_of(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        part = {name: column[rows] for name, column in given.items()}
        if logits.shape[-1] == 1:
            loss = (read_values(logits, part) - part["response_ids"].float() / 100).square().mean()
        else:
            loss = -read_logprobs(logits, part, temperature=1.0)[0].mean()
        told.append(float(loss.detach()))
        return loss

    for _ in range(STEPS):
        run_passes(model, passage(given, CPU), 2, loss_of)
        told.append(clip_gradients(model, 1.0, grid))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return told


def compare(path: Path, grid: Grid) -> dict[str, Any]:
    whole = build_models(path, dtype="float32", mesh=None, device=CPU)
    shape = DistributedConfig(tp_size=grid.shape.tp, dp_size=grid.shape.dp)
    cut = build_models(path, dtype="float32", mesh=grid.mesh, device=CPU, shape=shape)
    found: dict[str, Any] = {"apart": 0.0, "told": 0.0}
    assert whole.critic is not None
    assert cut.critic is not None
    for mine, theirs in ((whole.actor, cut.actor), (whole.critic, cut.critic)):
        pairs = zip(train(mine, None), train(theirs, grid), strict=True)
        found["told"] = max(found["told"], *(abs(a - b) / max(abs(a), 1e-3) for a, b in pairs))
    gathered = load_causal_lm(path)
    copy_weights(cut.actor, gathered)
    for (name, one), other in zip(whole.actor.named_parameters(), gathered.parameters(), strict=True):
        apart = float((one - other).detach().abs().max())
        if apart >= found["apart"]:
            found |= {"apart": apart, "where": name}
    sizes = {name: p.numel() for name, p in whole.actor.named_parameters()}
    for group in cut.actor.modules():
        if isinstance(group, FSDPModule):
            group.reshard()
    parts = {name: p.to_local().numel() for name, p in cut.actor.named_parameters() if isinstance(p, DTensor)}
    found["cut"] = sorted(name for name, part in parts.items() if part < sizes[name])
    return found


def main(out: Path, places: dict[str, Path]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    grid = make_grid(Topology(dp=1, tp=dist.get_world_size(), pp=1), CPU, Collective(dist.group.WORLD))
    results: dict[str, Any] = {}
    for name, path in places.items():
        try:
            results[name] = compare(path, grid)
        except Exception:  # noqa: BLE001 - told by the test, with the family's name
            results[name] = {"error": traceback.format_exc()}
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        {name: Path(path) for name, _, path in (word.partition("=") for word in sys.argv[2:])},
    )
