"""Reads a verified checkpoint as a stream of whole tensors, converts their type and counts the progress."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verl_slurm.checkpoint.format.tensor_index import INDEX, TensorEntry
from verl_slurm.checkpoint.store.reader import CheckpointReader
from verl_slurm.save.ranks.loader import WholeReader

# Tensors are read in groups of about this many bytes: small enough for a progress bar, large enough for a disk.
_GROUP_BYTES = 256 << 20


def cast_dtype(entry: TensorEntry, wanted: torch.dtype | None) -> torch.dtype:
    """Returns the type for writing a model's tensor; integers (and everything, with None) keep theirs."""
    saved: torch.dtype = getattr(torch, entry.dtype)
    # Integers keep theirs: a bfloat16 cannot hold each of them.
    return wanted if wanted is not None and saved.is_floating_point else saved


def cast_bytes(entry: TensorEntry, wanted: torch.dtype | None) -> int:
    """Returns the bytes of the whole tensor in that type."""
    return math.prod(entry.shape) * cast_dtype(entry, wanted).itemsize


def groups_of(entries: Mapping[str, TensorEntry], limit_bytes: int) -> Iterator[list[str]]:
    """Yields the names in groups of at most `limit_bytes` (a larger tensor is a group of its own), in order."""
    group: list[str] = []
    size = 0
    for name, entry in entries.items():
        if group and size + entry.num_bytes > limit_bytes:
            yield group
            group, size = [], 0
        group.append(name)
        size += entry.num_bytes
    if group:
        yield group


@dataclass
class ExportSource:
    """Reads one verified checkpoint for an export; `report`: told the bytes of it that are done so far."""

    reader: CheckpointReader
    report: Callable[[int], None] = lambda _: None
    done: int = 0
    _readers: dict[str, WholeReader] = field(default_factory=dict)

    def has(self, domain: str) -> bool:
        """Returns whether the checkpoint holds tensors of the domain: it may have been saved in part."""
        return f"{domain}/{INDEX}" in self.reader.entries

    def entries(self, domain: str) -> dict[str, TensorEntry]:
        """Maps each tensor of a domain to type and shape. CheckpointCorrupt: not what was committed."""
        return self._reader(domain).index.tensors

    def tensors(
        self, domain: str, names: Iterable[str], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields name and whole tensor, in the order of `names`, in type `dtype` (None: as saved)."""
        entries = self.entries(domain)
        for group in groups_of({name: entries[name] for name in names}, _GROUP_BYTES):
            read = self._reader(domain).read(group)
            for name in group:
                # pop: a group and its cast copies need not be in memory together.
                yield name, read.pop(name).to(cast_dtype(entries[name], dtype))
                self.done += entries[name].num_bytes
            self.report(self.done)

    def _reader(self, domain: str) -> WholeReader:
        # Kept: an index of 2,200 tensors in 64 pieces each takes two seconds to parse.
        if domain not in self._readers:
            self._readers[domain] = WholeReader(self.reader, domain)
        return self._readers[domain]
