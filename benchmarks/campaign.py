"""What a campaign found, as rows in a file, and the rows as a table for `docs/campaign.md`.

`VERL_SLURM_CAMPAIGN_RESULTS=FILE make campaign ...` writes one row for each case that passed (none for one that failed:
the command fails, too), in the place of an older row of the same case. `python -m benchmarks.campaign FILE` prints the
table.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from verl_slurm.base.files import write_file


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One case, passed: weights and rollouts equal to the twin's bit for bit, nothing generated twice.

    Called by: tests/slurm_cluster/test_campaign.py.
    """

    case: str
    seed: int
    interruptions: dict[str, int]
    """By kind."""
    aside: dict[str, int]
    """What came beside them and interrupted nothing: a save, a suspension."""
    steps: int
    starts: int
    """Times that the ranks were started."""
    restarts: int
    """Times that Slurm started the job again."""
    rollouts: int
    """In the ledger at the end: of the run, and of its twin."""
    tokens: int
    minutes: float
    """Of wall time, the twin's beside it."""
    twin_minutes: float
    load: float
    """The machine's mean number of runnable processes in the last 15 minutes, ours included."""


def rows(path: Path) -> list[Row]:
    """The rows of a file; none where there is no such file."""
    return msgspec.json.decode(path.read_bytes(), type=list[Row]) if path.exists() else []


def add(path: Path, row: Row) -> None:
    """Write a row in the place of the older one of that case, or behind the others."""
    found = {one.case: one for one in rows(path)}
    found[row.case] = row
    write_file(path, msgspec.json.format(msgspec.json.encode(list(found.values()))) + b"\n")


def table(found: Sequence[Row]) -> str:
    """Markdown, a line for each row and one for the sums."""
    head = ("case", "seed", "interruptions; beside them", "steps", "starts", "rollouts", "tokens", "minutes")
    sums = (
        f"{len(found)} cases",
        "",
        _kinds(_sum([row.interruptions for row in found]), _sum([row.aside for row in found])),
        "",
        str(sum(row.starts for row in found)),
        f"{sum(row.rollouts for row in found):,}",
        f"{sum(row.tokens for row in found):,}",
        f"{sum(row.minutes for row in found):.0f}",
    )
    first, *others = [f"| {' | '.join(cells)} |\n" for cells in (head, *map(_cells, found), sums)]
    return "".join([first, f"|{'---|' * len(head)}\n", *others])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        f"`{row.case}`",
        str(row.seed),
        _kinds(row.interruptions, row.aside),
        str(row.steps),
        str(row.starts),
        f"{row.rollouts:,}",
        f"{row.tokens:,}",
        f"{row.minutes:.1f}",
    )


def _sum(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    kinds = dict.fromkeys(kind for one in counts for kind in one)
    return {kind: sum(one.get(kind, 0) for one in counts) for kind in kinds}


def _kinds(interruptions: dict[str, int], aside: dict[str, int]) -> str:
    """As in `3: kill_rank, 2 requeue; save`: how many interruptions, which, and what came beside them."""
    lists = [
        ", ".join(f"{number} {kind}" if number > 1 else kind for kind, number in sorted(counts.items()))
        for counts in (interruptions, aside)
        if counts
    ]
    return f"{sum(interruptions.values())}: {'; '.join(lists)}"


if __name__ == "__main__":
    print(table(rows(Path(sys.argv[1]))), end="")
