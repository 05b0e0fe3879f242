"""verl's own SFT trainer, served: it saves at the end of the running step when asked, and what it saves is committed.

`SFTTrainer` is subclassed and two of the things it holds are wrapped: its `training_client`, whose `train_batch`
returns when a step is done, and its `ckpt_handler`, which writes and reads checkpoints. Everything else is verl's own
code, the order of a step included: validation and saving come behind `train_batch`, so what is decided there they obey.

Two traps of verl are closed here. A data loader's state that was saved at the end of an epoch is that of an exhausted
iterator: a run resumed from it trains an epoch of no steps, and exits with 0. So it is not loaded there: the next epoch
begins with a fresh one, as it does in a run that was never interrupted. And no exit is believed: a run is finished when
its last step is done and committed.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from verl.trainer.sft_trainer import SFTTrainer
from verl.utils import tensordict_utils

from verl_slurm.errors import ConfigError, VerlSlurmError
from verl_slurm.wire.stopping import Order

__all__ = ["Alone", "Saves", "ServedSFT", "Service", "Watched"]

Numbers = dict[str, float]


class Service(Protocol):
    """What the trainer needs of whoever serves it; every method on every rank alike. Called by: `ServedSFT`."""

    def step_done(self, step: int, metrics: Numbers) -> Order | None:
        """A step is done; what all ranks do now."""

    def save(self, step: int, order: Order | None, metrics: Numbers, write: Callable[[], None]) -> None:
        """Have `write` write verl's checkpoint of `step`, and make it one of the run's."""


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


class _KeptBack:
    """Stands in for a data loader whose state is given to it, or not, once it is known where the run resumes."""

    state: Mapping[str, Any] | None = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = state


class Saves:
    """verl's `CheckpointHandler`, with the data loader's state where it is of use, and our save around its own.

    Args:
        inner: verl's.
        steps_per_epoch: of this run's data.
        save: wraps a save: takes the step, and what writes it.

    Called by: `ServedSFT`.
    """

    def __init__(
        self, inner: Any, *, steps_per_epoch: int, save: Callable[[int, Callable[[], None]], None]
    ) -> None:
        self._inner, self._steps_per_epoch, self._save = inner, steps_per_epoch, save

    def load_checkpoint(self) -> int:
        """As verl's; returns the step.

        Raises:
            VerlSlurmError: it is from within an epoch and does not say where in the data: verl would begin the epoch
                again, and say so in its log only.
        """
        loader, kept = self._inner.train_dataloader, _KeptBack()
        self._inner.train_dataloader = kept
        try:
            step = int(self._inner.load_checkpoint())
        finally:
            self._inner.train_dataloader = loader
        if step % self._steps_per_epoch == 0:
            return step  # an exhausted iterator's: the next epoch begins afresh
        if kept.state is None:
            raise VerlSlurmError(
                "the checkpoint does not say where in the data it is from",
                where=self._inner.resume_from_path or self._inner.default_local_dir,
                found=f"step {step}, and no data_*.pt",
                remedy="resume from an older one, or from another run's",
            )
        loader.load_state_dict(kept.state)
        return step

    def save_checkpoint(self, step: int) -> None:
        """Collective."""
        self._save(step, lambda: self._inner.save_checkpoint(step=step))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Alone:
    """The `Service` of a trainer that nobody serves: verl saves as it does. Called by: verl.sft, run by hand."""

    def step_done(self, step: int, metrics: Numbers) -> Order | None:
        del step, metrics
        return None

    def save(self, step: int, order: Order | None, metrics: Numbers, write: Callable[[], None]) -> None:
        del step, order, metrics
        write()


class ServedSFT(SFTTrainer):  # type: ignore[misc]  # verl has no types
    """The trainer of one rank. Called by: verl.sft.

    Args:
        config: verl's own, whole.
        service: who is told, asked and given what was saved.
        resume_step: where it has to resume, 0: from the beginning; None: wherever verl finds something.

    Attributes:
        step: the last one that is done.
        total: the last one that there is.
        order: why it left early; None: it did not.

    Raises:
        ConfigError: the data ends before `trainer.total_training_steps`.
    """

    total_training_steps: int
    save_freq: int
    training_client: Any
    ckpt_handler: Any

    def __init__(self, config: Any, service: Service, resume_step: int | None) -> None:
        self._service = service
        self.order: Order | None = None
        self._metrics: Numbers = {}
        self._extra_save: Order | None = None
        _seed(int(config.trainer.seed))
        super().__init__(config=config)
        self.total, self.step = int(self.total_training_steps), int(self.resume_global_step)
        if resume_step not in (None, self.step):
            raise VerlSlurmError(
                "verl did not resume from where it was told to",
                where=config.trainer.resume_from_path,
                found=f"step {self.step}",
                expected=f"step {resume_step}",
            )
        if self.step == 0:
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

    def _build_dataloader(self) -> None:
        super()._build_dataloader()
        # Each iterator draws a seed for its workers. Drawn from the generator that dropout uses, too, it would move
        # that one on once more at every resume within an epoch.
        for loader in (self.train_dataloader, self.val_dataloader):
            if loader is not None:
                loader.generator = torch.Generator().manual_seed(int(self.config.trainer.seed))

    def _build_ckpt_handler(self) -> None:
        super()._build_ckpt_handler()
        self.ckpt_handler = Saves(
            self.ckpt_handler,
            steps_per_epoch=self.steps_per_epoch,
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
        self._service.save(step, self.order or self._extra_save, self._metrics, write)


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
