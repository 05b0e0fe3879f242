"""Prevents a jump of the reward's scale when one reward replaces another. Pure.

Two rewards that agree on quality may still use different numbers: a rule in 0 to 1, a classifier in logits of
-12 to 9. So the scores of the last step under the old reward are kept, and the new reward scores the same
responses. An affine map gives them the old mean and standard deviation. It applies in full at first and then
less and less over the warm start. An affine map with a positive slope changes no order.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

# Beyond this, one of the two rewards is practically constant on the responses, and a ratio means nothing.
_MAX_SCALE = 1e6
_SAME_SCALE = 1e-6


@dataclass(frozen=True)
class Affine:
    """score → scale * score + offset."""

    scale: float = 1.0
    offset: float = 0.0

    def __call__(self, scores: Tensor) -> Tensor:
        """Returns float32 of the same shape; the identity gives the very same bits."""
        # Not scale 1 and offset 0: the way by float64 and back could change a bit.
        if self == IDENTITY:
            return scores
        return (scores.double() * self.scale + self.offset).float()


IDENTITY = Affine()


def matching(
    old: Tensor, new: Tensor, total: Callable[[Sequence[float]], list[float]] = list
) -> Affine | None:
    """Returns the map that gives `new` the mean and the standard deviation of `old`.

    Args:
        old, new: [N], scores of the same responses on this rank; N may be 0.
        total: the sum of each number over all ranks; collective, the same bits on each (`Collective.sum`).

    Returns:
        None without responses. If one of the two hardly varies, only the means are matched.
    """
    first, second = old.double(), new.double()
    # Before any return: a rank without responses takes part, and adds nothing.
    count, old_sum, new_sum = total([float(len(first)), float(first.sum()), float(second.sum())])
    if not count:
        return None
    # Two passes, because sums of squares cancel where the mean is large.
    means = old_sum / count, new_sum / count
    parts = [float(((scores - mean) ** 2).sum()) for scores, mean in zip((first, second), means, strict=True)]
    old_std, new_std = (math.sqrt(part / count) for part in total(parts))
    scale = old_std / new_std if new_std else 0.0
    # One of the two hardly varies, so a factor would be noise: the means alone are matched.
    if not 1 / _MAX_SCALE <= scale <= _MAX_SCALE:
        scale = 1.0
    return Affine(scale, means[0] - scale * means[1])


def blended(full: Affine, done: int, steps: int) -> Affine:
    """Returns the rest of `full` after `done` of `steps` steps: all of it at first, nothing at the end.

    The scale changes by the same factor each step, and the mean moves in proportion to it.
    """
    # Exactly the identity at the end, and for a reward without a warm start.
    if done >= steps:
        return IDENTITY
    left = 1.0 - done / steps
    # By equal factors: equal pieces of the difference jump in the first step where the scales are far apart.
    scale = full.scale**left
    # The part of the way from the identity, measured by the scale; by the steps if the scale does not change.
    part = (1.0 - scale) / (1.0 - full.scale) if abs(1.0 - full.scale) > _SAME_SCALE else left
    return Affine(1.0 + (full.scale - 1.0) * part, full.offset * part)
