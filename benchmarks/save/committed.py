"""One whole committed checkpoint, as the trainer makes them, for `verify` to read."""

from pathlib import Path

import numpy as np
import torch

from benchmarks.save.workload import Workload
from verl_slurm.checkpoint.format import SCHEMA_VERSION, Topology
from verl_slurm.checkpoint.schema import current_schema, render_schema
from verl_slurm.dcp.saver import Contents, Provenance, save
from verl_slurm.paths import RunPaths
from verl_slurm.runtime_state.format import RuntimeState

__all__ = ["commit_one"]

_TEXTS = ("scheduler.json", "metadata.json", "config.yaml", "orchestration.json")


def commit_one(root: Path, work: Workload) -> Path:
    """Save the workload into the run directory `root`; returns the checkpoint's directory. Collective."""
    ranks = work.ranks
    schema = current_schema()
    runtime = RuntimeState(
        rank=ranks.rank,
        world_size=ranks.world_size,
        step=1,
        phase="step_end",
        index=0,
        safe_point=0,
        rollout_offset=0,
        episode_id=0,
        kl_coef=0.0,
        kl_window=[],
        rng={"torch": np.zeros(8, dtype=np.uint8)},
    )
    contents = Contents(
        domains={**work.domains(), "critic": {"weight": torch.ones(2)}},
        runtime=runtime,
        texts={**dict.fromkeys(_TEXTS, b"{}\n"), SCHEMA_VERSION: render_schema(schema)},
    )
    provenance = Provenance(
        epoch=1,
        parent=None,
        schema_id=schema.schema_id,
        dataset_fingerprint="0" * 64,
        frozen={},
        topology=Topology(dp=ranks.world_size),
    )
    paths = RunPaths(root)
    return paths.checkpoints / save(paths, contents, provenance, ranks, epoch_check=lambda: None).name
