"""A loop that divides its step among its ranks, whatever their number: `any_ranks_worker.py RUN_DIR STEPS`.

Each rank writes a line to RUN_DIR.said for each step: rank, step, loss of its part, a number of its own generator. With
OWN_STATE it has state that each rank has for itself.
"""

import os
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import verl_slurm

PROMPTS = 12


def main() -> None:
    run_dir, steps = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    sharded = nn.Sequential(nn.Linear(4, 15), nn.Tanh(), nn.Linear(15, 4))
    fully_shard(sharded, mesh=init_device_mesh("cpu", (num_ranks,)))
    whole = nn.Linear(4, 1)
    noise = torch.Generator().manual_seed(rank) if "OWN_STATE" in os.environ else None
    random.seed(rank)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (sharded, whole)]
    with verl_slurm.run(
        run_dir=run_dir,
        any_ranks=True,
        sharded=sharded,
        whole=whole,
        optimizer=optimizers[0],
        whole_optimizer=optimizers[1],
        scheduler=torch.optim.lr_scheduler.LinearLR(optimizers[0], total_iters=10),
        noise=noise,
    ) as run:
        for step in run.steps(steps):
            prompts = torch.rand(PROMPTS, 4, generator=torch.Generator().manual_seed(step))
            # FSDP2 averages over the ranks, so each of them has as many prompts as the others.
            mine = prompts[rank::num_ranks]
            loss = (whole(sharded(mine)) - mine.sum(1, keepdim=True)).pow(2).mean()
            loss.backward()
            for parameter in whole.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(num_ranks)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            with Path(f"{run_dir}.said").open("a") as said:
                said.write(f"{rank} {step} {loss.item()} {random.random()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # torch 2.13 may abort when FSDP2's threads are destroyed at exit
