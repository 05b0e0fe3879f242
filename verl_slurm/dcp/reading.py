"""Whole tensors out of a checkpoint, without ranks and without a model: what compare and export read through.

The directory must have been verified by the caller: DCP's `.metadata` is a pickle, and a pickle is a program.
Everything that looks at tensors outside a running trainer goes through the two functions here, so that the
format of the shards is known to one reader only.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from verl_slurm.dcp.collective import alone_on_purpose
from verl_slurm.errors import CheckpointCorrupt

__all__ = ["TensorInfo", "groups_of", "list_tensors", "read_domain"]


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Shape and type of a whole, unsharded tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


def list_tensors(directory: Path, domain: str) -> dict[str, TensorInfo]:
    """Name → shape and type of every tensor of a domain, sorted by name. Reads no tensor.

    Args:
        directory: a checkpoint whose files of description have been held to their digests.
        domain: `actor`, `critic` or `optimizer`.

    Called by: dcp.compare, export.
    """
    saved = FileSystemReader(directory / domain).read_metadata().state_dict_metadata
    return {
        name: TensorInfo(shape=tuple(entry.size), dtype=entry.properties.dtype)
        for name, entry in sorted(saved.items())
        if isinstance(entry, TensorStorageMetadata)
    }


def read_domain(directory: Path, domain: str, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Whole CPU tensors of a domain, from however many ranks they were written.

    Args:
        directory: a checkpoint that `checkpoint.verify` found whole.
        names: only these, in this order; None: all, which may be more than fits into memory.

    Raises:
        CheckpointCorrupt: a name is not there.

    Called by: dcp.compare, export.
    """
    infos = list_tensors(directory, domain)
    wanted = list(infos) if names is None else list(names)
    missing = [name for name in wanted if name not in infos]
    if missing:
        raise CheckpointCorrupt(
            "the checkpoint lacks tensors",
            where=directory / domain,
            found=f"no {', '.join(missing[:3])} ({len(missing)} missing)",
            remedy="see what it holds with `verl-slurm inspect`",
        )
    tensors = {name: torch.empty(infos[name].shape, dtype=infos[name].dtype) for name in wanted}
    if tensors:
        with alone_on_purpose():
            dcp_load(tensors, storage_reader=FileSystemReader(directory / domain), no_dist=True)
    return tensors


def groups_of(infos: Mapping[str, TensorInfo], limit_bytes: int) -> Iterator[list[str]]:
    """The names in groups of at most `limit_bytes` (a larger tensor is a group of its own), in order."""
    group: list[str] = []
    size = 0
    for name, info in infos.items():
        if group and size + info.num_bytes > limit_bytes:
            yield group
            group, size = [], 0
        group.append(name)
        size += info.num_bytes
    if group:
        yield group
