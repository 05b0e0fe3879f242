"""Which rank writes which piece of which tensor, and where: worked out once, the same at every save.

Every piece is written by one rank, the lowest that holds it. The tensors are those of the running training, and they
stay where they are (FSDP2 and AdamW change them in place), so a save needs no state dict, no plan and no word between
the ranks; it only copies.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
from torch import Tensor

from verl_slurm.base.errors import ConfigError
from verl_slurm.checkpoint.format import tensor_index
from verl_slurm.save.ranks.boxes import Box, dtype_name, local_part
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.tensors import Tensors
from verl_slurm.save.writer.protocol import ArenaFile

IntArray = np.ndarray[Any, np.dtype[np.int64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]
Size = TypeVar("Size", int, IntArray)

_Name = tuple[str, str]
"""Domain and tensor."""


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
    """A tensor of which a rank holds a box."""

    domain: str
    name: str
    dtype: str
    whole: tuple[int, ...]
    cut: int
    """Which of the rank's boxes (`_Word.boxes`)."""


class _Word(msgspec.Struct, frozen=True, array_like=True):
    """What each rank tells all others."""

    # A rank cuts hundreds of tensors in a few ways, and the ranks of a pipeline's stage have the same tensors. With a
    # list of its own from each, 10,000 ranks would hold gigabytes.
    held: bytes
    """SHA-256 of its list of `_Held`."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class _Group:
    """Ranks that hold the same tensors.

    Attributes:
        ranks: [R], ascending.
        boxes: one array for each cut, [R, 2, D]: offset and shape in D dimensions.
    """

    ranks: IntArray
    held: list[_Held]
    boxes: list[IntArray]


@dataclass(frozen=True)
class _Writers:
    """The ranks that write the pieces of a tensor, sorted so that neighbours along `axis` follow each other.

    Attributes:
        ranks: [P].
        boxes: [P, 2, D], as in a group.
        places: [P], in the groups' ranks one after the other.
        written: whether each of those ranks writes, [R of all groups].
        follow: [P - 1], whether the next piece has this one's shape and begins where it ends along `axis`, on a higher
            rank.
        steps: [P - 1], from one's rank to the next one's.
    """

    ranks: IntArray
    boxes: IntArray
    axis: int
    places: IntArray
    written: BoolArray
    follow: BoolArray
    steps: IntArray


def plan_layout(domains: Mapping[str, Tensors], ranks: Collective) -> Layout:
    """Agrees on who writes what. Collective. A tensor may be on some ranks only (a pipeline's stages).

    Raises:
        RanksFailed: a tensor is of a type, or sharded in a way, that cannot be saved.
        ConfigError: an index would be larger than readers take.
    """
    # Together: a type that cannot be saved may be on one stage of a pipeline alone.
    held, boxes, tensors = ranks.together("laying out the checkpoint", lambda: _held(domains))
    groups = _groups(held, boxes, ranks)
    # From here on each rank computes the same plan from the same lists; nothing more is exchanged.
    pieces, places, sizes = _placed(groups, ranks.rank)
    my_files: list[ArenaFile] = []
    begins: dict[str, int] = {}
    arena_bytes = 0
    for domain in domains:
        # Whole pages: the writer writes them past the page cache.
        size = _aligned(sizes.get(domain, 0), tensor_index.FILE_ALIGNMENT)
        begins[domain] = arena_bytes
        if size:
            path = f"{domain}/{tensor_index.tensor_file(ranks.rank)}"
            my_files.append(ArenaFile(path=path, at=arena_bytes, size=size))
        arena_bytes += size
    return Layout(
        slots=tuple(
            Slot(tensor, begins[one.domain] + places[one.domain, one.name])
            for one, tensor in zip(held, tensors, strict=True)
            if (one.domain, one.name) in places
        ),
        files=tuple(my_files),
        arena_bytes=arena_bytes,
        indexes={f"{domain}/{tensor_index.INDEX}": _index(domain, groups, pieces) for domain in domains},
    )


def _held(
    domains: Mapping[str, Tensors],
) -> tuple[list[_Held], list[tuple[tuple[int, ...], tuple[int, ...]]], list[Tensor]]:
    cuts: dict[tuple[tuple[int, ...], Box], int] = {}
    held, tensors = [], []
    for domain, named in domains.items():
        for name, tensor in named.items():
            local, box = local_part(tensor)
            whole = tuple(tensor.shape)
            # By the whole's shape, too: tensors of two shapes may have the same box on some ranks and not on others.
            cut = cuts.setdefault((whole, box), len(cuts))
            held.append(_Held(domain, name, dtype_name(tensor.dtype), whole, cut))
            tensors.append(local.detach())
    return held, [(box.offset, box.shape) for _, box in cuts], tensors


def _groups(
    held: list[_Held], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], ranks: Collective
) -> list[_Group]:
    """Exchanges what is held; the groups are ordered by their first rank."""
    mine = msgspec.msgpack.encode(held)
    word = _Word(hashlib.sha256(mine).digest(), boxes)
    words = [msgspec.msgpack.decode(part, type=_Word) for part in ranks.gather(msgspec.msgpack.encode(word))]
    members: dict[bytes, list[int]] = {}
    for rank, theirs in enumerate(words):
        members.setdefault(theirs.held, []).append(rank)
    groups = []
    for those in members.values():
        told = msgspec.msgpack.decode(ranks.share(mine, source=those[0]), type=list[_Held])
        cuts = zip(*(words[rank].boxes for rank in those), strict=True)
        groups.append(_Group(np.array(those), told, [np.array(cut, dtype=np.int64) for cut in cuts]))
    return groups


def _placed(
    groups: list[_Group], rank: int
) -> tuple[dict[_Name, list[tensor_index.Piece]], dict[_Name, int], dict[str, int]]:
    """Places every piece of every rank.

    Returns:
        The pieces of each tensor; the bytes from the start of its file at which `rank` writes a tensor, of those that
        it writes; and the bytes of its files.
    """
    holders: dict[_Name, list[tuple[int, int]]] = {}
    for number, group in enumerate(groups):
        for one in group.held:
            holders.setdefault((one.domain, one.name), []).append((number, one.cut))
    known: dict[tuple[tuple[int, int], ...], _Writers] = {}
    waiting: dict[_Name, list[IntArray]] = {}
    pieces: dict[_Name, list[tensor_index.Piece]] = {}
    mine: dict[_Name, int] = {}
    sizes: dict[str, int] = {}
    for number, group in enumerate(groups):
        here = int(np.searchsorted(group.ranks, rank))
        is_mine = here < len(group.ranks) and group.ranks[here] == rank
        filled: dict[str, IntArray] = {}
        for one in group.held:
            name = (one.domain, one.name)
            who = tuple(holders[name])
            if who not in known:
                known[who] = _writers([(groups[g], groups[g].boxes[cut]) for g, cut in who])
            writers = known[who]
            at = filled.setdefault(one.domain, np.zeros(len(group.ranks), dtype=np.int64))
            # The part of all holders that this group is.
            begin = sum(len(groups[g].ranks) for g, _ in who if g < number)
            written = writers.written[begin : begin + len(group.ranks)]
            if is_mine and written[here]:
                mine[name] = int(at[here])
            waiting.setdefault(name, []).append(at.copy())
            if len(waiting[name]) == len(who):
                pieces[name] = _pieces(writers, np.concatenate(waiting.pop(name)))
            # Aligned so that the copy in the arena can be viewed as its own type.
            num_bytes = group.boxes[one.cut][:, 1].prod(axis=1) * tensor_index.DTYPE_BYTES[one.dtype]
            at += np.where(written, _aligned(num_bytes, tensor_index.PIECE_ALIGNMENT), 0)
        if is_mine:
            sizes = {domain: int(at[here]) for domain, at in filled.items()}
    return pieces, mine, sizes


def _writers(holders: list[tuple[_Group, IntArray]]) -> _Writers:
    """Chooses who writes a tensor's pieces: the first rank that holds one; `holders` have boxes of it."""
    ranks = np.concatenate([group.ranks for group, _ in holders])
    boxes = np.concatenate([boxes for _, boxes in holders])
    # By rank: what is replicated is saved once, by the first.
    # A rank beyond the end of a small tensor holds an empty box.
    order = np.argsort(ranks)
    order = order[boxes[order, 1].prod(axis=1) > 0]
    offsets = boxes[order, 0]
    axis = 0
    if not offsets.shape[1]:
        order = order[:1]
    elif len(order):
        offsets, first = np.unique(offsets, axis=0, return_index=True)
        # Along the dimension with the most cuts the runs are longest.
        axis = int(np.argmax([len(np.unique(column)) for column in offsets.T]))
        others = [offsets[:, other] for other in reversed(range(offsets.shape[1])) if other != axis]
        order = order[first][np.lexsort((offsets[:, axis], *others))]
    written = np.zeros(len(ranks), dtype=bool)
    written[order] = True
    ranks, boxes = ranks[order], boxes[order]
    ahead = boxes[:-1, 0].copy()
    if ahead.shape[1]:
        ahead[:, axis] += boxes[:-1, 1, axis]
    steps = np.diff(ranks)
    follow = (boxes[1:, 0] == ahead).all(axis=1) & (boxes[1:, 1] == boxes[:-1, 1]).all(axis=1) & (steps > 0)
    return _Writers(ranks, boxes, axis, order, written, follow, steps)


def _pieces(writers: _Writers, at: IntArray) -> list[tensor_index.Piece]:
    """Returns a tensor's pieces, runs put together, by rank.

    `at`: where each rank that holds it would write it, [R of all groups].
    """
    at = at[writers.places]
    count = len(at)
    joined = writers.follow & (at[1:] == at[:-1])
    # A run ends where the next piece does not follow, or comes from a rank at another distance.
    breaks = np.flatnonzero((joined[1:] != joined[:-1]) | (writers.steps[1:] != writers.steps[:-1])) + 1
    found = []
    start = 0
    while start < count:
        end = start + 1
        if start < count - 1 and joined[start]:
            later = int(np.searchsorted(breaks, start, side="right"))
            end = (int(breaks[later]) if later < len(breaks) else count - 1) + 1
        if end - start < tensor_index.SHORTEST_RUN:
            found += [_piece(writers, at, number) for number in range(start, end)]
        else:
            run = _piece(writers, at, start)
            every = int(writers.steps[start])
            found.append(msgspec.structs.replace(run, count=end - start, every=every, axis=writers.axis))
        start = end
    return sorted(found, key=lambda piece: (tensor_index.rank_of(piece.file), piece.at))


def _piece(writers: _Writers, at: IntArray, number: int) -> tensor_index.Piece:
    offset, shape = writers.boxes[number].tolist()
    return tensor_index.Piece(
        file=tensor_index.tensor_file(int(writers.ranks[number])),
        at=int(at[number]),
        offset=tuple(offset),
        shape=tuple(shape),
    )


def _index(domain: str, groups: list[_Group], pieces: Mapping[_Name, list[tensor_index.Piece]]) -> bytes:
    # Any rank that holds a part of a tensor knows its type and whole shape.
    tensors: dict[str, tensor_index.TensorEntry] = {}
    for one in (one for group in groups for one in group.held):
        if one.domain == domain and one.name not in tensors:
            mine = tuple(pieces[domain, one.name])
            tensors[one.name] = tensor_index.TensorEntry(dtype=one.dtype, shape=one.whole, pieces=mine)
    data = tensor_index.render_index(tensor_index.TensorIndex(tensors=tensors))
    # Every rank has the same index, so all refuse. Without this, checkpoints would verify that nothing can load.
    if len(data) > tensor_index.MAX_INDEX_BYTES:
        raise ConfigError(
            f"the ranks cut the tensors of {domain} into more pieces than a checkpoint can name",
            where="distributed",
            found=f"an index of {len(data)} bytes",
            expected=f"at most {tensor_index.MAX_INDEX_BYTES}",
            remedy="cut them less: distributed.tp_size, distributed.dp_size",
        )
    return data


def _aligned(size: Size, to: int) -> Size:
    return -(-size // to) * to
