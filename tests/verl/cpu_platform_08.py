"""verl 0.8 on a CPU, for tests only, as `cpu_platform`: it has no platforms that can be plugged in."""

from typing import Any

import torch
import torch.distributed as dist

for _name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
    setattr(torch.cpu, _name, lambda *_: 0)
torch.cpu.mem_get_info = lambda *_: (0, 1)
torch.cpu.empty_cache = torch.cpu.set_device = lambda *_: None
torch.cpu.is_available = lambda: False

_init_process_group = dist.init_process_group


def _init_on_cpu(backend: str | None = None, *args: Any, **words: Any) -> None:
    on_cpu = backend in ("nccl", "cpu:gloo,cpu:nccl")
    _init_process_group("cpu:gloo" if on_cpu else backend, *args, **words)


dist.init_process_group = _init_on_cpu

from verl.workers.engine import EngineRegistry  # noqa: E402 - it looks at the device when it is imported
from verl.workers.engine.fsdp import FSDPEngineWithLMHead  # noqa: E402

EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(
    FSDPEngineWithLMHead
)
