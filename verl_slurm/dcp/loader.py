"""A verified checkpoint directory into live tensors. The only way back in.

Loading unpickles DCP's `.metadata`, so it is done with a directory whose manifest has been verified, and
with no other: a pickle is a program.
"""

from collections.abc import Mapping
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from verl_slurm.dcp.collective import Collective, alone_on_purpose, ranks_failed
from verl_slurm.dcp.tensors import Tensors
from verl_slurm.errors import CheckpointCorrupt
from verl_slurm.runtime_state.codec import decode
from verl_slurm.runtime_state.format import RuntimeState, runtime_state_name

__all__ = ["load_runtime_state", "load_tensors"]


def load_tensors(directory: Path, domains: Mapping[str, Tensors], ranks: Collective) -> None:
    """Fill the tensors of each domain (`actor`, `critic`, `optimizer`) in place. Collective.

    Args:
        directory: a checkpoint that `checkpoint.verify` found whole.
        domains: domain → exactly the tensors that it must hold.

    Raises:
        CheckpointCorrupt: a tensor is missing, left over, or of another shape or type.
        RanksFailed: reading failed on some rank.
    """
    for domain, tensors in domains.items():
        # Every rank checks for itself against the same file, so all refuse or none.
        _check(directory / domain, tensors)
        try:
            with alone_on_purpose():
                dcp_load(
                    dict(tensors),
                    storage_reader=FileSystemReader(directory / domain),
                    process_group=ranks.group,
                    no_dist=ranks.group is None,
                )
        except CheckpointException as error:
            raise ranks_failed(f"reading {domain}", error.failures) from error


def load_runtime_state(directory: Path, ranks: Collective) -> RuntimeState:
    """This rank's runtime state.

    Raises:
        CheckpointCorrupt: it does not decode, or belongs to another rank or world size.
        OSError: the storage did not give it. It was there when the checkpoint was verified, so this says
            nothing about the checkpoint, not even when the file is not found (a stale view of NFS).
    """
    path = directory / runtime_state_name(ranks.rank)
    state = decode(path.read_bytes(), where=path)
    if (state.rank, state.world_size) != (ranks.rank, ranks.world_size):
        raise _unfit(
            path, f"rank {state.rank} of {state.world_size}", f"rank {ranks.rank} of {ranks.world_size}"
        )
    return state


def _check(directory: Path, tensors: Tensors) -> None:
    """Hold names, shapes and types in `directory` to those of `tensors`; DCP would cast, or skip some."""
    saved = FileSystemReader(directory).read_metadata().state_dict_metadata
    missing, left_over = tensors.keys() - saved.keys(), saved.keys() - tensors.keys()
    for what, names in (("missing", missing), ("left over", left_over)):
        if names:
            some = ", ".join(sorted(names)[:3])
            raise _unfit(directory, f"{len(names)} {what}: {some}", "the tensors of this model")
    for name, tensor in tensors.items():
        entry = saved[name]
        if not isinstance(entry, TensorStorageMetadata):
            raise _unfit(directory, f"{name} is no tensor", "tensors only")
        found, expected = (entry.size, entry.properties.dtype), (tensor.shape, tensor.dtype)
        if found != expected:
            raise _unfit(directory, f"{name} {found}", expected)


def _unfit(where: object, found: object, expected: object) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        "the checkpoint does not fit this run",
        where=where,
        found=found,
        expected=expected,
        remedy="resume with the model the run was started with, or from another checkpoint",
    )
