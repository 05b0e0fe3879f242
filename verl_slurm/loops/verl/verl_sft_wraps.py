"""Puts our functions around those of verl's SFT worker and of its checkpoint handler. Without verl.

This avoids a trap of verl's. A data loader's state saved at the end of an epoch is that of an exhausted iterator: a run
resumed from it trains an epoch of no steps, and exits with 0. So it is not loaded there: the next epoch begins with a
fresh one, as in a run that was never interrupted.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from verl_slurm.base.errors import CheckpointCorrupt


def watch_steps(
    worker: Any, after_step: Callable[[Any], None], after_evaluated: Callable[[], None] = lambda: None
) -> None:
    """Has verl's `TrainingWorker` call `after_step` with the result of each `train_batch`, and `after_evaluated` after
    each `infer_batch`, of which a validation consists.
    """
    train_batch, infer_batch = worker.train_batch, worker.infer_batch

    def train_and_tell(*args: Any, **words: Any) -> Any:
        # The call comes after verl's own: a step that raises is not reported as done.
        output = train_batch(*args, **words)
        after_step(output)
        return output

    def infer_and_tell(*args: Any, **words: Any) -> Any:
        output = infer_batch(*args, **words)
        after_evaluated()
        return output

    worker.train_batch, worker.infer_batch = train_and_tell, infer_and_tell


def watch_checkpoints(
    handler: Any, *, steps_per_epoch: int, save: Callable[[int, Callable[[], None]], None]
) -> None:
    """Has verl's `CheckpointHandler` load the data loader's state where it is useful, and our save around its own.

    Args:
        save: takes the step, and a function that writes it. It decides whether verl writes at all.

    `load_checkpoint` then raises CheckpointCorrupt for one from within an epoch that lacks the place in the data.
    """
    load, write = handler.load_checkpoint, handler.save_checkpoint

    def load_checkpoint() -> int:
        # verl loads the data loader's state unconditionally; the stand-in holds it until the step is known.
        loader, held = handler.train_dataloader, list[Any]()
        handler.train_dataloader = SimpleNamespace(load_state_dict=held.append)
        try:
            step = int(load())
        finally:
            # Also after an error: verl's trainer goes on to use the same object.
            handler.train_dataloader = loader
        if step % steps_per_epoch == 0:
            return step  # an exhausted iterator's: the next epoch begins afresh
        # verl would begin the epoch again, and report that in its log only.
        if not held:
            raise CheckpointCorrupt(
                "the checkpoint does not say where in the data it is from",
                where=handler.resume_from_path or handler.default_local_dir,
                found=f"step {step}, and no data_*.pt",
                remedy="resume from an older one, or from another run's",
            )
        loader.load_state_dict(held[0])
        return step

    def save_checkpoint(step: int) -> None:
        save(step, lambda: write(step=step))

    handler.load_checkpoint, handler.save_checkpoint = load_checkpoint, save_checkpoint
