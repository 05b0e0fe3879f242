"""The save path alone, under as many bytes of a device's memory as one likes."""

import shutil
import statistics
import time
from concurrent.futures import Future
from pathlib import Path

import torch

from benchmarks.gpu.records import SaveFigures
from verl_slurm.base.kernel_facts import available_memory
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.staging import Staging
from verl_slurm.save.writer.protocol import Write

_PIECE = 64 << 20


def why_not(gib: float, device: torch.device, directory: Path) -> str:
    """What there is too little of; empty: nothing."""
    need = int(gib * 2**30)
    on_host = need if device.type == "cuda" else 2 * need  # the state itself, too
    if on_host > 0.9 * available_memory():
        return f"{gib:g} GiB: not enough memory of the machine"
    if device.type == "cuda" and need > torch.cuda.mem_get_info(device)[0]:
        return f"{gib:g} GiB: not enough memory of the GPU"
    if need > 0.9 * shutil.disk_usage(directory).free:
        return f"{gib:g} GiB: not enough room in {directory}"
    return ""


def measure_saves(gib: float, device: torch.device, directory: Path, reps: int) -> SaveFigures:
    """Save `gib` GiB `reps` times, one after the other, each into a new directory that is removed behind it."""
    size = int(gib * 2**30) // 4 * 4
    sizes = [min(_PIECE, size - at) // 4 for at in range(0, size, _PIECE)]
    tensors = {f"piece{i}": torch.rand(count, device=device) for i, count in enumerate(sizes)}
    began = time.perf_counter()
    staging = Staging({"actor": tensors}, Collective(None))
    try:
        _save(staging, directory / "warm")
        warm_s = time.perf_counter() - began
    finally:
        staging.close()
    # As in a run, whose models are loaded meanwhile.
    began = time.perf_counter()
    staging = Staging({"actor": tensors}, Collective(None))
    try:
        staging.wait_until_warm()
        ready_s = time.perf_counter() - began
        _, first_fence_s, _ = _save(staging, directory / "first")
        taken = [_save(staging, directory / f"save{rep}") for rep in range(reps)]
        pinned = staging.pinned
    finally:
        staging.close()
    begin_s, fence_s, durable_s = (statistics.median(row[i] for row in taken) for i in range(3))
    return SaveFigures(
        gib=size / 2**30,
        pinned=pinned,
        reps=reps,
        warm_s=warm_s,
        ready_s=ready_s,
        first_fence_ms=1e3 * first_fence_s,
        begin_ms=1e3 * begin_s,
        fence_ms=1e3 * fence_s,
        durable_s=durable_s,
    )


def _save(staging: Staging, where: Path) -> tuple[float, float, float]:
    """Seconds of `begin`, until the fence lets through, until durable."""
    where.mkdir(mode=0o700)
    began = time.perf_counter()
    request: Future[Write] = Future()
    request.set_result(Write(files=staging.layout.files, directories=(str(where),)))
    saving = staging.begin(request)
    returned = time.perf_counter() - began
    staging.fence()
    free = time.perf_counter() - began
    saving.result()
    durable = time.perf_counter() - began
    shutil.rmtree(where)
    return returned, free, durable
