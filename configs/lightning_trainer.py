"""A Lightning `Trainer` that survives what Slurm does to it: four lines of it are verl-slurm's (marked).

A small network learns the sine of its input, data-parallel over the ranks. Run it under verl-slurm:

    verl-slurm submit configs/lightning_trainer.yaml

or by hand: `python configs/lightning_trainer.py`, where it is a Trainer like any other. Needs `lightning`.
"""

import argparse
import math
import os
import time

import lightning
import torch
from torch import nn

from verl_slurm.loops.lightning import ResumableDataLoader, VerlSlurmCheckpoint  # 1


class Sine(lightning.LightningModule):
    def __init__(self, pause: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Dropout(0.05), nn.Linear(64, 1))
        self._pause = pause

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        time.sleep(self._pause)
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that a step takes besides")
    options = parser.parse_args()
    service = VerlSlurmCheckpoint()  # 2: early, for it tells the daemon that this rank lives
    lightning.seed_everything(0)
    x = torch.rand(480, 1) * 2 * math.pi
    data = torch.utils.data.TensorDataset(x, torch.sin(x))
    here, everywhere = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    trainer = lightning.Trainer(
        max_steps=options.steps,
        devices=here,  # the ranks that were started are Lightning's
        num_nodes=everywhere // here,
        logger=False,
        enable_progress_bar=False,
        callbacks=[service],
    )
    loader = ResumableDataLoader(data, batch_size=16, shuffle=True)  # 3: in place of DataLoader
    service.fit(trainer, Sine(options.pause), loader)  # 4: in place of trainer.fit
    if trainer.is_global_zero:  # only a run that is done comes here
        print(f"done: {trainer.global_step} steps")


if __name__ == "__main__":
    main()
