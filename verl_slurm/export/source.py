"""A verified checkpoint as a stream of whole tensors, with their new type and a count of what is done."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from verl_slurm.dcp.reading import TensorInfo, groups_of, list_tensors, read_domain

__all__ = ["Source", "cast_dtype"]

# Tensors are read in groups of about this many bytes: often enough for a progress bar, seldom enough for a disk.
_GROUP_BYTES = 256 << 20


def cast_dtype(info: TensorInfo, wanted: torch.dtype | None) -> torch.dtype:
    """The type a model's tensor is written in; integers (and everything, with None) stay what they are."""
    return wanted if wanted is not None and info.dtype.is_floating_point else info.dtype


@dataclass
class Source:
    """Called by: export.hf, export.layouts.

    Attributes:
        directory: a verified checkpoint.
        report: told the bytes done so far, as they lie in the checkpoint.
    """

    directory: Path
    report: Callable[[int], None] = lambda _: None
    done: int = 0
    _listed: dict[str, dict[str, TensorInfo]] = field(default_factory=dict)

    def infos(self, domain: str) -> dict[str, TensorInfo]:
        """`list_tensors`, read once."""
        if domain not in self._listed:
            self._listed[domain] = list_tensors(self.directory, domain)
        return self._listed[domain]

    def tensors(
        self, domain: str, names: Iterable[str], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor, in the order of `names`, in type `dtype` (None: as saved)."""
        infos = self.infos(domain)
        for group in groups_of({name: infos[name] for name in names}, _GROUP_BYTES):
            read = read_domain(self.directory, domain, group)
            for name in group:
                # pop: a group and its cast copies need not be in memory together.
                yield name, read.pop(name).to(cast_dtype(infos[name], dtype))
                self.done += infos[name].num_bytes
            self.report(self.done)
