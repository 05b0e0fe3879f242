"""Our checkpoints for torch.distributed.checkpoint: `dcp.load(state_dict, storage_reader=CheckpointReaderForDCP(...))`.

For other programs: whatever loads through DCP, with its own planner and its own idea of sharding, reads a domain of
ours, every chunk checked on the way. Ours goes through `save.ranks.loader`, which needs no plan.

Protocol: torch.distributed.checkpoint.StorageReader (torch 2.13).
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from verl_slurm.base.keys import Keyring
from verl_slurm.checkpoint.format.tensor_index import Piece
from verl_slurm.checkpoint.store.reader import CheckpointReader
from verl_slurm.save.ranks.boxes import Box, overlap
from verl_slurm.save.ranks.loader import Part, WholeReader, read_parts


class CheckpointReaderForDCP(StorageReader):
    """Reads one domain of a checkpoint.

    Args:
        directory: a checkpoint that `verl-slurm verify` found whole.
        domain: `actor`, `critic` or `optimizer`; names of tensors are those that `verl-slurm inspect` shows.

    Raises:
        CheckpointCorrupt: its index or manifest is not what was committed.
    """

    def __init__(self, directory: Path | str, domain: str, keys: Keyring | None = None) -> None:
        self._whole, self._domain = WholeReader(CheckpointReader(Path(directory), keys), domain), domain

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between two loads."""

    def read_metadata(self) -> dcp.Metadata:
        """Names, types, shapes and pieces."""
        described: dict[str, Any] = {}
        places: dict[dcp.MetadataIndex, Piece] = {}
        for name, entry in self._whole.index.tensors.items():
            pieces = entry.without_runs().pieces
            chunks = [
                dcp.ChunkStorageMetadata(offsets=torch.Size(piece.offset), sizes=torch.Size(piece.shape))
                for piece in pieces
            ]
            properties = dcp.TensorProperties(dtype=getattr(torch, entry.dtype))
            described[name] = dcp.TensorStorageMetadata(
                properties=properties, size=torch.Size(entry.shape), chunks=chunks
            )
            for number, piece in enumerate(pieces):
                places[dcp.MetadataIndex(name, torch.Size(piece.offset), number)] = piece
        return dcp.Metadata(state_dict_metadata=described, storage_data=places)

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        self._places: dict[dcp.MetadataIndex, Piece] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Fills what the plan asks for. CheckpointCorrupt: a chunk is not what was committed."""
        parts, targets = [], []
        for item in plan.items:
            piece = self._places[item.storage_index]
            target = planner.resolve_tensor(item).detach()
            # The plan counts from the piece's beginning, our boxes from the whole tensor's.
            at = tuple(a + b for a, b in zip(piece.offset, item.storage_offsets, strict=True))
            common = overlap(piece, Box(at, tuple(item.lengths)), target.element_size())
            if common is not None:
                parts.append(Part(f"{self._domain}/{piece.file}", piece, common, target))
            targets.append((item, target))
        # All parts in one call, so that files are read side by side.
        read_parts(self._whole.reader, parts)
        for item, target in targets:
            # After all are filled: the planner may copy a target on.
            planner.commit_tensor(item, target)
        # All is read by now; the protocol wants a future.
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / "manifest.json").is_file()
