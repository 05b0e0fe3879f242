"""Sets up where a rank runs: its number, its device, its threads, and the other ranks."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from verl_slurm.base.errors import ConfigError
from verl_slurm.config.schema import RunConfig
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer import determinism
from verl_slurm.trainer.device import choose_device

__all__ = ["Place", "process_group"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process's rank, from torchrun's environment."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environ(cls, environ: "os._Environ[str] | dict[str, str]") -> "Place":
        """Reads RANK, LOCAL_RANK and WORLD_SIZE.

        Raises:
            ConfigError: they are not set: torchrun did not start this process.
        """
        try:
            rank, local, world = (int(environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        except (KeyError, ValueError) as error:
            raise ConfigError(
                "the trainer is not told its rank",
                found=error,
                expected="RANK, LOCAL_RANK and WORLD_SIZE",
                remedy="start it with `verl-slurm submit`, or with torchrun",
            ) from error
        return cls(rank=rank, local_rank=local, world_size=world)


@contextmanager
def process_group(config: RunConfig, place: Place) -> Iterator[tuple[torch.device, Collective]]:
    """Sets up device, threads and determinism, and joins the other ranks.

    Raises:
        ConfigError: another world size than the configuration's, or an operator that has no deterministic kernel.
        ConfigError, DeviceLost: `device.choose_device`.
    """
    expected = config.distributed.world_size
    if place.world_size != expected:
        raise ConfigError(
            "another number of ranks was started than the run is configured for",
            where="distributed",
            found=place.world_size,
            expected=expected,
            remedy="start dp_size * tp_size * pp_size ranks",
        )
    device = choose_device(config, place.local_rank)
    # The critic's logits are a view of its head's output, and no code changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if config.distributed.threads_per_rank:
        torch.set_num_threads(config.distributed.threads_per_rank)
    determinism.settle(device, deterministic=config.deterministic)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.init()  # type: ignore[no-untyped-call]  # from here on its generator is part of the state (save.ranks.rng)
        dist.init_process_group("cpu:gloo,cuda:nccl")
        group = dist.new_group(backend="gloo")
    else:
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    try:
        with determinism.explaining():
            yield device, Collective(group)
    finally:
        # Without this the other ranks would take the end of this one for a network failure.
        dist.destroy_process_group()
