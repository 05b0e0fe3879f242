"""How long the engine `hf` takes for a token: launched kernel by kernel, and as one recorded graph."""

import statistics
import time
from pathlib import Path

import torch

from benchmarks.gpu.records import SamplingFigures
from verl_slurm.config.schema import RolloutConfig
from verl_slurm.trainer.data import Batch
from verl_slurm.trainer.rollout.sampling import HFRollout

_ROWS, _PROMPT, _NEW = 32, 64, 128


def measure_sampling(model: Path, dtype: str, device: torch.device, reps: int) -> SamplingFigures:
    """Samples the same batch in turns in both ways. On a CPU there is no graph, and one way.

    Args:
        model: directory.
        dtype: float32 or bfloat16.
    """
    prompts: Batch = {
        "sample_id": torch.arange(_ROWS),
        "prompt_ids": torch.randint(5, 200, (_ROWS, _PROMPT), generator=torch.Generator().manual_seed(1)),
        "prompt_mask": torch.ones(_ROWS, _PROMPT, dtype=torch.bool),
    }
    engines = {
        eager: HFRollout(
            model,
            RolloutConfig(max_new_tokens=_NEW, micro_batch_size_per_device=_ROWS, enforce_eager=eager),
            seed=3,
            eos_ids=[],  # every response has its full length
            pad_id=0,
            dtype=dtype,
            device=device,
        )
        for eager in ((True, False) if device.type == "cuda" else (True,))
    }
    weight_bytes = sum(p.numel() * p.element_size() for p in engines[True]._model.parameters())
    taken: dict[bool, list[float]] = {eager: [] for eager in engines}
    made: dict[bool, list[Batch]] = {eager: [] for eager in engines}
    first: dict[bool, float] = {}
    for rep in range(reps + 1):
        for eager, engine in engines.items():
            began = time.perf_counter()
            made[eager].append(engine.generate(prompts, step=1))
            seconds = time.perf_counter() - began
            if rep:
                taken[eager].append(seconds)
            else:  # kernels are loaded, and the graph is recorded
                first[eager] = seconds
    same = all(
        all(torch.equal(batch[name], of[0][name]) for name in batch) for of in made.values() for batch in of
    )
    other = made.get(False, made[True])[0]
    alike = (made[True][0]["response_ids"] == other["response_ids"]).float().mean()
    graph = taken.get(False)
    return SamplingFigures(
        dtype=dtype,
        rows=_ROWS,
        tokens=_NEW,
        weight_gib=weight_bytes / 2**30,
        eager_ms=1e3 * statistics.median(taken[True]) / _NEW,
        graph_ms=1e3 * statistics.median(graph) / _NEW if graph else None,
        first_graph_s=first.get(False),
        same_bits=same,
        same_tokens=float(alike),
    )
