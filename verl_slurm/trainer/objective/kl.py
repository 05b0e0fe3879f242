"""The adaptive coefficient of the KL penalty, over a window of steps. Pure: every update is a new value."""

from dataclasses import dataclass, replace

__all__ = ["AdaptiveKL"]

# Ziegler et al. 2019 (arXiv:1909.08593, section 2.2): e = clip(KL / target - 1, -0.2, 0.2) and
# beta <- beta (1 + K e) with K = 0.1. The mean of a window replaces the single step's KL: one lucky batch
# of a small run must not swing the coefficient.
_MAX_ERROR = 0.2
_GAIN = 0.1


@dataclass(frozen=True, kw_only=True)
class AdaptiveKL:
    """The controller's whole state; a checkpoint keeps `coef` and `window`.

    Attributes:
        coef: the present coefficient, beta. 0 stays 0: the penalty is off.
        target: KL of whole responses to steer to, in nats per sample.
        size: steps in the window.
        window: KL of the last steps, oldest first, at most `size`.
        fixed: the coefficient never changes; the window is still kept.

    Runs at the end of each step.
    """

    coef: float
    target: float
    size: int
    window: tuple[float, ...] = ()
    fixed: bool = False

    def update(self, kl: float) -> "AdaptiveKL":
        """Returns the state after a step whose samples had a mean KL of `kl` nats.

        Raises ValueError for a `kl` that is not finite: it would poison the coefficient permanently.
        """
        if kl != kl or kl in (float("inf"), float("-inf")):
            raise ValueError(f"KL is not finite: {kl}")
        window = (*self.window, kl)[-self.size :]
        if self.fixed:
            return replace(self, window=window)
        error = sum(window) / len(window) / self.target - 1.0
        error = min(max(error, -_MAX_ERROR), _MAX_ERROR)
        return replace(self, coef=self.coef * (1.0 + _GAIN * error), window=window)
