"""How FSDP divides a tensor among ranks, and which bytes of the former parts a new part is made of. Pure.

torch divides a dimension as `torch.chunk` does: all parts have ceil(length / ranks) rows, except that the last ones may
have fewer, or none. 5 rows on 4 ranks: 2, 2, 1, 0.
"""

import math
from collections.abc import Iterator, Sequence


def share(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """Returns begin and end of the rows of `rank`, of `length` on `ranks`."""
    rows = -(-length // ranks)
    return min(rank * rows, length), min((rank + 1) * rows, length)


def pieces(
    shape: Sequence[int], dim: int, before: int, after: int, rank: int
) -> Iterator[tuple[int, int, int]]:
    """Yields the pieces of the part that `rank` of `after` gets, in the order of its bytes: a rank that saved, and the
    start and the number of elements in its part, which is contiguous.

    Args:
        shape: of the whole tensor.
        dim: that is divided, of the former parts and of the new ones.
        before: ranks that saved.
    """
    begin, end = share(shape[dim], after, rank)
    inner = math.prod(shape[dim + 1 :])
    # One round for a tensor that is divided along its first dimension, as FSDP does it unless it is told otherwise.
    for outer in range(math.prod(shape[:dim])):
        for source in range(before):
            first, last = share(shape[dim], before, source)
            low, high = max(begin, first), min(end, last)
            if low < high and inner:
                yield source, (outer * (last - first) + low - first) * inner, (high - low) * inner
