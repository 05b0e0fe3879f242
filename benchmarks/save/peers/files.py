"""One library call that writes files: torch.save twice, safetensors. They stall for all of it; none fsyncs."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from benchmarks.save.peers.base import Peer
from benchmarks.save.workload import local


class TorchFull(Peer):
    """Everything gathered on rank 0 and written by it: what most trainers' `save_model` does."""

    def save(self, directories: tuple[Path, ...]) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.work.model, self.work.optimizer, options=options)
        if dist.get_rank() == 0:
            torch.save({"model": model, "optimizer": optimizer}, directories[0] / "full.pt")
        dist.barrier()

    def load(self, directory: Path) -> None:
        # Every rank maps the file and keeps its slices: the fastest way that torch documents.
        saved = torch.load(directory / "full.pt", weights_only=True, mmap=True)
        set_state_dict(
            self.work.model,
            self.work.optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )


class TorchPerRank(Peer):
    """verl's way: each rank its sharded state dicts. Loading unpickles DTensors, so `weights_only` is off."""

    def save(self, directories: tuple[Path, ...]) -> None:
        torch.save(self.work.model.state_dict(), directories[0] / f"model_{dist.get_rank()}.pt")
        torch.save(self.work.optimizer.state_dict(), directories[0] / f"optimizer_{dist.get_rank()}.pt")
        dist.barrier()

    def load(self, directory: Path) -> None:
        # Written by this very run a moment ago; verl does the same with files it finds.
        rank = dist.get_rank()
        self.work.model.load_state_dict(torch.load(directory / f"model_{rank}.pt", weights_only=False))
        self.work.optimizer.load_state_dict(
            torch.load(directory / f"optimizer_{rank}.pt", weights_only=False)
        )


class Safetensors(Peer):
    """Each rank its local tensors in one file. Cannot reshard: names and shapes are this rank's."""

    def save(self, directories: tuple[Path, ...]) -> None:
        from safetensors.torch import save_file

        save_file(self.work.locals(), directories[0] / f"rank_{dist.get_rank()}.safetensors")
        dist.barrier()

    def load(self, directory: Path) -> None:
        from safetensors import safe_open

        if not self.work.optimizer.state:
            self.work.empty_state()
        path = directory / f"rank_{dist.get_rank()}.safetensors"
        with safe_open(path, "pt") as file, torch.no_grad():
            for name, tensor in self.work.tensors().items():
                local(tensor).copy_(file.get_tensor(name))
