"""A loop with every kind of state, one rank of two: `loop_worker.py RUN_DIR STEPS`; DIE=N kills rank 1 in step N."""

import os
import random
import signal
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import verl_slurm


class Shuffled:
    """Data with a position: an order that is drawn anew for each pass."""

    def __init__(self, rank: int) -> None:
        self._numbers = np.random.default_rng(rank)
        self._order: np.ndarray[Any, Any] = np.zeros(0, dtype=np.int64)

    def draw(self) -> int:
        if not len(self._order):
            self._order = self._numbers.permutation(5)
        first, self._order = self._order[0], self._order[1:]
        return int(first)

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self._numbers.bit_generator.state, "order": self._order, "passes": (1, 2.5, None)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._numbers.bit_generator.state = state["numbers"]
        self._order = state["order"]


def main() -> None:
    run_dir, steps = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    sharded = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.Linear(16, 4))
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    whole = nn.Linear(4, 1)  # the same on both ranks
    mine = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))  # another one on each
    torch.manual_seed(rank), np.random.seed(rank), random.seed(rank)
    nn.init.normal_(mine[0].weight)
    data, noise = Shuffled(rank), torch.Generator().manual_seed(rank)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (sharded, whole, mine)]
    with verl_slurm.run(
        run_dir=run_dir,
        save_every=2,
        sharded=sharded,
        whole=whole,
        mine=mine,
        optimizer=optimizers[0],
        whole_optimizer=optimizers[1],
        my_optimizer=optimizers[2],
        scheduler=torch.optim.lr_scheduler.LinearLR(optimizers[0], total_iters=10),
        data=data,
        noise=noise,
    ) as run:
        assert run.resume is not None or not any(optimizer.state for optimizer in optimizers)
        for step in run.steps(steps):
            x = torch.full((8, 4), float(data.draw())) + torch.randn(8, 4, generator=noise) + random.random()
            loss = (whole(sharded(mine(x))) - np.random.rand()).pow(2).mean()
            loss.backward()
            for parameter in whole.parameters():
                dist.all_reduce(parameter.grad)
            if rank == 1 and str(step) == os.environ.get("DIE"):
                os.kill(os.getpid(), signal.SIGKILL)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            run.log(loss=loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # torch 2.13 may abort when FSDP2's threads are destroyed at exit
