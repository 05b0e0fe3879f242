"""Who writes which piece of which tensor, on thousands of ranks, and what of it the index says."""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.builders import make_manifest
from tests.save.parts import load_tensors
from verl_slurm.base.errors import ConfigError
from verl_slurm.checkpoint.format.manifest import render, sealed
from verl_slurm.checkpoint.format.specification import MANIFEST, FileEntry
from verl_slurm.checkpoint.format.tensor_index import (
    SHORTEST_RUN,
    Piece,
    TensorIndex,
    parse_index,
    tensor_file,
)
from verl_slurm.checkpoint.store.chunks import entry_of
from verl_slurm.save.ranks import layout, loader
from verl_slurm.save.ranks.boxes import Box, overlap
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.loader import read_whole

pytestmark = pytest.mark.torch

Cut = Callable[[tuple[int, ...], int], Box | None]
"""The box that a rank has of a tensor of this shape; None: it does not have the tensor."""


class Told(Collective):
    """One rank, with the words of all made beforehand; without words it asks for this rank's."""

    def __init__(self, rank: int, words: list[bytes] | None, lists: list[bytes]) -> None:
        self._group, self.rank, self.world_size = None, rank, len(lists)
        self._words, self._lists = words, lists

    def gather(self, payload: bytes) -> list[bytes]:
        if not payload:
            return [b""] * self.world_size
        if self._words is None:
            raise Asked(payload)
        return self._words

    def share(self, payload: bytes, *, source: int) -> bytes:
        return self._lists[source]


class Asked(Exception):
    """What a rank tells all others."""


@dataclass(frozen=True)
class World:
    """Ranks, the tensors of a domain, and how each tensor is cut."""

    ranks: int
    tensors: Mapping[str, tuple[int, ...]]
    cuts: Mapping[str, Cut]

    def words(self) -> tuple[list[bytes], list[bytes]]:
        """What each rank tells of what it holds: its word to all, and its list, where that is asked for."""
        lists, words = [], []
        for rank in range(self.ranks):
            with self.boxes(rank) as domains:
                lists.append(msgspec.msgpack.encode(layout._held(domains)[0]))
        for rank in range(self.ranks):
            with self.boxes(rank) as domains, pytest.raises(Asked) as asked:
                layout.plan_layout(domains, Told(rank, None, lists))
            words.append(asked.value.args[0])
        return words, lists

    def plans(self, ranks: list[int]) -> list[layout.Layout]:
        """The layouts of these ranks."""
        words, lists = self.words()
        found = []
        for rank in ranks:
            with self.boxes(rank) as domains:
                found.append(layout.plan_layout(domains, Told(rank, words, lists)))
        return found

    @contextmanager
    def boxes(self, rank: int) -> Iterator[dict[str, dict[str, torch.Tensor]]]:
        """The tensors that a rank has, whole and without memory; its boxes of them in the place of DTensors'."""
        mine = {name: self.cuts[name](shape, rank) for name, shape in self.tensors.items()}
        named = {name: torch.empty(self.tensors[name], device="meta") for name, box in mine.items() if box}
        cut = {id(tensor): mine[name] for name, tensor in named.items()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layout, "local_part", lambda tensor: (tensor, cut[id(tensor)]))
            yield {"actor": named}


