"""Serves a Hugging Face `Trainer`: saves when the daemon asks, commits, resumes, and reports the end.

```
from verl_slurm.loops.huggingface import VerlSlurmCallback

service = VerlSlurmCallback()
trainer = Trainer(model, args, train_dataset=data, callbacks=[service])
service.train(trainer)          # in place of trainer.train(): resumes by itself; asked to stop, the process ends here
```

The checkpoints are the Trainer's own, `checkpoint-N`. They go into the work directory of this attempt
(`args.output_dir` points there while it trains), and each is moved into one of our checkpoints as soon as it is
complete. A save happens when the Trainer itself would save (`save_strategy`), each `checkpoint.every_steps`, at the
last step, and when the daemon asks. What TRL's trainers leave out is saved beside (`trl_state`).

Without a daemon `service.train(trainer)` is `trainer.train()`. docs/guests-frameworks.md says where a resumed run
equals an undisturbed one, and where it differs.
"""

import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import SaveStrategy, TrainOutput, has_length

from verl_slurm.base.errors import ConfigError, DataError, VerlSlurmError
from verl_slurm.checkpoint.format.specification import FileEntry, guest_directory
from verl_slurm.loops.callback import Served, require_served
from verl_slurm.loops.hyperparameters import counted_in, hyperparameters, rates, tell_replaced, tell_used
from verl_slurm.loops.session import Session
from verl_slurm.loops.step_end import StepEndSaver
from verl_slurm.loops.trl_state import TrlState, innermost_sampler
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.wire.messages import SaveRequest

_STATE = "trainer_state.json"  # transformers.trainer.TRAINER_STATE_NAME
# The margin of a save in `loops.reach`: all jobs of the partition use the storage at once.
_EVALUATION_MARGIN = 1.5


_SET_THEM = (
    "To change one, set it in trainer.optimizer.param_groups and trainer.lr_scheduler (base_lrs, patience), in a "
    "callback's on_train_begin"
)
# Schedules whose own words come back with their state; those of the others are the program's.
_RESTORED = ("reduce_lr_on_plateau", "greedy")
_OPTIMIZERS_OWN = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_args")


class _NothingLeft(Exception):
    """The checkpoint is of the last step. The Trainer itself would train one step more (transformers 5.10)."""


