"""Which part of a tensor a rank holds, and what of a saved piece belongs into it. Pure geometry.

A box is (offset, shape) in the whole tensor's coordinates. How a DTensor's placements become a box is torch's
knowledge (`compute_local_shape_and_global_offset`, the same that torch.distributed.checkpoint plans with).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from verl_slurm.checkpoint.format.tensor_index import DTYPE_BYTES, Piece


@dataclass(frozen=True)
class Box:
    """`offset` and `shape` have one number a dimension; a scalar has none."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Overlap:
    """What of a piece goes into a box.

    Attributes:
        skip: bytes of the piece before the rows that are needed.
        rows: shape of those rows as they lie in the file; the first dimension is cut, the others are the piece's.
        source: where in `rows` the wanted elements are.
        target: where in the box they belong.
        whole_rows: both are runs of bytes without gaps.
    """

    skip: int
    rows: tuple[int, ...]
    source: tuple[slice, ...]
    target: tuple[slice, ...]
    whole_rows: bool


def dtype_name(dtype: torch.dtype) -> str:
    """Returns torch's name without `torch.`. TypeError: no checkpoint may hold it."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise TypeError(f"tensors of {dtype} cannot be saved")
    return name


def local_part(tensor: Tensor) -> tuple[Tensor, Box]:
    """Returns this rank's memory of `tensor`, and its box of the whole. TypeError: the memory is no box."""
    # Every rank has a plain one whole.
    if not isinstance(tensor, DTensor):
        return tensor, Box((0,) * tensor.dim(), tuple(tensor.shape))
    local = tensor.to_local()
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    # Some placements give a rank strided parts. Their bytes would be saved under a box that they are not.
    if tuple(shape) != tuple(local.shape):
        raise TypeError(f"a DTensor of {tuple(tensor.shape)} whose local part {tuple(local.shape)} is no box")
    return local, Box(tuple(offset), tuple(shape))


def overlap(piece: Piece, box: Box, element_bytes: int) -> Overlap | None:
    """Returns what of `piece` lies in `box`, or None."""
    # A scalar has no row to cut.
    if not piece.shape:
        return Overlap(0, (), (), (), True) if not box.shape else None
    low = [max(a, b) for a, b in zip(piece.offset, box.offset, strict=True)]
    high = [
        min(a + m, b + n) for a, m, b, n in zip(piece.offset, piece.shape, box.offset, box.shape, strict=True)
    ]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return None
    row_bytes = math.prod(piece.shape[1:]) * element_bytes
    source = [slice(a - o, b - o) for a, b, o in zip(low, high, piece.offset, strict=True)]
    # The rows before `low` are skipped in the file, so `rows` begins there.
    source[0] = slice(0, high[0] - low[0])
    target = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, box.offset, strict=True))
    inner = [b - a for a, b in zip(low[1:], high[1:], strict=True)]
    return Overlap(
        skip=(low[0] - piece.offset[0]) * row_bytes,
        rows=(high[0] - low[0], *piece.shape[1:]),
        source=tuple(source),
        target=target,
        # With whole rows on both sides, file and memory have the same bytes in the same order.
        whole_rows=inner == list(piece.shape[1:]) == list(box.shape[1:]),
    )
