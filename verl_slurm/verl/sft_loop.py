"""verl's own SFT trainer, served: it saves at the end of the running step when asked, and what it saves is committed.

`SFTTrainer` is subclassed and two of the things it holds are wrapped: its `training_client`, whose `train_batch` returns
when a step is done, and its `ckpt_handler`, which writes and reads checkpoints. Everything else is verl's own code, the
order of a step included: validation and saving come behind `train_batch`, so what is decided there they obey.

Two traps of verl are closed here. A data loader's state that was saved at the end of an epoch is that of an exhausted
iterator: a run resumed from it trains an epoch of no steps, and exits with 0. So it is not loaded there: the next epoch
begins with a fresh one, as it does in a run that was never interrupted. And no exit is believed: a run is finished when
its last step is done and committed.
"""

import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from verl.trainer.sft_trainer import SFTTrainer
from verl.utils import tensordict_utils

from verl_slurm.errors import ConfigError, VerlSlurmError
from verl_slurm.wire.stopping import Order

__all__ = ["Saves", "ServedSFT", "Service", "Watched"]

Numbers = dict[str, float]


class Service(Protocol):
    """What the trainer needs of whoever serves it. Called by: `ServedSFT`; every method on every rank alike."""

    def step_done(self, step: int, metrics: Numbers) -> Order | None:
        """A step is done; what all ranks do now."""

    def make_room(self, step: int) -> bool:
        """Whether a periodic save may begin: no save can succeed where there is no room."""

    def commit(self, step: int, order: Order | None, metrics: Numbers) -> None:
        """What verl has written for `step` becomes a checkpoint."""


class Watched:
    """verl's `TrainingWorker`, with a word after every step. Called by: `ServedSFT`.

    Args:
        inner: verl's.
        after_step: takes what `train_batch` returned.
    """

    def __init__(self, inner: Any, after_step: Callable[[Any], None]) -> None:
        self._inner, self._after_step = inner, after_step

    def train_batch(self, *args: Any, **words: Any) -> Any:
        output = self._inner.train_batch(*args, **words)
        self._after_step(output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _AtAnEpochsEnd:
    """Stands in for a data loader that is to begin its next epoch afresh: it takes no state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        del state


class Saves:
    """verl's `CheckpointHandler`, with a commit after every save. Called by: `ServedSFT`.

    Args:
        inner: verl's; it writes into this incarnation's work directory.
        steps_per_epoch: of this run's data.
        resume_step: what it resumes from; 0: from the beginning.
        save: wraps a save of a step: takes the step and what writes it.
    """

    def __init__(
        self,
        inner: Any,
        *,
        steps_per_epoch: int,
        resume_step: int,
        save: Callable[[int, Callable[[], None]], None],
    ) -> None:
        self._inner, self._save = inner, save
        self._at_an_epochs_end = resume_step > 0 and resume_step % steps_per_epoch == 0

    def load_checkpoint(self) -> int:
        """As verl's, and at an epoch's end without the data loader's state."""
        if not self._at_an_epochs_end:
            return int(self._inner.load_checkpoint())
        loader = self._inner.train_dataloader
        self._inner.train_dataloader = _AtAnEpochsEnd()
        try:
            return int(self._inner.load_checkpoint())
        finally:
            self._inner.train_dataloader = loader

    def save_checkpoint(self, step: int) -> None:
        """As verl's, and then a commit. Collective."""
        self._save(step, lambda: self._inner.save_checkpoint(step=step))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class ServedSFT(SFTTrainer):  # type: ignore[misc]  # verl has no types
    """The trainer of one rank. Called by: verl.sft.

    Args:
        config: verl's own, whole.
        service: who is told, asked and given what was saved.
        resume_step: of the checkpoint that `config.trainer.resume_from_path` names; 0: from the beginning.

    Attributes:
        step: the last one that is done.
        total: the last one that there is.
        order: why it left early; None: it did not.

    Raises:
        ConfigError: the data ends before `trainer.total_training_steps`.
    """

    def __init__(self, config: Any, service: Service, resume_step: int) -> None:
        self._service, self._expected, self.step = service, resume_step, resume_step
        self.order: Order | None = None
        self._metrics: Numbers = {}
        self._extra_save: Order | None = None
        _seed(int(config.trainer.seed))
        super().__init__(config=config)
        self.total = int(self.total_training_steps)
        if self.resume_global_step != resume_step:
            raise VerlSlurmError(
                "verl did not resume from where it was told to",
                where=config.trainer.resume_from_path,
                found=f"step {self.resume_global_step}",
                expected=f"step {resume_step}",
            )
        if self.resume_global_step == 0:
            # As verl leaves it, every process draws its own; here the same ones in every life of the run.
            _seed(int(config.trainer.seed) + int(self.rank))
        ends = self.steps_per_epoch * int(config.trainer.total_epochs)
        if ends < self.total:
            raise ConfigError(
                "the data ends before the last step",
                where="verl: trainer.total_training_steps",
                found=f"{self.total} steps, and {ends} in trainer.total_epochs={config.trainer.total_epochs}",
                expected="at least as many in all epochs",
                remedy="raise trainer.total_epochs, or lower trainer.total_training_steps",
            )
        self._own_save_freq = self.save_freq

    @property
    def is_done(self) -> bool:
        return self.step >= self.total

    def _build_engine(self) -> None:
        super()._build_engine()
        self.training_client = Watched(self.training_client, self._step_is_done)

    def _build_ckpt_handler(self) -> None:
        super()._build_ckpt_handler()
        self.ckpt_handler = Saves(
            self.ckpt_handler,
            steps_per_epoch=self.steps_per_epoch,
            resume_step=self._expected,
            save=self._save,
        )

    def fit(self) -> None:
        """Train to the last step, or to the end of the one in which a request to stop is heard."""
        if not self.is_done:  # verl would train one step more
            super().fit()

    def _step_is_done(self, output: Any) -> None:
        """The weights are those of the next step's beginning; metrics, validation and saving follow in `fit`."""
        self.step += 1
        self._metrics = _numbers(output)
        self.save_freq, self._extra_save = self._own_save_freq, None
        order = self._service.step_done(self.step, self._metrics)
        if order is None:
            return
        if order.stop:
            self.order = order
            self.total_training_steps = self.step  # its last step: it saves, and returns
            self.val_dataloader, self.test_freq = None, -1  # no time for a validation
        else:
            self._extra_save, self.save_freq = order, 1

    def _save(self, step: int, write: Callable[[], None]) -> None:
        order = self.order or self._extra_save
        if order is None and not self.is_done and not self._service.make_room(step):
            return
        write()
        self._service.commit(step, order, self._metrics)


def resume_directory(checkpoint: Path, step: int) -> Path:
    """verl's own directory in a checkpoint of ours.

    Raises:
        VerlSlurmError: it is not there; whoever verified the checkpoint did not look at another one.
    """
    directory = checkpoint / f"global_step_{step}"
    if not directory.is_dir():
        raise VerlSlurmError("the checkpoint has nothing of verl's", where=checkpoint, expected=directory.name)
    return directory


def _seed(seed: int) -> None:
    """verl's SFT seeds nothing: weights that are made up (LoRA's) and dropout would differ in every life."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _numbers(output: Any) -> Numbers:
    """What `train_batch` says of its step, as far as it is numbers; only some ranks are told."""
    try:
        metrics = tensordict_utils.get(output, "metrics")
    except (KeyError, AttributeError, TypeError):
        return {}
    found = {}
    for name, value in (metrics or {}).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[str(name)] = float(value)
    return found
