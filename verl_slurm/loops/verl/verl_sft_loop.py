"""Serves verl's own SFT trainer: it saves at the end of the running step when asked, and its saves are committed.

`SFTTrainer` is subclassed, and functions of two of its members are wrapped: its `training_client`, whose `train_batch`
returns when a step is done, and its `ckpt_handler`, which writes and reads checkpoints. Everything else is verl's own
code, including the order of a step. Validation and saving follow `train_batch`, so they obey a decision made there.

An exit proves nothing: a run is finished when its last step is done and committed (`loops.verl.verl_sft`).
"""

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from verl.trainer.sft_trainer import SFTTrainer
from verl.utils import tensordict_utils

from verl_slurm.base.errors import ConfigError, VerlSlurmError
from verl_slurm.checkpoint.format.specification import guest_directory
from verl_slurm.loops.step_end import StepEndSaver, seal_own
from verl_slurm.loops.verl.verl_sft_wraps import watch_checkpoints, watch_steps


class ServedSFT(SFTTrainer):  # type: ignore[misc]  # verl has no types
    """The trainer of one rank.

    Args:
        saver: commits verl's saves, and is asked at each step's end; None: no service, verl saves as usual.
        resume_step: where it has to resume, 0: from the beginning; None: wherever verl finds something.

    Attributes:
        step: the last one that is done.
        total: the last one that there is.

    Raises:
        ConfigError: the data ends before `trainer.total_training_steps`.
        VerlSlurmError: verl did not resume from `resume_step`.
    """

    total_training_steps: int
    save_freq: int
    training_client: Any
    ckpt_handler: Any

    def __init__(self, config: Any, saver: StepEndSaver | None, resume_step: int | None) -> None:
        self._saver = saver
        self._metrics: Mapping[str, object] = {}
        self._since = 0.0
        # Before verl builds the model: LoRA's weights are drawn in its constructor. The same on all ranks.
        _seed(int(config.trainer.seed))
        super().__init__(config=config)
        self.total, self.step = int(self.total_training_steps), int(self.resume_global_step)
        # verl starts from step 0 without an error where it finds nothing; that would train over a verified run.
        if resume_step not in (None, self.step):
            raise VerlSlurmError(
                "verl did not resume from where it was told to",
                where=config.trainer.resume_from_path,
                found=f"step {self.step}",
                expected=f"step {resume_step}",
            )
        if self.step == 0:
            # In verl every process draws its own; this gives the same ones in every attempt of the run.
            _seed(int(config.trainer.seed) + int(self.rank))
        # verl ends with 0 where its epochs are over, and the run would be started again without end.
        ends = self.steps_per_epoch * int(config.trainer.total_epochs)
        if ends < self.total:
            raise ConfigError(
                "the data ends before the last step",
                where="verl: trainer.total_training_steps",
                found=f"{self.total} steps, and {ends} in trainer.total_epochs={config.trainer.total_epochs}",
                expected="at least as many in all epochs",
                remedy="raise trainer.total_epochs, or lower trainer.total_training_steps",
            )
        # Kept: a request sets `save_freq` to 1 for one step.
        self._own_save_freq = self.save_freq

    @property
    def is_done(self) -> bool:
        return self.step >= self.total

    def _build_engine(self) -> None:
        super()._build_engine()
        # When `train_batch` returns the optimizer has stepped, and verl has not yet decided on validation and saving.
        watch_steps(self.training_client, self._step_is_done, self._batch_is_evaluated)

    def _build_dataloader(self) -> None:
        super()._build_dataloader()
        # Each iterator draws a seed for its workers. Drawn from the generator that dropout uses, too, it would advance
        # that one once more at every resume within an epoch.
        for loader in (self.train_dataloader, self.val_dataloader):
            if loader is not None:
                loader.generator = torch.Generator().manual_seed(int(self.config.trainer.seed))

    def _build_ckpt_handler(self) -> None:
        super()._build_ckpt_handler()
        watch_checkpoints(self.ckpt_handler, steps_per_epoch=self.steps_per_epoch, save=self._save)

    def fit(self) -> None:
        """Trains to the last step, or to the end of the one in which a request to stop arrives."""
        if not self.is_done:  # verl would train one step more
            super().fit()

    def _step_is_done(self, output: Any) -> None:
        """Runs when the weights are those of the next step; metrics, validation and saving follow in `fit`."""
        self.step += 1
        self._metrics = _metrics_of(output)
        # Restored at each step: the request before this one may have set it to 1.
        self.save_freq = self._own_save_freq
        if self._saver is None:
            return
        self._saver.step_done(self.step, self._metrics)
        self._since = self._saver.session.clock()
        request = self._saver.asked()
        if request is None:
            return
        if request.stop:
            # verl's own condition for its end; leaving by an exception would skip its save.
            self.total_training_steps = self.step  # its last step: it saves, and returns
            self.val_dataloader, self.test_freq = None, -1  # no time for a validation
        else:
            self.save_freq = 1

    def _batch_is_evaluated(self) -> None:
        if self._saver is not None:
            self._since = self._saver.session.evaluated(self._since)

    def _save(self, step: int, write: Callable[[], None]) -> None:
        saver = self._saver
        if saver is None:
            write()
            return
        name, last = guest_directory("verl", step), step >= self.total

        def shards() -> list[str]:
            # Of this rank, which hashes them itself; rank 0 hashes those of no rank (tokenizer, data loaders).
            found = (saver.work / name).glob(f"*_rank_{self.rank}.pt")
            return sorted(f"{name}/{path.name}" for path in found)

        # Each rank hashes what it wrote: the pages are in its node's cache, and the work is shared.
        seal, why = partial(seal_own, saver.work, shards), "trainer.save_freq"
        saver.save(step, saver.files(name, write, seal), metrics=self._metrics, why=why, last=last)


def _seed(seed: int) -> None:
    # verl's SFT seeds nothing: made-up weights (LoRA's) and dropout would differ in every attempt.
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _metrics_of(output: Any) -> Mapping[str, object]:
    """Returns the metrics in `train_batch`'s output; some ranks get none."""
    try:
        # Without a result on this rank the step counts all the same: it is agreed on by all.
        return tensordict_utils.get(output, "metrics") or {}
    except (KeyError, AttributeError, TypeError):
        return {}
