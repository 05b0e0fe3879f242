"""Loads a verified checkpoint directory into live tensors, however they are sharded.

Each rank reads the boxes that it holds, from whatever pieces they were saved in; every chunk that it reads is
checked once more on the way (`checkpoint.store.chunks`). The ranks need no plan in common.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.base.keys import Keyring
from verl_slurm.checkpoint.format.tensor_index import Piece, TensorEntry, TensorIndex
from verl_slurm.checkpoint.store.chunks import Wanted
from verl_slurm.checkpoint.store.reader import CheckpointReader
from verl_slurm.runtime_state.codec import decode
from verl_slurm.runtime_state.format import RuntimeState, runtime_state_name
from verl_slurm.save.ranks.boxes import Box, Overlap, dtype_name, local_part, overlap
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.tensors import Tensors, left_as_it_is

# Rows that do not lie in the file as they do in memory are read into buffers first, this much at a time.
_BUFFER_BYTES = 512 << 20


def read_tensors(
    reader: CheckpointReader,
    domains: Mapping[str, Tensors],
    ranks: Collective,
    *,
    near: Path | None = None,
) -> None:
    """Fills the tensors of each domain (`actor`, `critic`, `optimizer`) in place. Collective.

    Args:
        reader: of a checkpoint that `checkpoint.store.verify` found whole.
        domains: domain → this rank's tensors; those of all ranks are exactly what it must hold.
        near: as of `CheckpointReader.fill`.

    Raises:
        CheckpointCorrupt: a tensor is missing, left over, or of another shape or type.
        RanksFailed: reading failed on some rank.
    """
    # Every rank checks for itself against the same files, so all refuse or none.
    indexes = {domain: reader.index(domain) for domain in domains}
    _check_names(reader, indexes, domains, ranks)
    for domain, tensors in domains.items():
        _check(reader.directory / domain, indexes[domain], tensors)
    parts = [part for domain in domains for part in _parts(domain, indexes[domain].tensors, domains[domain])]
    # Together: storage may fail for one rank alone, and the others would train on without it.
    ranks.together("reading tensors", lambda: read_parts(reader, parts, near))


def read_whole(
    directory: Path, domain: str, names: Collection[str] | None = None, keys: Keyring | None = None
) -> Tensors:
    """Returns tensors of a domain as they are unsharded, on the CPU; all, or those named.

    Raises:
        CheckpointCorrupt: it changed since `checkpoint.store.verify` found it whole.
        KeyError: it has no such tensor.
    """
    return WholeReader(CheckpointReader(directory, keys), domain).read(names)


class WholeReader:
    """Reads a domain's whole tensors some at a time; its index, which may be large, is parsed once."""

    def __init__(self, reader: CheckpointReader, domain: str) -> None:
        self.reader, self._domain = reader, domain
        self.index = self.reader.index(domain)

    def read(self, names: Collection[str] | None = None) -> Tensors:
        """As `read_whole`."""
        wanted = self.index.tensors if names is None else names
        return self.read_entries({name: self.index.tensors[name] for name in wanted})

    def read_entries(self, entries: Mapping[str, TensorEntry]) -> Tensors:
        """Name → tensor, of entries of this index or parts of them (`slabs`)."""
        tensors: Tensors = {
            name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            for name, entry in entries.items()
        }
        read_parts(self.reader, _parts(self._domain, entries, tensors))
        return tensors


def read_runtime_state(
    reader: CheckpointReader, rank: int, world_size: int, *, below: str = ""
) -> RuntimeState:
    """Returns the runtime state that `rank` of `world_size` saved; `below`: in a directory of the checkpoint.

    Raises:
        CheckpointCorrupt: it is not what was committed, or belongs to another rank or world size.
        OSError: the storage did not give it.
    """
    name = f"{below}/{runtime_state_name(rank)}".lstrip("/")
    path = reader.directory / name
    # An OSError says nothing about the checkpoint, not even of a file that is not found: it was there when it verified,
    # and NFS may have a stale view.
    # Its digest is checked by the reader before a byte of it is decompressed.
    state = decode(reader.read(name), where=path)
    # The manifest's digest vouches for the bytes, and the file's name is no proof of whose they are.
    if (state.rank, state.world_size) != (rank, world_size):
        raise _unfit(path, f"rank {state.rank} of {state.world_size}", f"rank {rank} of {world_size}")
    return state


class _Lacking(msgspec.Struct, frozen=True, array_like=True):
    """What each rank tells all others of the checkpoint that it reads."""

    manifest: str
    """Its digest."""
    names: dict[str, list[str]]
    """Domain → this rank's tensors that it does not have."""


