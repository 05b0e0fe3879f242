"""Whether a run that asks for GPUs can find them, as far as can be told without torch and from here."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from verl_slurm.config.schema import RunConfig
from verl_slurm.submit.plan import Cluster

__all__ = ["gpu_note"]

# Linux, containers whose /proc hides the driver, WSL.
_SIGNS = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))


def gpu_note(config: RunConfig, cluster: Cluster, *, signs: Sequence[Path] = _SIGNS) -> str | None:
    """What speaks against `distributed.device: cuda`; None: nothing that is known here.

    A note, and no refusal: the nodes may have another environment than the machine that submits. The ranks refuse at
    their start (trainer.place).

    Args:
        signs: files of which one is there where an NVIDIA driver is.

    Called by: submit.submission.
    """
    if config.distributed.device != "cuda":
        return None
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    if torch.endswith("+cpu"):
        return (
            f"distributed.device=cuda, and torch {torch} of this environment is built without CUDA: "
            "ranks that run in it will refuse; pip install -c constraints/cuda.txt torch"
        )
    if cluster == "local" and not any(sign.exists() for sign in signs):
        return "distributed.device=cuda, and this machine has no NVIDIA driver: the ranks will refuse"
    return None
