"""Counts what the ledger of a run holds."""

from dataclasses import dataclass

import numpy as np

from verl_slurm.base.keys import Keyring
from verl_slurm.base.paths import RunPaths
from verl_slurm.runtime_state.ledger import Key, records


@dataclass(frozen=True, kw_only=True)
class LedgerStats:
    """What the whole ledger of a run holds.

    Attributes:
        rollouts: samples (rows of `response_mask`, or of the first array where there is none).
        tokens: response tokens (true entries of `response_mask`).
        keys: of all records.
        duplicates: (step, micro_batch) pairs that were recorded more than once; empty when nothing was
            generated twice.
        problems: damage found, one line each.
    """

    records: int
    rollouts: int
    tokens: int
    keys: frozenset[Key]
    duplicates: tuple[Key, ...]
    problems: tuple[str, ...]


def ledger_stats(paths: RunPaths, *, keys: Keyring | None = None) -> LedgerStats:
    """Reads all of it."""
    problems: list[str] = []
    seen: dict[Key, int] = {}
    rollouts = tokens = 0
    # Whatever the heads say: verl's responses count as well.
    for key, head, arrays in records(paths, object, from_step=0, report=problems.append, keys=keys):
        if head is None and not arrays:  # it takes others back
            continue
        seen[key] = seen.get(key, 0) + 1
        mask = arrays.get("response_mask")
        if mask is not None:
            tokens += int(np.count_nonzero(mask))
        lead = mask if mask is not None else next(iter(arrays.values()), np.zeros(0))
        rollouts += int(lead.shape[0]) if lead.ndim else 0
    return LedgerStats(
        records=sum(seen.values()),
        rollouts=rollouts,
        tokens=tokens,
        keys=frozenset(seen),
        duplicates=tuple(sorted(key for key, times in seen.items() if times > 1)),
        problems=tuple(problems),
    )