def _check_names(
    reader: CheckpointReader,
    indexes: Mapping[str, TensorIndex],
    domains: Mapping[str, Tensors],
    ranks: Collective,
) -> None:
    """Refuses, on all ranks alike, a tensor that the checkpoint lacks or that no rank holds. Collective."""
    # A pipeline's stage has some of the tensors, so what is left over can only be told over all ranks. None of them
    # tells its names: of 10,000 ranks they would be gigabytes.
    lacking = {name: sorted(domains[name].keys() - indexes[name].tensors.keys()) for name in domains}
    mine = _Lacking(reader.manifest.digest, {domain: names for domain, names in lacking.items() if names})
    words = ranks.values(mine, _Lacking)
    # The same manifest, so the same indexes: the vector below is as long on every rank.
    if any(word.manifest != mine.manifest for word in words):
        raise _unfit(reader.directory, "another manifest on some ranks", "the same on all of them")
    names = [(domain, name) for domain in domains for name in sorted(indexes[domain].tensors)]
    held = ranks.max([name in domains[domain] for domain, name in names]) if names else []
    for domain in domains:
        missing = {name for word in words for name in word.names.get(domain, ())}
        left_over = {
            name for (place, name), anyone in zip(names, held, strict=True) if place == domain and not anyone
        }
        for what, those in (("missing", missing), ("left over", left_over)):
            if those:
                some = ", ".join(sorted(those)[:3])
                found = f"{len(those)} {what}: {some}"
                raise _unfit(reader.directory / domain, found, "the tensors of this model")


def _check(where: Path, index: TensorIndex, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        found = (index.tensors[name].dtype, index.tensors[name].shape)
        expected = (dtype_name(tensor.dtype), tuple(tensor.shape))
        # Nothing is cast: a resume must continue with the same bits.
        if found != expected:
            raise _unfit(where, f"{name} {found}", expected)


@dataclass(frozen=True)
class Part:
    """What of one saved piece goes into one live tensor. `path`: of the piece's file in the checkpoint."""

    path: str
    piece: Piece
    overlap: Overlap
    target: Tensor

    @property
    def is_direct(self) -> bool:
        """Whether its bytes lie in the file just as they do in the target's memory."""
        # Then the reader copies straight into the live tensor, without a buffer.
        return self.overlap.whole_rows and self.target.is_contiguous() and self.target.device.type == "cpu"

    @property
    def num_bytes(self) -> int:
        return self.target.element_size() * torch.Size(self.overlap.rows).numel()


def _parts(domain: str, entries: Mapping[str, TensorEntry], tensors: Tensors) -> Iterator[Part]:
    for name, tensor in tensors.items():
        local, box = local_part(tensor)
        for piece in _near(entries[name], box):
            common = overlap(piece, box, local.element_size())
            if common is not None and piece.numel:
                target = local.detach()[common.target] if common.target else local.detach()
                yield Part(f"{domain}/{piece.file}", piece, common, target)


def _near(entry: TensorEntry, box: Box) -> Iterator[Piece]:
    """Yields the pieces that may have something of `box`: of a run of thousands, those around it."""
    for piece in entry.pieces:
        low, size = (box.offset[piece.axis], box.shape[piece.axis]) if box.shape else (0, 1)
        yield from piece.between(low, low + size)


def read_parts(reader: CheckpointReader, parts: Iterable[Part], near: Path | None = None) -> None:
    """Reads these parts into their targets; `near` and errors as of `CheckpointReader.fill`."""
    for batch in _batches(parts):
        _read_batch(reader, batch, near)


def _batches(parts: Iterable[Part]) -> Iterator[list[Part]]:
    batch: list[Part] = []
    buffered = 0
    for part in parts:
        batch.append(part)
        # Direct parts need no buffer, so they do not fill a batch.
        buffered += 0 if part.is_direct else part.num_bytes
        if buffered >= _BUFFER_BYTES:
            yield batch
            batch, buffered = [], 0
    if batch:
        yield batch


def _read_batch(reader: CheckpointReader, batch: list[Part], near: Path | None) -> None:
    wanted: dict[str, list[Wanted]] = {}
    buffers: list[tuple[Part, Tensor]] = []
    for part in batch:
        into = part.target
        if not part.is_direct:
            with left_as_it_is():  # all of a GPU's tensors come this way
                into = torch.empty(part.overlap.rows, dtype=part.target.dtype)
            buffers.append((part, into))
        start = part.piece.at + part.overlap.skip
        # `buffers` and the targets keep this memory alive until the read is over: the reader knows addresses alone.
        wanted.setdefault(part.path, []).append(Wanted(start, part.num_bytes, into.data_ptr()))
    reader.fill(wanted, near)
    # After all chunks were checked: a batch that fails leaves these targets as they were.
    with torch.no_grad():
        for part, rows in buffers:
            part.target.copy_(rows[part.overlap.source] if part.overlap.source else rows)


def _unfit(where: object, found: object, expected: object) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        "the checkpoint does not fit this run",
        where=where,
        found=found,
        expected=expected,
        remedy="resume with the model the run was started with, or from another checkpoint",
    )
