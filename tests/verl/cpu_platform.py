"""verl on a CPU, for tests only: `VERL_USE_EXTERNAL_MODULES=tests.verl.cpu_platform`.

verl knows GPUs and NPUs. Its platforms are plug-ins, and this is one; and the name of the process group's backend,
which verl puts together of the CPU's and the device's, is said once where both are the same.
"""

import contextlib
import os
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform


class _Device(types.ModuleType):
    """`torch.cpu`, and what verl asks of `torch.<device>` besides."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


def _device() -> _Device:
    device = _Device("verl_cpu_device")
    device.is_available = lambda: False
    device.set_device = device.empty_cache = device.synchronize = lambda *_: None
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(device, name, lambda *_: 0)
    device.mem_get_info = lambda *_: (0, 1)
    device.get_device_name = lambda *_: "CPU"
    device.get_rng_state, device.set_rng_state = torch.get_rng_state, torch.set_rng_state
    return device


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):  # type: ignore[misc]
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")  # not a number: verl hands it to `tensor.to`

    def device_count(self) -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def set_device(self, index: int) -> None:
        pass

    def synchronize(self, index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_VISIBLE"

    @contextlib.contextmanager
    def nvtx_range(self, message: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"  # verl counts nothing else; Ray takes an invented num_gpus

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


set_platform(PlatformCPU())

_init_process_group = dist.init_process_group


def _init_once(backend: str | None = None, *args: Any, **words: Any) -> None:
    # torch: "Duplicate device type cpu in backend string".
    _init_process_group("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **words)


dist.init_process_group = _init_once
# The FSDP engine is registered for cuda and npu alone; verl reads this before what it finds.
os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
