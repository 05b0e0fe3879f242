"""The files of many ranks of one save, written by one process, rank after rank, through the code that ranks save with.

`benchmarks/many_ranks.py` measures what is done with them, and says what the model is.
"""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.tensor import Shard

from tests.builders import runtime_state
from tests.save.parts import contents
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.tensor_index import parse_index, tensor_file
from verl_slurm.checkpoint.store import commit as door
from verl_slurm.runtime_state.codec import encode
from verl_slurm.runtime_state.format import runtime_state_name
from verl_slurm.save.ranks import layout
from verl_slurm.save.ranks.boxes import Box
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.writer.file_sealing import seal_small
from verl_slurm.save.writer.protocol import ArenaFile
from verl_slurm.save.writer.writing import write_and_hash, write_small

COLUMNS = 4
_ROWS = {
    "q": 8192,
    "k": 1024,
    "v": 1024,
    "o": 8192,
    "gate": 28672,
    "up": 28672,
    "down": 8192,
    "n1": 8192,
    "n2": 8192,
}


def shapes(layers: int) -> dict[str, dict[str, int]]:
    """Rows of each tensor, by domain and name."""
    model = {f"layers.{layer}.{name}": rows for layer in range(layers) for name, rows in _ROWS.items()}
    model |= {"embedding": 128256, "norm": 8192, "head": 128256}
    state = {
        f"{role}.{name}.{moment}": rows
        for role in ("actor", "critic")
        for name, rows in model.items()
        for moment in ("exp_avg", "exp_avg_sq")
    }
    return {"actor": dict(model), "critic": dict(model), "optimizer": state}


def box_of(rows: int, rank: int, ranks: int) -> Box:
    """Returns the rows of a tensor that FSDP2 gives a rank."""
    size, offset = Shard.local_shard_size_and_offset(rows, ranks, rank)
    return Box((int(offset) if size else rows, 0), (int(size), COLUMNS))


@contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[None]:
    """Gives `plan_layout` the boxes of `rank` for whole tensors without memory."""
    cuts = {rows: box_of(rows, rank, ranks) for rows in {*_ROWS.values(), 128256}}
    before: Any = vars(layout)["local_part"]
    vars(layout)["local_part"] = lambda tensor: (tensor, cuts[tensor.shape[0]])
    try:
        yield
    finally:
        vars(layout)["local_part"] = before


class _Heard(Exception):
    """What a rank would have told the others first."""


class Alone(Collective):
    """One rank of many, with the others' words made beforehand.

    Args:
        words: of all ranks for each `gather` of something, in order; None: what this rank says is raised.
    """

    def __init__(self, rank: int, ranks: int, words: "list[list[bytes]] | None") -> None:
        self._group, self.rank, self.world_size, self._words = None, rank, ranks, words

    def gather(self, payload: bytes) -> list[bytes]:
        if not payload:
            return [b""] * self.world_size
        if self._words is None:
            raise _Heard(payload)
        return self._words.pop(0)

    def gather_to_first(self, payload: bytes) -> list[bytes]:
        return self.gather(payload) if self.rank == 0 else []

    def share(self, payload: bytes, *, source: int) -> bytes:
        return payload


def domains_of(layers: int) -> dict[str, dict[str, torch.Tensor]]:
    return {
        domain: {name: torch.empty(rows, COLUMNS, device="meta") for name, rows in tensors.items()}
        for domain, tensors in shapes(layers).items()
    }


@contextmanager
def without_fsync() -> Iterator[None]:
    before, os.fsync = os.fsync, lambda _: None  # type: ignore[assignment]
    try:
        yield
    finally:
        os.fsync = before


def write_files(root: Path, ranks: int, layers: int) -> dict[str, Any]:
    """Writes what all ranks write of one save, without fsync; keeps their words below `root`."""
    paths = RunPaths(root / "run")
    paths.root.mkdir(mode=0o700, exist_ok=True)
    staging = door.begin(paths, 1, 0)
    domains = domains_of(layers)
    words = []
    for rank in range(ranks):
        with as_rank(rank, ranks):
            try:
                layout.plan_layout(domains, Alone(rank, ranks, None))
            except _Heard as heard:
                words.append(heard.args[0])
    (root / "layout.msgpack").write_bytes(msgspec.msgpack.encode(words))
    with as_rank(0, ranks):
        indexes = layout.plan_layout(domains, Alone(0, ranks, [words])).indexes
    sizes = _file_sizes(indexes)
    source = mmap.mmap(-1, max(sizes.values()))
    source.write(os.urandom(len(source)))
    said, num_bytes = [], 0
    for rank in range(ranks):
        source[:8] = rank.to_bytes(8, "little")
        files = [
            ArenaFile(path=path, at=0, size=sizes[path])
            for path in (f"{domain}/{tensor_file(rank)}" for domain in domains)
            if path in sizes
        ]
        entries, written = write_and_hash(memoryview(source), files, [str(staging.directory)])
        assert not written[0].error, written[0].error
        # What a rank without a rollout has; in the midst of a step it is larger, and as many files.
        state = runtime_state(rank=rank, world_size=ranks)
        texts = dict(contents(1).texts) | indexes if rank == 0 else {}
        small = seal_small({**texts, runtime_state_name(rank): encode(state)}, None)
        write_small(staging.directory, {entry.path: data for entry, data in small})
        said.append(msgspec.msgpack.encode((*(entry for entry, _ in small), *entries)))
        num_bytes += sum(file.size for file in files)
    (root / "said.msgpack").write_bytes(msgspec.msgpack.encode(said))
    (root / "staging").write_text(staging.directory.name)
    return {
        "files": sum(len(files) for _, _, files in os.walk(staging.directory)),
        "tensor_bytes": num_bytes,
        "said_bytes": sum(map(len, said)),
        "layout_words_bytes": sum(map(len, words)),
        "index_bytes": sum(map(len, indexes.values())),
    }


def _file_sizes(indexes: dict[str, bytes]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for path, data in indexes.items():
        domain = path.split("/")[0]
        for entry in parse_index(data, where=path).tensors.values():
            for piece in entry.without_runs().pieces:
                file = f"{domain}/{piece.file}"
                end = piece.at + 4 * piece.numel
                sizes[file] = max(sizes.get(file, 0), -(-end // 4096) * 4096)
    return sizes