class VerlSlurmCallback(Served, TrainerCallback):
    """See the module. A user's script makes one on every rank; `Served` describes its use as a context.

    Attributes:
        resume: the verified checkpoint's directory, as `Trainer.train(resume_from_checkpoint=...)` takes it; None: from
            the start.
        stopped: the daemon asked to stop, and the training did.
    """

    def __init__(self, session: Session | None = None) -> None:
        super().__init__(session)
        self.stopped = False
        self._output_dir = ""
        self._strategy: Any = None
        self._told = -1
        self._began = self._since = 0.0
        self._evaluation_s: float | None = None
        self._steps_of_epoch = 0
        self._trl: TrlState | None = None
        self._made_with: dict[str, Any] = {}
        self._data: dict[str, int] = {}
        self._rates: dict[str, Any] = {}
        self._trainer: Trainer | None = None

    def _resume(self) -> str | None:
        directory = self._own_files(_STATE, "the Hugging Face Trainer")
        return None if directory is None else str(directory)

    def train(
        self, trainer: Trainer, resume_from_checkpoint: str | bool | None = None, **options: Any
    ) -> TrainOutput:
        """Runs `trainer.train(**options)`, resumed from the run's newest state instead of from
        `resume_from_checkpoint`.

        Returns:
            The result of `Trainer.train`. If an earlier attempt did the last step: its step, and no metrics.

        Raises:
            SystemExit: with 0, when the daemon asked to stop: the checkpoint is committed, or there will be none.
            VerlSlurmError: the daemon was told.
        """
        if not self.session.has_daemon:
            return trainer.train(resume_from_checkpoint, **options)
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        self._trainer, self._trl = trainer, TrlState.of(trainer)
        self._made_with = _made_with(trainer)
        # Before `train`: the resume inside of it reads the optimizer's file.
        if trainer.args.device.type == "cpu":
            _know_cpus_by_number()
        # A path, never True: the Trainer would look for the newest `checkpoint-N` in output_dir by itself.
        name = "resume_from_checkpoint"
        own = self._chosen(name, resume_from_checkpoint, looked_up=resume_from_checkpoint is True)
        try:
            output = trainer.train(own, **options)
        # Raised inside the Trainer before its first step; it is the end of the run and no error.
        except _NothingLeft:
            self._restore(trainer.args)
            output = TrainOutput(trainer.state.global_step, math.nan, {})
            self._finished_at = trainer.state.global_step
        except BaseException as error:
            # On every way out: after the training `args.output_dir` is the user's again.
            self._restore(trainer.args)
            self.session.ended_by(error)
            # No collectives from here on: the other ranks may still be in a step.
            self._close(broken=True)
            raise
        finally:
            self._trainer = None
        if self.stopped:
            self._leave()
        # Inside of a `with` block the run is done at the block's end: work on the model belongs to it.
        if not self._held:
            self._finish()
        return output

    # ---- the Trainer's events, in their order; all of them on every rank

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self.session.has_daemon:
            return
        # The work directory is still the Trainer's: it has not ended, and its loop is called once more.
        again = self._saver is not None and args.output_dir == str(self._saver.work)
        try:
            self._require_served(args)
            assert self._trainer is not None
            # In place: begun again with smaller batches, the checkpoints have those.
            self._data.update(_data(self._trainer, kwargs.get("train_dataloader")))
            self._rates.update(_rates(args, kwargs.get("lr_scheduler")))
            metadata = {
                "library": f"transformers {transformers.__version__}",
                "made_with": self._made_with,
                "rates": self._rates,
                "data": self._data,
            }
            saver = (
                self._begin_again(args, state)
                if again
                else self._begin(state.global_step, state.max_steps, metadata)
            )
        except VerlSlurmError as error:
            # Where `train` is not on the stack, nothing else tells the daemon.
            if self._trainer is None:
                self.session.ended_by(error)
            raise
        # The resumed step was reported by the attempt that trained it.
        self._told, self._since = state.global_step, self.session.clock()
        ended = self.resume is not None and self._restore_callbacks(state, say=not again)
        # Looked for at every start: a job that died between its last save and its end comes here.
        if ended or 0 < state.max_steps <= state.global_step:
            raise _NothingLeft
        # Those of the script: the Trainer has just put the checkpoint's in their place (transformers 5.10).
        then = _intervals(state)
        state.compute_steps(args, state.max_steps)  # type: ignore[no-untyped-call]
        if not again:
            tell_used(self.session, then, _intervals(state))
            tell_replaced(self.session, self._made_with, _SET_THEM, rates=self._rates, data=self._data)
        passes = int(state.epoch or 0) if self.resume is not None else 0
        if not again and (loss := _data_loss(args, kwargs.get("train_dataloader"), passes)):
            self.session.notice(loss, loud=self.resume is not None)
        if self.resume is not None and not self.is_adopted:
            args.eval_on_start = False  # it was, and counts for early stopping
        if self._trl is not None:
            self._begin_trl(self._trl, saver, args, again=again)
        # Last, after all refusals: from here on a checkpoint of the Trainer lands where it can be committed by a
        # rename.
        if not again:
            self._output_dir, args.output_dir = args.output_dir or "", str(saver.work)

    def _require_served(self, args: TrainingArguments) -> None:
        if self._trainer is None:
            raise ConfigError(
                "the Trainer was started without VerlSlurmCallback.train: it would not be resumed, and would not end "
                "as a run",
                found="trainer.train() or hyperparameter_search()",
                expected="service.train(trainer)",
                remedy="call that once; each trial of a search is a run of its own (verl-slurm submit --sweep)",
            )
        require_served(_unserved(args))

    def _begin_again(self, args: TrainingArguments, state: TrainerState) -> StepEndSaver:
        """Serves the Trainer's loop once more: with `auto_find_batch_size`, after a batch that did not fit."""
        saver = self._saver
        assert saver is not None
        self._give_back_strategy(args)
        self.stopped = saver.saving = False
        text = "a batch did not fit: auto_find_batch_size has the Trainer begin again with a smaller one"
        first, cost = state.global_step + 1, ""
        if self._told >= first:
            cost = f". Steps {first} to {self._told} are done again, with the weights as they left them"
        elif self.resume is not None:
            cost = (
                ". Its place in the data is counted in the smaller ones: an interrupted epoch repeats samples"
            )
        remedy = ". Set per_device_train_batch_size lower" if cost else ""
        self.session.notice(text + cost + remedy, loud=bool(cost))
        saver.begin(state.global_step, state.max_steps)
        return saver

    def _restore_callbacks(self, state: TrainerState, *, say: bool) -> bool:
        """Puts back what callbacks have saved; returns whether the training had ended by early stopping."""
        # The Trainer itself does this only if it is asked to (`restore_callback_states_from_checkpoint`).
        assert self._trainer is not None
        callbacks = self._trainer.callback_handler.callbacks
        stored: Any = state.stateful_callbacks or {}  # annotated as the list that it is made from
        saved = {name: data if isinstance(data, list) else [data] for name, data in stored.items()}
        ended, forgetful = False, []
        for callback in callbacks:
            name = type(callback).__name__
            if not isinstance(callback, ExportableState):
                # A callback of the user's own. Those of transformers and TRL are in docs/guests-frameworks.md.
                if not type(callback).__module__.startswith(("transformers.", "trl.", "verl_slurm.")):
                    forgetful.append(name)
            elif not saved.get(name):
                forgetful.append(name)
            else:
                # In place: the user's script may hold the callback. Its arguments are those of the script as it is now.
                for attribute, value in saved[name].pop(0).get("attributes", {}).items():
                    setattr(callback, attribute, value)
                if isinstance(callback, EarlyStoppingCallback):
                    ended |= callback.early_stopping_patience_counter >= callback.early_stopping_patience
        if forgetful and say:
            self.session.notice(
                f"the checkpoint has no state of the callbacks {', '.join(forgetful)}: they begin anew. A callback "
                "that is a transformers ExportableState is restored",
                topic="storage",
                loud=True,
            )
        return ended

    def _begin_trl(self, trl: TrlState, saver: StepEndSaver, args: TrainingArguments, *, again: bool) -> None:
        """Restores what TRL's own checkpoint lacks, and says what is not kept. Collective."""
        for loss in () if again else trl.losses():
            self.session.notice(loss, topic="ledger", loud=True)
        if self.session.rank == 0 and not again:
            trl.keep_tables(Path(args.output_dir or ""), saver.work)
        if self.resume is not None and not trl.load(Path(self.resume), saver.ranks):
            self.session.notice(
                "the checkpoint has no state of TRL's: what was sampled and not trained on is sampled again",
                topic="ledger",
                loud=True,
            )

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._steps_of_epoch = 0
        if self._saver is not None and self._trl is not None:
            self._trl.epoch_begins(kwargs.get("train_dataloader"))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._tell(state, {})  # where another callback took back that there is something to log

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        saver = self._saver
        if saver is None:
            return
        self._steps_of_epoch += 1
        # Otherwise `on_log` follows and reports the step together with its numbers.
        if not control.should_log:
            self._tell(state, {})
        # What the Trainer does after this callback, an evaluation and a save, is timed from here.
        self._began, self._since = time.monotonic(), self.session.clock()
        # Asked at every step, on every rank: it is a collective.
        request, is_last = saver.asked(), state.global_step >= state.max_steps
        if request is not None or is_last or state.global_step % saver.every_steps == 0:
            control.should_save = True
        saver.saving = False  # another callback may have called off the save before
        if control.should_save and not saver.may_write(state.global_step, last=is_last):
            control.should_save = False
        # Before the Trainer writes: a save of minutes without this message counts as a hang.
        if control.should_save:
            saver.begins(state.global_step)
        if request is None:
            return
        # At the last step the Trainer ends by itself, and the run is done instead of stopped.
        if request.stop and not is_last:
            control.should_training_stop = self.stopped = True
            # The Trainer evaluates before it saves: an evaluation that is too long would cost the checkpoint.
            if control.should_evaluate and not self._fits(saver, request):
                control.should_evaluate = False
                self.session.notice(
                    f"the evaluation of step {state.global_step} is left out: there is no time for it before the "
                    "save. A schedule or an early stopping that goes by it misses it",
                    topic="evaluation",
                    loud=True,
                )
        if args.save_strategy == SaveStrategy.BEST:  # its evaluation would say whether to save
            self._strategy, args.save_strategy = args.save_strategy, SaveStrategy.STEPS

    def _fits(self, saver: StepEndSaver, request: SaveRequest) -> bool:
        """Returns whether there is time for the evaluation that is due; the same on all ranks."""
        if request.seconds_left is None:
            return True
        # Never measured: taken for too long. A lost evaluation is said and can be repeated; a lost step costs more.
        measured = self._evaluation_s
        needed = math.inf if measured is None else measured * _EVALUATION_MARGIN + (self.session.save_s or 0)
        # Each rank knows its own clock only.
        # One rank's no counts for all: an evaluation has collectives of its own.
        return saver.ranks.max([int(needed > request.seconds_left)]) == [0]

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        self._tell(state, logs or {})

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Also in what follows the training inside of a `with` block.
        self.session.alive()

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        # The Trainer evaluates before it saves, so these numbers are those of the checkpoint that follows.
        self._metrics |= dict(metrics or {})  # for the checkpoint: see checkpoint.keep_best
        before, self._since = self._since, self.session.clock()
        self._began, self._evaluation_s = time.monotonic(), self._since - before
        self.session.leave_out(before)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._saver is None:
            return
        self.session.leave_out(self._since)
        # A step's end is reported before its save: the daemon counts the save to the safe point after that step.
        self._tell(state, {})
        self._give_back_strategy(args)
        step = state.global_step
        last = step >= state.max_steps or (control.should_training_stop and not self.stopped)
        failure = self._saver.save(
            step,
            self._saver.files(f"checkpoint-{step}", seal=functools.partial(self._seal, step)),
            metrics=self._metrics,
            why=f"step {step} is one to save",
            last=last,
            began=self._began,
        )
        # Earlier failures cost one save; without the last one the run has no result.
        if failure is not None and last:
            raise failure

    def _seal(self, step: int, ranks: Collective) -> Sequence[FileEntry]:
        """Waits until the Trainer has written on every rank, and writes TRL's part. Collective."""
        ranks.max([0])
        # The Trainer's own files are made durable and hashed by rank 0: who wrote which is not known here.
        if self._trl is None or self._saver is None:
            return ()
        written = self._saver.work / f"checkpoint-{step}"
        entries, problem = self._trl.write(written, step, ranks)
        if problem:
            self.session.notice(
                f"the completions of this cycle are not in the checkpoint of step {step}, and will be sampled again "
                f"if the run goes on from it: {problem}",
                topic="ledger",
                loud=True,
            )
        place = guest_directory("loop", step)
        return [msgspec.structs.replace(entry, path=f"{place}/{entry.path}") for entry in entries]

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._saver is None:
            return
        if self.stopped:  # nothing more than what was asked for
            control.should_evaluate = control.should_log = control.should_save = False
        # Saved at the step's end already; `save_strategy="epoch"` would write the same state again.
        elif self._saver.saved_step == state.global_step:
            control.should_save = False
        if control.should_save and not self._saver.may_write(state.global_step, last=False):
            control.should_save = False
        if control.should_save:
            self._saver.begins(state.global_step)
        self._began, self._since = time.monotonic(), self.session.clock()
        # The Trainer ends quietly where its data gives no sample, and the run would count as done.
        if control.should_training_stop and self._steps_of_epoch == 0:
            raise DataError(
                "the data set has no samples left, and the training is not done",
                found=f"step {state.global_step}",
                expected=f"{state.max_steps} steps",
                remedy="give it a data set that can be read again, or a smaller max_steps",
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._saver is None:
            return
        step, trainer = state.global_step, self._trainer
        if not self.stopped and self._saver.saved_step != step and trainer is not None:
            # Another callback has ended it (early stopping), at a step that was none to save.
            self._saver.begins(step)
            trainer._save_checkpoint(kwargs["model"], None)
            self.on_save(args, state, control)
        self._restore(args)
        if self.stopped:
            self._saver.leave()
        else:  # the last step, or another callback's decision
            # Said to the daemon later, by `_finish`: the user's `with` block may not be over.
            self._finished_at = state.global_step

    # ---- what they have in common

    def _tell(self, state: TrainerState, logs: Mapping[str, float]) -> None:
        """Reports once per step, with the step's logs, if any."""
        # Several callbacks of one step come here; the daemon's safe points and rows count a step once.
        if self._saver is None or state.global_step == self._told:
            return
        self._told = state.global_step
        # The epoch is a position, and would look like a metric in `status` and in manifests.
        self._metrics = {name: value for name, value in logs.items() if name != "epoch"}
        self._saver.step_done(state.global_step, self._metrics)

    def _give_back_strategy(self, args: TrainingArguments) -> None:
        # Given back after the requested save, so that the user's rule holds for the steps that follow.
        if self._strategy is not None:
            args.save_strategy, self._strategy = self._strategy, None

    def _restore(self, args: TrainingArguments) -> None:
        self._give_back_strategy(args)
        if self._output_dir:
            args.output_dir, self._output_dir = self._output_dir, ""


@functools.cache  # torch sorts what is registered, and two of one priority it cannot
def _know_cpus_by_number() -> None:
    """Makes a resume of several ranks on CPUs possible."""

    # accelerate 1.15 calls its device `cpu:0`, and the Trainer has optimizers loaded to it; torch 2.13 knows `cpu`
    # only.
    def restore(storage: Any, location: str) -> Any:
        # None leaves every other location to torch's own restorers.
        return storage if location.startswith("cpu:") else None

    torch.serialization.register_package(10_477, lambda _: None, restore)


def _made_with(trainer: Trainer) -> dict[str, Any]:
    """What the Trainer restores from a checkpoint in place of the program's own."""
    args, made_with = trainer.args, dict[str, Any]()
    if trainer.lr_scheduler is None and args.lr_scheduler_type in _RESTORED:
        made_with["lr_scheduler_kwargs"] = str(args.lr_scheduler_kwargs or {})
    if trainer.optimizer is not None:
        return made_with | hyperparameters(
            {"optimizer": trainer.optimizer, "lr_scheduler": trainer.lr_scheduler}
        )
    return made_with | {name: getattr(args, name) for name in _OPTIMIZERS_OWN}


def _rates(args: TrainingArguments, schedule: Any) -> dict[str, Any]:
    """What the learning rates follow from and is the program's own, whatever was restored."""
    kind = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    return {"lr_scheduler_type": str(kind)} | rates({"lr_scheduler": schedule})


def _intervals(state: TrainerState) -> dict[str, int]:
    return {name: getattr(state, name) for name in ("logging_steps", "eval_steps", "save_steps")}


def _data(trainer: Trainer, loader: Any) -> dict[str, int]:
    """What the Trainer finds its place in the data by."""
    return counted_in(
        loader,
        per_device_train_batch_size=trainer._train_batch_size,
        gradient_accumulation_steps=trainer.args.gradient_accumulation_steps,
        dataloader_drop_last=trainer.args.dataloader_drop_last,
        # accelerate's own sampler shuffles by it.
        sampler_seed=getattr(innermost_sampler(loader), "initial_seed", None),
    )


def _data_loss(args: TrainingArguments, loader: Any, passes: int) -> str:
    """Returns what the settings cost of the data of an interrupted epoch, for people; empty: nothing. `passes`: those
    through a stream that were over when it was interrupted."""
    # The Trainer takes all of its steps for one epoch, and skips in the first pass alone.
    if passes and not has_length(loader):
        return (
            f"a stream without a length, interrupted in pass {passes + 1}: that one begins again with its first "
            "sample, so what it had of it comes again"
        )
    if args.ignore_data_skip:
        return (
            "ignore_data_skip=True: an interrupted epoch goes on with batches of its start, and never gets to its last "
            "ones. Leave it out, unless the data set finds its place by itself"
        )
    sampler = innermost_sampler(loader)
    draws = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler, LengthGroupedSampler)
    # accelerate's own has a seed, and shuffles by it and the number of the epoch.
    if isinstance(sampler, draws) and not hasattr(sampler, "initial_seed"):
        return (
            f"{type(sampler).__name__} shuffles by the global generator: an interrupted epoch goes on in another order "
            "if it is not the first one, with samples that it had before and without others. "
            "train_sampling_strategy='random' with use_seedable_sampler, the defaults, goes on in the same order"
        )
    return ""


def _unserved(args: TrainingArguments) -> Iterator[tuple[object, str, str]]:
    """Yields settings that would break a promise, as `require_served` takes them."""
    nothing = "nothing could be resumed from such a checkpoint; leave it out"
    yield args.save_only_model, "save_only_model=True", nothing
    yield args.enable_jit_checkpoint, "enable_jit_checkpoint=True", "the daemon does that; leave it out"
    pruned = (
        "by then the best one may be pruned, or of a former attempt; evaluate the run's checkpoints behind it"
    )
    yield args.load_best_model_at_end, "load_best_model_at_end=True", pruned
    only, strategy = "only hub_strategy='end' goes together with it", f"hub_strategy={args.hub_strategy}"
    yield args.push_to_hub and args.hub_strategy != "end", strategy, only
    one = "a checkpoint is one directory on shared storage; leave it out"
    yield args.save_on_each_node, "save_on_each_node=True", one
