"""The same kernels every time: what it takes, and what is said where there is no such kernel.

Strict, and not as warnings: with `warn_only` torch *keeps* the nondeterministic backward pass of its attention kernels
on CUDA (flash and memory-efficient alike, see attention_backward.cu), so every update would differ in its last bits.
What the trainer itself computes has a deterministic kernel for everything; a model that has not is refused by name.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from verl_slurm.base.errors import ConfigError

__all__ = ["explaining", "settle", "warned_only"]

_WORKSPACE, _WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
"""The settings that cuBLAS promises reproducible results for (its documentation, "Results reproducibility")."""
_NO_KERNEL = "does not have a deterministic implementation"
"""What torch says, in `at::Context::alertNotDeterministic`."""


def settle(device: torch.device, *, deterministic: bool) -> None:
    """Before the first work on `device`, once a process.

    Raises:
        ConfigError: the environment has cuBLAS do otherwise.
    """
    if not deterministic:
        return
    if device.type == "cuda":
        # cuBLAS reads it when its first handle is made; without it torch refuses matrix products.
        found = os.environ.setdefault(_WORKSPACE, _WORKSPACES[0])
        if found not in _WORKSPACES:
            raise ConfigError(
                "with these workspaces cuBLAS gives other bits each time",
                where=_WORKSPACE,
                found=found,
                expected=" or ".join(_WORKSPACES),
                remedy="unset the variable, or set deterministic=false",
            )
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # torch would fill all new memory with NaN, to show up operators that read it before they write it. No number
    # changes without, and a step of a small model has thousands of such fills, a twentieth of its CPU time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def explaining() -> Iterator[None]:
    """Around all work: an operator that torch refuses is the configuration's affair, and no start changes it.

    Raises:
        ConfigError: instead of torch's own complaint.
    """
    try:
        yield
    except RuntimeError as error:
        if _NO_KERNEL not in str(error):
            raise
        raise ConfigError(
            "this model needs an operator that gives other bits each time on a GPU",
            where="deterministic",
            found=str(error).partition(_NO_KERNEL)[0].strip(),
            expected="operators that have a deterministic kernel",
            remedy="another model, or deterministic=false: a resume is then exact to rounding only",
        ) from error


@contextmanager
def warned_only(device: torch.device) -> Iterator[None]:
    """Around an engine that brings kernels of its own, and only runs forward, on a GPU.

    What it samples is in the ledger and not sampled again, so a refusal would cost more than it saves.
    """
    if device.type != "cuda" or not torch.are_deterministic_algorithms_enabled():
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)