def rows(ranks: int, *, first: int = 0, every: int = 1, axis: int = 0) -> Cut:
    """The cut of FSDP2: along an axis, by so many ranks from `first` on, of which every so many-th has the same."""

    def cut(shape: tuple[int, ...], rank: int) -> Box | None:
        if not first <= rank < first + ranks * every:
            return None
        size = -(-shape[axis] // ranks)
        low = min(shape[axis], (rank - first) // every * size)
        offset, own = [0] * len(shape), list(shape)
        offset[axis], own[axis] = low, min(shape[axis], low + size) - low
        return Box(tuple(offset), tuple(own))

    return cut


def whole(shape: tuple[int, ...], rank: int) -> Box:
    return Box((0,) * len(shape), shape)


def two_axes(dp: int, tp: int, along: int) -> Cut:
    """Tensor parallelism within FSDP2: first cut over `tp` along an axis, then the rows over `dp`."""

    def cut(shape: tuple[int, ...], rank: int) -> Box:
        outer = rows(tp, axis=along)(shape, rank % tp)
        assert outer is not None
        inner = rows(dp)(outer.shape, rank // tp)
        assert inner is not None
        return Box(tuple(a + b for a, b in zip(outer.offset, inner.offset, strict=True)), inner.shape)

    return cut


def fsdp(ranks: int) -> World:
    """A layer whose tensors have as many rows as Llama 3 70B."""
    heights = {"q": 8192, "k": 1024, "gate": 28672, "norm": 8192}
    return World(
        ranks, {name: (rows, 4) for name, rows in heights.items()}, dict.fromkeys(heights, rows(ranks))
    )


def index_of(plan: layout.Layout) -> TensorIndex:
    return parse_index(plan.indexes["actor/index.json"], where="actor")


def test_an_index_and_a_ranks_word_are_as_long_for_2048_ranks_as_for_256() -> None:
    """Both are what every rank receives and reads: bytes of each piece of each rank would be a square."""
    few, many = fsdp(256), fsdp(2048)
    (small,), (large,) = few.plans([0]), many.plans([0])
    assert len(large.indexes["actor/index.json"]) < 1.5 * len(small.indexes["actor/index.json"])
    assert max(map(len, many.words()[0])) < 1.5 * max(map(len, few.words()[0]))
    index = index_of(large)
    assert index.tensors["q"].num_pieces == 2048
    assert len(index.tensors["q"].pieces) <= 3


def test_few_ranks_have_an_index_without_runs() -> None:
    (plan,) = fsdp(SHORTEST_RUN - 1).plans([0])
    assert b"count" not in plan.indexes["actor/index.json"]


def test_an_index_that_no_rank_could_read_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its checkpoints would verify, and nothing could resume from them."""
    monkeypatch.setattr(layout.tensor_index, "MAX_INDEX_BYTES", 500)
    with pytest.raises(ConfigError, match="more pieces than a checkpoint can name"):
        fsdp(20).plans([3])


def plain_plan(world: World) -> tuple[dict[str, set[Piece]], list[list[tuple[str, int]]]]:
    """Piece by piece: rank after rank writes what no lower one holds. Its index, and each rank's (tensor, place)."""
    taken: set[tuple[str, tuple[int, ...]]] = set()
    index: dict[str, set[Piece]] = {name: set() for name in world.tensors}
    written: list[list[tuple[str, int]]] = []
    for rank in range(world.ranks):
        at, mine = 0, []
        for name, shape in world.tensors.items():
            box = world.cuts[name](shape, rank)
            if box is None or not box.numel or (name, box.offset) in taken:
                continue
            taken.add((name, box.offset))
            index[name].add(Piece(file=tensor_file(rank), at=at, offset=box.offset, shape=box.shape))
            mine.append((name, at))
            at += -(-4 * box.numel // 64) * 64
        written.append(mine)
    return index, written


@pytest.mark.parametrize("seed", range(12))
def test_every_piece_is_written_once_by_the_lowest_rank_that_holds_it(seed: int) -> None:
    draw = random.Random(seed)
    dp, tp = draw.choice([(20, 1), (33, 1), (18, 2), (17, 3), (6, 2)])
    ranks = dp * tp
    tensors: dict[str, tuple[int, ...]] = {"scalar": (), "empty": (0, 3)}
    cuts: dict[str, Cut] = {"scalar": whole, "empty": whole}
    for number in range(5):
        name = f"t{number}"
        tensors[name] = tuple(draw.choice([1, 3, 16, 40, 64]) for _ in range(draw.choice([1, 2, 3])))
        kinds: list[Cut] = [whole, rows(ranks), rows(dp, every=tp), two_axes(dp, tp, 0)]
        # A stage of a pipeline: the other ranks do not have it.
        kinds += [rows(ranks // 2), rows(ranks - ranks // 2, first=ranks // 2)]
        kinds += [two_axes(dp, tp, 1)] if len(tensors[name]) > 1 else []
        cuts[name] = draw.choice(kinds)
    world = World(ranks, tensors, cuts)
    index, written = plain_plan(world)
    plans = world.plans(list(range(ranks)))
    for rank, plan in enumerate(plans):
        assert [slot.at for slot in plan.slots] == [at for _, at in written[rank]]
        assert [tuple(slot.tensor.shape) for slot in plan.slots] == [
            tensors[name] for name, _ in written[rank]
        ]
        assert plan.indexes == plans[0].indexes
    found = index_of(plans[0]).tensors
    assert {name: set(entry.without_runs().pieces) for name, entry in found.items()} == index
    # Runs: fewer than one piece for each rank wherever a tensor is cut into many.
    longest = max(found.values(), key=lambda entry: entry.num_pieces)
    if longest.num_pieces > 4 * SHORTEST_RUN:
        assert len(longest.pieces) < longest.num_pieces


# ---- what is loaded from runs


def saved(root: Path, world: World) -> dict[str, torch.Tensor]:
    """Writes a checkpoint of this world; returns its whole tensors."""
    plans = world.plans(list(range(world.ranks)))
    content = {
        name: torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
        for name, shape in world.tensors.items()
    }
    files: dict[str, bytes] = dict(plans[0].indexes)
    for name, entry in index_of(plans[0]).tensors.items():
        for piece in entry.without_runs().pieces:
            path = f"actor/{piece.file}"
            box = tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.shape, strict=True))
            data = content[name][box].contiguous().numpy().tobytes()
            before = files.get(path, b"").ljust(piece.at, b"\0")
            files[path] = before[: piece.at] + data + before[piece.at + len(data) :]
    entries: list[FileEntry] = []
    (root / "actor").mkdir(parents=True)
    for path, data in files.items():
        (root / path).write_bytes(data)
        entries.append(entry_of(path, data))
    manifest = make_manifest(world_size=world.ranks, files=tuple(entries))
    (root / MANIFEST).write_bytes(render(sealed(manifest)))
    return content


class Copies(Collective):
    """Ranks that all say what this one says; some other one holds what this one does not."""

    def __init__(self, ranks: int) -> None:
        self._group, self.rank, self.world_size = None, 0, ranks

    def gather(self, payload: bytes) -> list[bytes]:
        return [payload] * self.world_size


@pytest.mark.parametrize("ranks_now", [40, 7, 100])
def test_any_number_of_ranks_loads_its_rows_from_runs(ranks_now: int, tmp_path: Path) -> None:
    shapes = {"a": (640, 3), "b": (50, 2)}
    content = saved(tmp_path / "ckpt", World(40, shapes, dict.fromkeys(shapes, rows(40))))
    for rank in (0, ranks_now // 2, ranks_now - 1):
        boxes = {name: rows(ranks_now)(shape, rank) for name, shape in shapes.items()}
        for name, tensor in load_boxes(tmp_path / "ckpt", shapes, boxes, ranks_now).items():
            box = boxes[name]
            assert box is not None
            assert torch.equal(tensor, content[name][box.offset[0] :][: box.shape[0]])


def load_boxes(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], boxes: Mapping[str, Box | None], ranks: int
) -> dict[str, torch.Tensor]:
    """What `load_tensors` puts into a rank's boxes of these tensors."""
    live = {name: torch.full(box.shape, -1.0) for name, box in boxes.items() if box}
    described = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    names = {id(tensor): name for name, tensor in described.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "local_part", lambda t: (live[names[id(t)]], boxes[names[id(t)]]))
        load_tensors(directory, {"actor": described}, Copies(ranks))
    return live


def test_whole_tensors_are_read_from_runs_too(tmp_path: Path) -> None:
    world = World(36, {"w": (72, 8)}, {"w": two_axes(18, 2, 1)})
    content = saved(tmp_path / "ckpt", world)
    assert torch.equal(read_whole(tmp_path / "ckpt", "actor")["w"], content["w"])


def test_a_rank_looks_at_the_pieces_around_its_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 1,024 ranks would look at 1,024 pieces of each tensor."""
    (plan,) = fsdp(1024).plans([0])
    entries = index_of(plan).tensors
    boxes = {name: rows(1024)(entry.shape, 1000) for name, entry in entries.items()}
    tensors = {name: torch.zeros(box.shape) for name, box in boxes.items() if box}
    names = {id(tensor): name for name, tensor in tensors.items()}
    looked: list[Any] = []

    def counted(*args: Any) -> Any:
        looked.append(args)
        return overlap(*args)

    monkeypatch.setattr(loader, "overlap", counted)
    monkeypatch.setattr(loader, "local_part", lambda tensor: (tensor, boxes[names[id(tensor)]]))
    parts = list(loader._parts("actor", entries, tensors))
    assert {part.path for part in parts} == {f"actor/{tensor_file(1000)}"}
    assert len(looked) <= 3 * len(entries)
