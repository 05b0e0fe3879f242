"""No jump of the reward's scale where one reward takes over from another. Pure.

Two rewards that agree on what is good may still speak in other numbers: a rule in 0 to 1, a classifier in logits of
-12 to 9. A critic, a KL coefficient and a clip range that were in balance with the one are not with the other. So the
scores of the last step under the old reward are kept; the new one scores the same responses, and the affine map that
gives them the old mean and standard deviation is applied to all its scores, first in full and then, over the warm
start's steps, less and less. An affine map with a positive slope changes no order: what is better stays better.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["IDENTITY", "Affine", "blended", "matching"]

# Beyond, one of the two rewards is as good as constant on the responses, and a ratio says nothing.
_MAX_SCALE = 1e6
_SAME_SCALE = 1e-6


@dataclass(frozen=True)
class Affine:
    """score → scale * score + offset."""

    scale: float = 1.0
    offset: float = 0.0

    def __call__(self, scores: Tensor) -> Tensor:
        """float32 of the same shape; the identity gives the very same bits."""
        if self == IDENTITY:
            return scores
        return (scores.double() * self.scale + self.offset).float()


IDENTITY = Affine()


def matching(
    old: Tensor, new: Tensor, total: Callable[[Sequence[float]], list[float]] = list
) -> Affine | None:
    """The map that gives `new` the mean and the standard deviation of `old`.

    Args:
        old, new: [N], scores of the same responses on this rank; N may be 0.
        total: the sum of each number over all ranks; collective, the same bits on each (`Collective.sum`).

    Returns:
        None where there are no responses. Where one of the two does not vary at all, or hardly, only the means are
        matched.
    """
    first, second = old.double(), new.double()
    count, old_sum, new_sum = total([float(len(first)), float(first.sum()), float(second.sum())])
    if not count:
        return None
    # In two passes: sums of squares cancel where the mean is large.
    means = old_sum / count, new_sum / count
    parts = [float(((scores - mean) ** 2).sum()) for scores, mean in zip((first, second), means, strict=True)]
    old_std, new_std = (math.sqrt(part / count) for part in total(parts))
    scale = old_std / new_std if new_std else 0.0
    if not 1 / _MAX_SCALE <= scale <= _MAX_SCALE:
        scale = 1.0
    return Affine(scale, means[0] - scale * means[1])


def blended(full: Affine, done: int, steps: int) -> Affine:
    """What is left of `full` after `done` of `steps` steps: all at first, nothing at the end.

    The scale changes by the same factor each step, and the mean moves in proportion to it: where the rewards' scales
    are 500 apart, equal pieces of the difference would be a jump of 50 in the first of ten steps.
    """
    if done >= steps:
        return IDENTITY
    left = 1.0 - done / steps
    scale = full.scale**left
    # Of the way from the identity, by the scale; where there is none to go, by the steps.
    part = (1.0 - scale) / (1.0 - full.scale) if abs(1.0 - full.scale) > _SAME_SCALE else left
    return Affine(1.0 + (full.scale - 1.0) * part, full.offset * part)
