"""Decides which prompts train and which are held out. Pure; the same on every machine and for every seed.

The prompt's text alone decides. So a prompt that occurs twice in the data is on one side both times, and an added line
moves no other. A held-out prompt never trains, evaluated or not: switching the evaluation on or off changes nothing of
the training.
"""

import hashlib
from collections.abc import Sequence

__all__ = ["Row", "Sides", "drop_shared", "first_by_digest", "split_by_digest"]

Row = tuple[str, str]
"""Prompt and answer."""
Sides = tuple[list[Row], list[Row]]
"""The rows to train on and the held-out rows, each in the given order."""


def split_by_digest(rows: Sequence[Row], fraction: float) -> Sides:
    """Holds out about `fraction` (0 to 1) of the different prompts."""
    limit = fraction * 2.0**64
    chosen = {prompt for prompt, _ in rows if _number(prompt) < limit}
    return [row for row in rows if row[0] not in chosen], [row for row in rows if row[0] in chosen]


def drop_shared(rows: Sequence[Row], held_out: Sequence[Row]) -> list[Row]:
    """Returns the rows whose prompt is not among the held-out ones."""
    chosen = {prompt for prompt, _ in held_out}
    return [row for row in rows if row[0] not in chosen]


def first_by_digest(rows: Sequence[Row], most: int) -> list[Row]:
    """Returns at most `most` different prompts, in the order of their digests: a fair share of a sorted file."""
    different = {prompt: (prompt, answer) for prompt, answer in reversed(rows)}  # the first of each stays
    return sorted(different.values(), key=lambda row: (_number(row[0]), row[0]))[:most]


def _number(prompt: str) -> int:
    """Returns the first 64 bits of the SHA-256 of the text."""
    return int.from_bytes(hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).digest()[:8], "big")
