"""Which rank writes which piece of which tensor, and where: worked out once, the same at every save.

Every piece is written by one rank, the lowest that holds it. The tensors are those of the running training, and they
stay where they are (FSDP2 and AdamW change them in place), so a save needs no state dict, no plan and no word between
the ranks; it only copies.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from torch import Tensor

from verl_slurm.checkpoint.format.tensor_index import (
    DTYPE_BYTES,
    FILE_ALIGNMENT,
    INDEX,
    PIECE_ALIGNMENT,
    Piece,
    TensorEntry,
    TensorIndex,
    render_index,
    tensor_file,
)
from verl_slurm.save.ranks.boxes import Box, dtype_name, local_part
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.tensors import Tensors
from verl_slurm.save.writer.protocol import ArenaFile

__all__ = ["Layout", "Slot", "plan_layout"]


@dataclass(frozen=True)
class Slot:
    """A tensor of this rank and the place of its copy, in bytes from the start of the arena."""

    tensor: Tensor
    at: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One rank's share.

    Attributes:
        slots: what this rank copies.
        files: what its saver writes of the arena.
        arena_bytes: that it needs.
        indexes: `actor/index.json` and so on → bytes, the same on every rank; rank 0 writes them.
    """

    slots: tuple[Slot, ...]
    files: tuple[ArenaFile, ...]
    arena_bytes: int
    indexes: dict[str, bytes]


class _Held(msgspec.Struct, frozen=True, array_like=True):
    """A piece that some rank holds."""

    domain: str
    name: str
    dtype: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


_Place = tuple[str, str, tuple[int, ...]]
"""Domain, tensor, offset: what makes two pieces the same one."""


def plan_layout(domains: Mapping[str, Tensors], ranks: Collective) -> Layout:
    """Agree on who writes what. Collective.

    Args:
        domains: domain → tensors. A tensor may be on some ranks only (a pipeline's stages).

    Raises:
        RanksFailed: a tensor is of a type, or sharded in a way, that cannot be saved.
    """
    # Together: a type that cannot be saved may be on one stage of a pipeline alone.
    held = ranks.together("laying out the checkpoint", lambda: _held(domains))
    # From here on each rank computes the same plan from the same lists; nothing more is exchanged.
    everybody = [
        msgspec.msgpack.decode(part, type=list[_Held])
        for part in ranks.gather(msgspec.msgpack.encode([piece for piece, _ in held]))
    ]
    taken: set[_Place] = set()
    pieces: dict[tuple[str, str], list[Piece]] = {}
    my_files: list[ArenaFile] = []
    my_places: dict[_Place, int] = {}
    arena_bytes = 0
    # Every rank walks all ranks' pieces, since the index names them all; it keeps places in the arena of its own alone.
    for rank, theirs in enumerate(everybody):
        for domain in domains:
            path, at = tensor_file(rank), 0
            for piece in theirs:
                place = (domain, piece.name, piece.offset)
                box = Box(piece.offset, piece.shape)
                # The first rank that holds a piece writes it, so what is replicated is saved once. A rank beyond the
                # end of a small tensor holds an empty box.
                if piece.domain != domain or place in taken or not box.numel:
                    continue
                taken.add(place)
                pieces.setdefault((domain, piece.name), []).append(
                    Piece(file=path, at=at, offset=piece.offset, shape=piece.shape)
                )
                if rank == ranks.rank:
                    my_places[place] = arena_bytes + at
                # Aligned so that the copy in the arena can be viewed as its own type.
                at += _aligned(box.numel * DTYPE_BYTES[piece.dtype], PIECE_ALIGNMENT)
            if at and rank == ranks.rank:
                # Whole pages: the writer writes them past the page cache.
                size = _aligned(at, FILE_ALIGNMENT)
                my_files.append(ArenaFile(path=f"{domain}/{path}", at=arena_bytes, size=size))
                arena_bytes += size
    slots = []
    for piece, tensor in held:
        at_arena = my_places.pop((piece.domain, piece.name, piece.offset), None)
        if at_arena is not None:
            slots.append(Slot(tensor, at_arena))
    return Layout(
        slots=tuple(slots),
        files=tuple(my_files),
        arena_bytes=arena_bytes,
        indexes={f"{domain}/{INDEX}": _index(domain, everybody, pieces) for domain in domains},
    )


def _held(domains: Mapping[str, Tensors]) -> list[tuple[_Held, Tensor]]:
    found = []
    for domain, tensors in domains.items():
        for name, tensor in tensors.items():
            local, box = local_part(tensor)
            piece = _Held(domain, name, dtype_name(tensor.dtype), tuple(tensor.shape), box.offset, box.shape)
            found.append((piece, local.detach()))
    return found


def _index(domain: str, everybody: list[list[_Held]], pieces: Mapping[tuple[str, str], list[Piece]]) -> bytes:
    # Any rank that holds a part of a tensor knows its type and whole shape.
    tensors: dict[str, TensorEntry] = {}
    for piece in (piece for theirs in everybody for piece in theirs):
        if piece.domain == domain and piece.name not in tensors:
            tensors[piece.name] = TensorEntry(
                dtype=piece.dtype, shape=piece.whole, pieces=tuple(pieces.get((domain, piece.name), ()))
            )
    return render_index(TensorIndex(tensors=tensors))


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to
