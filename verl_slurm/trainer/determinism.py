"""Forces deterministic kernels, and explains the refusal where an operator has none.

All that the trainer itself computes has them. A model with an operator that has none is refused by name.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from verl_slurm.base.errors import ConfigError

_WORKSPACE, _WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
"""The settings for which cuBLAS promises reproducible results (its documentation, "Results reproducibility")."""
_NO_KERNEL = "does not have a deterministic implementation"
"""torch's text in `at::Context::alertNotDeterministic`."""


def settle(device: torch.device, *, deterministic: bool) -> None:
    """Sets up determinism, once per process before the first work on `device`.

    Raises:
        ConfigError: the environment sets cuBLAS to something else.
    """
    if not deterministic:
        return
    if device.type == "cuda":
        # cuBLAS reads it when it makes its first handle. Without it torch refuses matrix products.
        found = os.environ.setdefault(_WORKSPACE, _WORKSPACES[0])
        if found not in _WORKSPACES:
            raise ConfigError(
                "with these workspaces cuBLAS gives other bits each time",
                where=_WORKSPACE,
                found=found,
                expected=" or ".join(_WORKSPACES),
                remedy="unset the variable, or set deterministic=false",
            )
    # Strict, not `warn_only`: with warnings torch keeps the nondeterministic backward pass of its attention
    # kernels on CUDA (flash and memory-efficient alike, see attention_backward.cu). Every update would differ
    # in its last bits.
    torch.use_deterministic_algorithms(True)
    # It would choose a convolution's kernel by timing, each time anew.
    torch.backends.cudnn.benchmark = False
    # By default torch fills all new memory with NaN, to expose operators that read it before they write it. Turning
    # that off changes no number. A step of a small model has thousands of such fills, a twentieth of its CPU time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def explaining() -> Iterator[None]:
    """Wraps all work; raises `ConfigError` instead of torch's own complaint about an operator."""
    try:
        yield
    except RuntimeError as error:
        # torch raises a plain RuntimeError; its text is what tells.
        if _NO_KERNEL not in str(error):
            raise
        # A configuration error, because a restart does not change it.
        raise ConfigError(
            "this model needs an operator that gives other bits each time on a GPU",
            where="deterministic",
            found=str(error).partition(_NO_KERNEL)[0].strip(),
            expected="operators that have a deterministic kernel",
            remedy="another model, or deterministic=false: a resume is then exact to rounding only",
        ) from error


@contextmanager
def warned_only(device: torch.device) -> Iterator[None]:
    """Wraps an engine on a GPU that brings its own kernels and runs forward only."""
    if device.type != "cuda" or not torch.are_deterministic_algorithms_enabled():
        yield
        return
    # Its samples are journaled and not sampled again, so a refusal would cost more than it saves.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)
