"""This project's own save path as its trainer drives it: a `CheckpointSaver` for a run directory. Nothing is left out.

What a save costs here holds the small files, the manifest, the commit and the two fsyncs of the pointer to it,
which no peer has.
"""

from pathlib import Path

import torch
from torch import Tensor

from benchmarks.save.workload import Workload
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import run_id
from verl_slurm.checkpoint.format.specification import SCHEMA_VERSION, Topology
from verl_slurm.checkpoint.format.state_schema import current_schema, render_schema
from verl_slurm.runtime_state.format import RuntimeState
from verl_slurm.save.ranks.saver import CheckpointSaver, LocalPlace, Provenance, SaveContents

_TEXTS = ("scheduler.json", "metadata.json", "config.yaml", "orchestration.json")


def all_domains(work: Workload, critic: Tensor) -> dict[str, dict[str, Tensor]]:
    """The workload's domains, and the critic that a checkpoint must have (a handful of bytes)."""
    return {**work.domains(), "critic": {"weight": critic}}


def make_saver(root: Path, work: Workload, second: Path | None = None) -> CheckpointSaver:
    """A saver that writes into the run directory `root`, and to `second` as to a node's own disk. Collective."""
    root.mkdir(mode=0o700, exist_ok=True)
    schema = current_schema()
    provenance = Provenance(
        run_id=run_id(RunPaths(root)),
        attempt=1,
        parent=None,
        schema_id=schema.schema_id,
        dataset_fingerprint="0" * 64,
        frozen={},
        topology=Topology(dp=work.ranks.world_size),
    )
    critic = torch.ones(2)
    local = None if second is None else LocalPlace(directory=second, is_first=work.ranks.rank == 0, keep=1)
    return CheckpointSaver(
        RunPaths(root),
        all_domains(work, critic),
        provenance,
        work.ranks,
        attempt_check=lambda: None,
        local=local,
    )


def contents(work: Workload) -> SaveContents:
    """What goes beside the tensors, small."""
    ranks = work.ranks
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
        rng={"torch": bytes(8)},
    )
    texts = dict.fromkeys(_TEXTS, b"{}\n") | {SCHEMA_VERSION: render_schema(current_schema())}
    return SaveContents(runtime=runtime, texts=texts if ranks.rank == 0 else {})


def only_checkpoint(root: Path) -> Path:
    """The one checkpoint in a run directory, or among second copies: of a single node, a part is the whole."""
    (found,) = [*RunPaths(root).checkpoints.glob("step_*"), *root.glob("step_*")]
    return found
