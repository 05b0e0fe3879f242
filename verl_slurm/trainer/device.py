"""Chooses the device of a rank at its start, before anything is loaded.

A wrong configuration is refused permanently. A node that lost a GPU which the run had before is a crash instead: a
later start, or another node, may fix it. `device: auto` does not permit falling back to the CPU, a thousand times
slower.
"""

import os

import torch

from verl_slurm.base.errors import ConfigError, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import RunConfig
from verl_slurm.trainer.state.orchestration import began_on_gpus

__all__ = ["DeviceLost", "choose_device"]


class DeviceLost(VerlSlurmError):
    """This run has worked on GPUs, and this rank has none now: a crash that another start may fix."""

    exit_code = ExitCode.INTERNAL


def choose_device(config: RunConfig, local_rank: int) -> torch.device:
    """Chooses the device of a rank.

    Args:
        local_rank: among the ranks of this node.

    Raises:
        ConfigError: a GPU is asked for, and this node has none or too few for its ranks.
        DeviceLost: the same, where there was one before.
    """
    wanted = config.distributed.device
    if wanted == "cpu":
        return torch.device("cpu")
    available = torch.cuda.is_available()
    if wanted == "auto" and not available and not _had_gpus(config):
        return torch.device("cpu")
    if available and local_rank < torch.cuda.device_count():
        return torch.device("cuda", local_rank)
    if _had_gpus(config):
        raise DeviceLost(
            "this run began on GPUs, and there is none for this rank here",
            where="distributed.device",
            found=f"local rank {local_rank}, {_what_is_there()}",
            remedy="see nvidia-smi on this node; to go on without GPUs on purpose, set it to cpu",
        )
    if available:
        # NCCL would refuse two ranks on one GPU with a message that names neither.
        raise ConfigError(
            "this node has fewer GPUs than ranks",
            where="distributed.device",
            found=f"local rank {local_rank}, {_what_is_there()}",
            expected="a GPU for each rank of a node",
            remedy="set slurm.gpus_per_node, distributed.nodes or the shape, so that they fit",
        )
    raise ConfigError(
        "there is no GPU that torch could use here",
        where="distributed.device",
        found=f"cuda, {_what_is_there()}",
        remedy="ask Slurm for GPUs (slurm.gpus_per_node), install torch for CUDA, or set it to cpu",
    )


def _had_gpus(config: RunConfig) -> bool:
    return began_on_gpus(RunPaths(config.run_dir))


def _what_is_there() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__}, which is built without CUDA"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    return f"{torch.cuda.device_count()} GPUs for torch {torch.__version__}{hidden}"
