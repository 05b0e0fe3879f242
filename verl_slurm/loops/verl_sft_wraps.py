"""Wraps two members of verl's SFT trainer: its worker and its checkpoint handler. Without verl.

This avoids a trap of verl's. A data loader's state saved at the end of an epoch is that of an exhausted iterator: a run
resumed from it trains an epoch of no steps, and exits with 0. So it is not loaded there: the next epoch begins with a
fresh one, as in a run that was never interrupted.
"""

from collections.abc import Callable, Mapping
from typing import Any

from verl_slurm.base.errors import CheckpointCorrupt

__all__ = ["WatchedHandler", "WatchedWorker"]


class WatchedWorker:
    """verl's `TrainingWorker`, with a call after every step.

    Args:
        inner: verl's.
        after_step: takes the result of `train_batch`.
    """

    def __init__(self, inner: Any, after_step: Callable[[Any], None]) -> None:
        self._inner, self._after_step = inner, after_step

    def train_batch(self, *args: Any, **words: Any) -> Any:
        # The call comes after verl's own: a step that raises is not reported as done.
        output = self._inner.train_batch(*args, **words)
        self._after_step(output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _KeptBack:
    """Stands in for a data loader. It passes its state on, or not, once it is known where the run resumes."""

    state: Mapping[str, Any] | None = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = state


class WatchedHandler:
    """verl's `CheckpointHandler`, which loads the data loader's state where it is useful, and wraps our save around its
    own.

    Args:
        inner: verl's.
        steps_per_epoch: of this run's data.
        save: wraps a save: takes the step, and a function that writes it.
    """

    def __init__(
        self, inner: Any, *, steps_per_epoch: int, save: Callable[[int, Callable[[], None]], None]
    ) -> None:
        self._inner, self._steps_per_epoch, self._save = inner, steps_per_epoch, save

    def load_checkpoint(self) -> int:
        """Loads as verl does; returns the step.

        Raises:
            CheckpointCorrupt: it is from within an epoch and lacks the place in the data: verl would begin the epoch
                again, and report that in its log only.
        """
        # verl loads the data loader's state unconditionally; the stand-in holds it until the step is known.
        loader, kept = self._inner.train_dataloader, _KeptBack()
        self._inner.train_dataloader = kept
        try:
            step = int(self._inner.load_checkpoint())
        finally:
            # Also after an error: verl's trainer goes on to use the same object.
            self._inner.train_dataloader = loader
        if step % self._steps_per_epoch == 0:
            return step  # an exhausted iterator's: the next epoch begins afresh
        if kept.state is None:
            raise CheckpointCorrupt(
                "the checkpoint does not say where in the data it is from",
                where=self._inner.resume_from_path or self._inner.default_local_dir,
                found=f"step {step}, and no data_*.pt",
                remedy="resume from an older one, or from another run's",
            )
        loader.load_state_dict(kept.state)
        return step

    def save_checkpoint(self, step: int) -> None:
        """Collective."""
        # Our save decides whether verl's writes at all: without room it is not begun.
        self._save(step, lambda: self._inner.save_checkpoint(step=step))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
