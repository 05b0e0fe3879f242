"""Loads a verified checkpoint directory into live tensors, however they are sharded.

Each rank reads the boxes that it holds, from whatever pieces they were saved in; every chunk that it reads is
checked once more on the way (`checkpoint.store.chunks`). The ranks need no plan in common.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.base.keys import Keyring
from verl_slurm.base.tree import open_directory
from verl_slurm.checkpoint.format import tensor_index
from verl_slurm.checkpoint.store.chunks import Wanted, read_checked
from verl_slurm.checkpoint.store.reader import CheckpointReader
from verl_slurm.runtime_state.codec import decode
from verl_slurm.runtime_state.format import RuntimeState, runtime_state_name
from verl_slurm.save.ranks.boxes import Box, Overlap, dtype_name, local_part, overlap
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.tensors import Tensors, left_as_it_is

# Rows that do not lie in the file as they do in memory are read into buffers first, this much at a time.
_BUFFER_BYTES = 512 << 20


def read_tensors(
    reader: CheckpointReader, domains: Mapping[str, Tensors], ranks: Collective, *, near: Path | None = None
) -> None:
    """Fill the tensors of each domain (`actor`, `critic`, `optimizer`) in place. Collective.

    Args:
        reader: of a checkpoint that `checkpoint.store.verify` found whole.
        domains: domain → this rank's tensors; those of all ranks are exactly what it must hold.
        near: where this node may have some of its files, on its own disk. They are read there, and checked against
            the manifest of `reader`; a file that is not there, or is another one, is read from the checkpoint.

    Raises:
        CheckpointCorrupt: a tensor is missing, left over, or of another shape or type.
        RanksFailed: reading failed on some rank.
    """
    # Every rank checks for itself against the same files, so all refuse or none.
    indexes = {domain: read_index(reader, domain) for domain in domains}
    _check_names(reader, indexes, domains, ranks)
    for domain, tensors in domains.items():
        _check(reader.directory / domain, indexes[domain], tensors)
    parts = [part for domain in domains for part in _parts(domain, indexes[domain].tensors, domains[domain])]
    # Together: storage may fail for one rank alone, and the others would train on without it.
    ranks.together("reading tensors", lambda: read_parts(reader, parts, near))


def read_whole(
    directory: Path, domain: str, names: Collection[str] | None = None, keys: Keyring | None = None
) -> Tensors:
    """Tensors of a domain as they are unsharded, on the CPU; all, or those named.

    Args:
        directory: a checkpoint that `checkpoint.store.verify` found whole.

    Raises:
        CheckpointCorrupt: it changed since.
        KeyError: it has no such tensor.
    """
    return WholeReader(directory, domain, keys).read(names)


class WholeReader:
    """Reads a domain's whole tensors some at a time; index and manifest, which may be large, are parsed once.

    Raises:
        CheckpointCorrupt: the index is not what the manifest says.
        KeyRefused: it needs a key that is not there.
    """

    def __init__(self, directory: Path, domain: str, keys: Keyring | None = None) -> None:
        self.reader, self._domain = CheckpointReader(directory, keys), domain
        self.index = read_index(self.reader, domain)

    def read(self, names: Collection[str] | None = None) -> Tensors:
        """As `read_whole`."""
        wanted = self.index.tensors if names is None else names
        return self.read_entries({name: self.index.tensors[name] for name in wanted})

    def read_entries(self, entries: Mapping[str, tensor_index.TensorEntry]) -> Tensors:
        """Name → tensor, of entries of this index or parts of them (`slabs`); as `read_whole`."""
        tensors: Tensors = {
            name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            for name, entry in entries.items()
        }
        read_parts(self.reader, _parts(self._domain, entries, tensors))
        return tensors


def read_runtime_state(
    reader: CheckpointReader, rank: int, world_size: int, *, below: str = ""
) -> RuntimeState:
    """The runtime state that `rank` of `world_size` saved.

    Args:
        below: a directory of the checkpoint; empty: its own.

    Raises:
        CheckpointCorrupt: it is not what was committed, or belongs to another rank or world size.
        OSError: the storage did not give it. It was there when the checkpoint was verified, so this says
            nothing about the checkpoint, not even when the file is not found (a stale view of NFS).
    """
    name = f"{below}/{runtime_state_name(rank)}".lstrip("/")
    path = reader.directory / name
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
    indexes: Mapping[str, tensor_index.TensorIndex],
    domains: Mapping[str, Tensors],
    ranks: Collective,
) -> None:
    """Refuse, on all ranks alike, a tensor that the checkpoint lacks or that no rank holds. Collective.

    A pipeline's stage has some of the tensors, so what is left over can only be told over all ranks. None of them tells
    its names: of 10,000 ranks they would be gigabytes.
    """
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


def _check(where: Path, index: tensor_index.TensorIndex, tensors: Tensors) -> None:
    """Hold shapes and types in `index` to those of `tensors`: nothing is cast."""
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
    piece: tensor_index.Piece
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


def read_index(reader: CheckpointReader, domain: str) -> tensor_index.TensorIndex:
    """Which tensors a domain holds and where, its bytes checked against the manifest.

    Raises:
        CheckpointCorrupt: they are not what the manifest says.
    """
    where = reader.directory / domain / tensor_index.INDEX
    index = tensor_index.parse_index(reader.read(f"{domain}/{tensor_index.INDEX}"), where=where)
    # Most runs lie in the same files, which are looked up once.
    runs: dict[tuple[str, range], int] = {}
    for entry in index.tensors.values():
        for piece in entry.pieces:
            place = (piece.file, piece.ranks if piece.count > 1 else range(1))
            runs[place] = runs.get(place, 0) + piece.numel * tensor_index.DTYPE_BYTES[entry.dtype]
    claimed: dict[str, int] = {}
    for (first, those), num_bytes in runs.items():
        for file in [first] if len(those) == 1 else map(tensor_index.tensor_file, those):
            claimed[file] = claimed.get(file, 0) + num_bytes
    for file, num_bytes in claimed.items():
        # Pieces that share their bytes would let a small file stand for any number of large tensors.
        if num_bytes > max(0, reader.plain_size(f"{domain}/{file}")):
            raise _unfit(where, f"pieces of {num_bytes} bytes in {file}", "the file that they lie in")
    return index


def _parts(domain: str, entries: Mapping[str, tensor_index.TensorEntry], tensors: Tensors) -> Iterator[Part]:
    for name, tensor in tensors.items():
        local, box = local_part(tensor)
        for piece in _near(entries[name], box):
            common = overlap(piece, box, local.element_size())
            if common is not None and piece.numel:
                target = local.detach()[common.target] if common.target else local.detach()
                yield Part(f"{domain}/{piece.file}", piece, common, target)


def _near(entry: tensor_index.TensorEntry, box: Box) -> Iterator[tensor_index.Piece]:
    """Yields the pieces that may have something of `box`: of a run of thousands, those around it."""
    for piece in entry.pieces:
        low, size = (box.offset[piece.axis], box.shape[piece.axis]) if box.shape else (0, 1)
        yield from piece.between(low, low + size)


def read_parts(reader: CheckpointReader, parts: Iterable[Part], near: Path | None = None) -> None:
    """Read these parts into their targets, every chunk that they touch checked.

    Args:
        near: as in `read_tensors`.

    Raises:
        CheckpointCorrupt: it changed since it was verified.
        OSError: the storage did not give it.
    """
    with ExitStack() as opened:
        places = [opened.enter_context(open_directory(reader.directory))]
        if near is not None:
            with suppress(OSError, CheckpointCorrupt):  # this node has none of it
                places.insert(0, opened.enter_context(open_directory(near)))
        for batch in _batches(parts):
            _read_batch(places, reader, batch)


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


def _read_batch(places: Sequence[int], reader: CheckpointReader, batch: list[Part]) -> None:
    """Reads the parts of a batch.

    Args:
        places: descriptors of the directories that may have the files, the checkpoint itself last.
    """
    directory = reader.directory
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
    problems: list[tuple[str, str | OSError]] = []
    readings = []
    for path, ranges in wanted.items():
        # `read_checked` wants them in order.
        ranges.sort(key=lambda w: w.offset)
        # Before the read: the index is the writer's word, and the reader copies to raw addresses.
        if ranges[-1].offset + ranges[-1].length > reader.plain_size(path):
            raise _unfit(directory / path, "no such bytes", "the file that the index names")
        readings.append(reader.reading(path, ranges))
    for place in places:
        # Whatever is wrong with a nearer copy, the next place may have the right bytes.
        problems.clear()
        read_checked(place, readings, on_problem=lambda path, what: problems.append((path, what)))
        left = {path for path, _ in problems}
        readings = [reading for reading in readings if reading.entry.path in left]
    for path, what in problems:
        # Storage that fails now says nothing about the checkpoint: it is not called corrupt.
        if isinstance(what, OSError):
            raise what
        raise CheckpointCorrupt(
            "the checkpoint changed after it was verified",
            where=directory / path,
            found=what,
            remedy="resume from an older checkpoint (verl-slurm list RUN)",
        )
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
