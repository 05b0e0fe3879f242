"""Checks whether a run that asks for GPUs can find them, as far as this machine can tell without torch."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from verl_slurm.base.errors import ConfigError
from verl_slurm.config.schema import RunConfig
from verl_slurm.submit.plan import Cluster

__all__ = ["gpu_note"]

# Linux, containers whose /proc hides the driver, WSL.
_SIGNS = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))


def gpu_note(config: RunConfig, cluster: Cluster, *, signs: Sequence[Path] = _SIGNS) -> str | None:
    """Returns what speaks against `distributed.device: cuda`; None: nothing that is known here.

    On Slurm it is a note and not a refusal: the nodes may have another environment than the machine that submits. The
    ranks refuse at their start (trainer.place). For this machine it is certain, and refused.

    Args:
        signs: files of which one exists if there is an NVIDIA driver.

    Raises:
        ConfigError: `--cluster local`, and no driver or a torch without CUDA.
    """
    if config.distributed.device != "cuda":
        return None
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    no_driver = not any(sign.exists() for sign in signs)
    if cluster == "local" and (torch.endswith("+cpu") or no_driver):
        raise ConfigError(
            "this machine cannot give the ranks a GPU",
            where="distributed.device=cuda",
            found="no NVIDIA driver" if no_driver else f"torch {torch}, built without CUDA",
            remedy="set distributed.device=cpu, or submit where there are GPUs"
            if no_driver
            else "pip install -c constraints/cuda.txt torch, or set distributed.device=cpu",
        )
    if torch.endswith("+cpu"):
        return (
            f"distributed.device=cuda, and torch {torch} of this environment is built without CUDA: "
            "ranks that run in it will refuse; pip install -c constraints/cuda.txt torch"
        )
    return None
