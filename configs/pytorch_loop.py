"""A plain PyTorch loop that survives what Slurm does to it: three lines of it are verl-slurm's (marked).

A small network learns the sine of its input, data-parallel over the ranks. Run it under verl-slurm:

    verl-slurm submit configs/pytorch_loop.yaml

or by hand: `python configs/pytorch_loop.py --run-dir runs/by-hand`, or the same under torchrun. Kill it whenever you
like and start it again: it goes on where it was saved, and ends with the same weights, bit for bit.
"""

import argparse
import math
import os
import random
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import verl_slurm


def batch(step: int, rank: int, ranks: int, size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's share of the data of a step, [size / ranks, 1] each: by numbers alone, so there is no position to be
    saved, and any number of ranks works on the same data.
    """
    numbers = torch.Generator().manual_seed(step)
    x = (torch.rand(size, 1, generator=numbers) * 2 * math.pi)[rank::ranks]
    return x, torch.sin(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that a step takes besides")
    parser.add_argument("--run-dir", help="without a daemon: where to save, and to go on from")
    options = parser.parse_args()
    if "WORLD_SIZE" in os.environ:  # torchrun's, by hand or under verl-slurm
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Dropout(0.05), nn.Linear(64, 1))
    if torch.cuda.is_available():
        model = model.to(f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
    device = next(model.parameters()).device
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(rank)  # dropout is another one on each rank

    with verl_slurm.run(  # 1: what is state
        model=model, optimizer=optimizer, scheduler=scheduler, run_dir=options.run_dir, any_ranks=True
    ) as run:
        for step in run.steps(options.steps):  # 2: where a step ends
            x, y = (part.to(device) for part in batch(step, rank, ranks))
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            time.sleep(options.pause)
            run.log(loss=loss, lr=scheduler.get_last_lr()[0])  # 3: what people want to see (may be left out)

    if rank == 0:  # only a run that is done comes here
        print(f"done: {options.steps} steps")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
