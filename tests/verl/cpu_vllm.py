"""Real vLLM under verl on a CPU, for tests only: the last of `VERL_USE_EXTERNAL_MODULES`.

vLLM packs the weights of linear layers for the CPU's kernels when it has loaded them, and no longer knows then how to
load others. verl loads the trained ones before each step, so they stay unpacked here.
"""

import os
import time
from typing import Any

import torch
import vllm.model_executor.layers.utils as layers

_PAUSE_S = float(os.environ.get("VERL_TEST_LINEAR_S", "0"))
"""So that a step takes its time on any machine: before each linear layer."""
_COUNTED = os.environ.get("VERL_TEST_LINEARS")
"""A file that gets a byte for each of them."""


def _linear(*args: Any) -> torch.Tensor:
    if _COUNTED is not None:
        with open(_COUNTED, "ab") as file:
            file.write(b".")
    time.sleep(_PAUSE_S)
    return torch.nn.functional.linear(*args)


def _plain(layer: torch.nn.Module, remove_weight: bool) -> None:
    del remove_weight  # that is what it must not do
    layer.cpu_linear = _linear


layers.dispatch_cpu_unquantized_gemm = _plain
