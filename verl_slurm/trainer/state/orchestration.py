"""Orchestration state: a run's layout, written once at its first start and read-only from then on.

It is in `RUN/orchestration.json`, with a copy in every checkpoint. A later start may have another layout, and
each checkpoint's manifest names its own.
"""

import os
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from verl_slurm.base.bounded import DATA_FILES, read_regular
from verl_slurm.base.errors import UNREADABLE, CheckpointCorrupt
from verl_slurm.base.files import write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.specification import Topology
from verl_slurm.config.schema import RunConfig
from verl_slurm.dataset.fingerprint.data_record import Fingerprint
from verl_slurm.trainer.parallel.places import axis_groups, place_of


class Orchestration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of orchestration.json."""

    version: int = 1
    began: Annotated[datetime, msgspec.Meta(tz=True)]
    """When the first start read the data, in its local time. A chat template that writes the date takes it,
    in all attempts."""
    data_root: str
    data_files: dict[str, str]
    """File under the root → its SHA-256."""
    dataset_fingerprint: str
    world_size: int
    nodes: int
    topology: Topology
    device_groups: dict[str, list[list[int]]]
    """Axis → the groups of ranks that communicate along it."""
    backend: str
    shard_map: dict[str, str]
    """Rank → its prompts and its share of every tensor, in words."""
    log_paths: dict[str, str]
    """Kind of log → path relative to the run's directory."""
    metric_history: dict[str, str]
    """Paths of the numbers of each step, relative to the run's directory."""


def describe(config: RunConfig, data_root: Path, data: Fingerprint, backend: str) -> Orchestration:
    """Describes the layout of a run that starts now."""
    shape, topology = config.distributed, topology_of(config)
    size = config.rollout.micro_batch_size_per_device
    return Orchestration(
        began=datetime.now().astimezone().replace(microsecond=0),
        data_root=str(data_root),
        data_files={name: entry.sha256 for name, entry in sorted(data.files.items())},
        dataset_fingerprint=data.digest,
        world_size=shape.world_size,
        nodes=shape.nodes,
        topology=topology,
        device_groups=axis_groups(topology),
        backend=backend,
        shard_map={str(rank): _share(rank, topology, size) for rank in range(shape.world_size)},
        log_paths={"events": "events.jsonl", "ranks": "logs", "tensorboard": "tensorboard"},
        metric_history={
            "curves": "tensorboard",
            "steps": "steps.jsonl",
            "rows": "checkpoints/*/metadata.json: history",
        },
    )


def moved(first: Orchestration, backend: str) -> str:
    """Returns a note for people if a run moves to another kind of device; empty if it does not. Pure."""
    if first.backend == backend:
        return ""
    return f"goes on with {backend}, and began with {first.backend}: other kernels, so exact to rounding only"


def began_on_gpus(paths: RunPaths) -> bool:
    """Returns whether the first start of this run was on GPUs; False for an unreadable run."""
    try:
        # Read before there is a process group, so each rank decides by itself from the same file.
        first = msgspec.json.decode(read_regular(paths.orchestration, DATA_FILES), type=Orchestration)
    # A run that begins has none. Damage is said by `check_or_write`, on rank 0.
    except (OSError, *UNREADABLE):
        return False
    # By the first start: a run that began on a CPU may go on there.
    return "nccl" in first.backend


def topology_of(config: RunConfig) -> Topology:
    """Returns the shape that `config` asks for."""
    shape = config.distributed
    return Topology(dp=shape.dp_size, tp=shape.tp_size, pp=shape.pp_size)


def _share(rank: int, shape: Topology, size: int) -> str:
    place = place_of(rank, shape)
    words = f"prompts {place.dp * size} to {(place.dp + 1) * size - 1} of every {size * shape.dp};"
    words += f" rows of FSDP2 shard {place.dp} of {shape.dp}"
    if shape.tp > 1:
        words += f"; tensor-parallel share {place.tp} of {shape.tp}"
    if shape.pp > 1:
        words += f"; pipeline stage {place.pp} of {shape.pp}"
    return words


def check_or_write(paths: RunPaths, now: Orchestration) -> Orchestration:
    """Writes the layout at the first start, and reads it at every later one. Runs on rank 0.

    Raises:
        CheckpointCorrupt: its content is not what it should be.
        OSError: the storage did not answer; says nothing about the file.
    """
    path = paths.orchestration
    try:
        first = msgspec.json.decode(read_regular(path, DATA_FILES), type=Orchestration)
    # Written once: a later start may have another layout, and its manifests say which.
    except FileNotFoundError:
        write_file(path, msgspec.json.format(msgspec.json.encode(now), indent=1) + b"\n")
        # Read-only for people, too; nothing ever writes it again.
        os.chmod(path, 0o400)
        return now
    # Its content is wrong. An OSError says nothing about it and goes up: another start may read it.
    except UNREADABLE as error:
        raise CheckpointCorrupt(
            "the orchestration state cannot be read",
            where=path,
            found=error,
            remedy="copy it back from a checkpoint of this run",
        ) from error
    # Another shape is no reason to refuse: `trainer.state.resharding`.
    return first
