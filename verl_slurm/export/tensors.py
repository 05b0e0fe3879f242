"""Which tensors a checkpoint holds: `python -m verl_slurm.export.tensors DIR DOMAIN...`, one JSON object.

Domain → dtype → [tensors, elements, bytes]. Started by `checkpoint.describe`, which has held the files that
describe the tensors to their digests; no tensor is read.
"""

import sys
from pathlib import Path

import msgspec

from verl_slurm.dcp.reading import list_tensors

__all__ = ["count", "main"]


def count(directory: Path, domains: list[str]) -> dict[str, dict[str, list[int]]]:
    """The counts of each domain by the type of its tensors."""
    counts: dict[str, dict[str, list[int]]] = {}
    for domain in domains:
        of_domain = counts.setdefault(domain, {})
        for info in list_tensors(directory, domain).values():
            row = of_domain.setdefault(str(info.dtype).removeprefix("torch."), [0, 0, 0])
            for index, value in enumerate((1, info.num_elements, info.num_bytes)):
                row[index] += value
    return counts


def main(argv: list[str] | None = None) -> int:
    """Print the counts."""
    directory, *domains = sys.argv[1:] if argv is None else argv
    sys.stdout.buffer.write(msgspec.json.encode(count(Path(directory), domains)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
