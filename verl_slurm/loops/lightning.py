"""Serves a Lightning `Trainer`: saves when the daemon asks, commits, resumes, and reports the end.

```
from verl_slurm.loops.lightning import ResumableDataLoader, VerlSlurmCheckpoint

service = VerlSlurmCheckpoint(every_n_steps=100)
trainer = lightning.Trainer(max_steps=1000, callbacks=[service])
service.fit(trainer, model, ResumableDataLoader(data, batch_size=8, shuffle=True))   # in place of trainer.fit(...)
```

A checkpoint is the output of `Trainer.save_checkpoint`, as `lightning.ckpt`, and a small file per rank beside it: its
random generators and its place in the data. It is saved where all of a step is done: after the batch; after the
validation that this batch triggers; between two epochs. Being a `Checkpoint`, the callback replaces the
`ModelCheckpoint` that Lightning adds by itself; one of the user's own keeps working. Under a daemon Lightning's signal
handlers are disabled, including its own requeueing.

Without a daemon `service.fit(trainer, ...)` is `trainer.fit(...)`. docs/guests-frameworks.md says where a resumed run
equals an undisturbed one, and where it differs.
"""

import csv
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import lightning
import msgspec
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    Checkpoint,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from verl_slurm.base.bounded import RECORD, read_regular
from verl_slurm.base.errors import CheckpointCorrupt, ConfigError, DataError
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.loops.callback import Served, require_served
from verl_slurm.loops.hyperparameters import counted_in, hyperparameters, rates, tell_moved, tell_replaced
from verl_slurm.loops.session import Session, plain_numbers
from verl_slurm.save.ranks import rng
from verl_slurm.save.ranks.rng import Generators

_FILE = "lightning.ckpt"
_LOOKED_UP = ("best", "last", "hpc", "registry")  # a ckpt_path that has Lightning look for one


_SET_THEM = "To change one, set it in the optimizer and its scheduler, in the module's on_train_start"


class ResumableDataLoader(DataLoader[Any]):
    """`torch.utils.data.DataLoader`, unchanged but resumable in mid-epoch, with exactly the remaining batches. Iterate
    over one epoch at a time.

    Its output follows from the generators at its epoch's start (order, seeds of workers) and the draws of dataset and
    collate function, so a resume loads the batches that were trained on once more. Of several ranks Lightning saves the
    first one's state only; `_Place` has the others'.

    Attributes:
        epoch_began: the generators at the start of the running or last epoch; None: none began.
        served: batches of it that were handed out.
    """

    epoch_began: Generators | None = None
    served: int = 0
    _to_resume: tuple[int, Generators, Generators] | None = None

    def resume(self, served: int, epoch_began: Generators, then: Generators) -> None:
        """Makes the next epoch continue one of which `served` batches were trained on.

        Args:
            epoch_began: the generators at its start.
            then: the generators after those batches, and after the work on them.
        """
        self._to_resume = (served, epoch_began, then)

    def forget(self) -> None:
        """Makes the next epoch begin from its start after all."""
        self._to_resume = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # For one epoch: the next begins from its start.
        todo, self._to_resume = self._to_resume, None
        skipped = 0
        if todo is not None:
            skipped, began, _ = todo
            # Before `super().__iter__`: that draws the order of the samples and the seeds of the workers.
            rng.restore(began)
        # The generators of the epoch's true start, so that a second interruption can resume from here, too.
        self.epoch_began, self.served = rng.capture(), skipped
        batches = super().__iter__()
        if todo is not None:
            # Loaded and dropped: data sets and collate functions draw from the generators, so skipping indices is not
            # enough.
            for _ in islice(batches, skipped):
                pass
            # Undoes what the loading above has drawn; the training goes on where the saved step left off.
            rng.restore(todo[2])
        for batch in batches:
            # Before the yield: a save inside of the step counts this batch as trained on.
            self.served += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for Lightning: loadable with `torch.load(weights_only=True)`."""
        if self.epoch_began is None:
            return {}
        return {
            "served": self.served,
            "epoch_began": rng.to_tensors(self.epoch_began),
            # As tensors: `torch.load(weights_only=True)` refuses arrays.
            "then": rng.to_tensors(rng.capture()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            began, then = rng.from_tensors(state["epoch_began"]), rng.from_tensors(state["then"])
            self.resume(int(state["served"]), began, then)


class _BeforeTheAverages(Callback):  # type: ignore[misc]
    """Saves the last step first of all callbacks, where one averages the weights."""

    # At the end such a callback puts the averages in the place of the weights. Ours, a `Checkpoint`, comes after it: a
    # longer run would go on from the averages.
    def __init__(self, save: Callable[[Trainer], None]) -> None:
        self._save = save

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _averaging(trainer):
            self._save(trainer)


class _Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's place, which Lightning's own file lacks: `rank_0003.msgpack`."""

    generators: dict[str, bytes]
    in_epoch: bool
    """Batches of the epoch are left."""
    served: int
    """Batches of the epoch that were trained on."""
    metrics: dict[str, float]
    """Inputs of schedules, early stopping and the like (`Trainer.callback_metrics`)."""
    loaders: list[dict[str, bytes] | None]
    """Of each loader, the generators at the start of the epoch; None: not one of ours."""
    batches: int = msgspec.field(name="step")
    """Batches that stepped. Loggers count their rows in these, whatever a batch's optimizers add to `global_step`."""
    versions: list[int | str | None]
    """Of each logger: what names its directory."""
    directories: list[str]
    """Of each `ModelCheckpoint`. In another one it forgets its best checkpoints."""
    made_in: int
    """The epoch in which the loaders were made (`reload_dataloaders_every_n_epochs`)."""
    data: dict[str, int] = {}
    """What `served` and the order of the samples follow from."""


class VerlSlurmCheckpoint(Served, Checkpoint):  # type: ignore[misc]  # Lightning is not looked at by mypy
    """See the module. A user's script makes one on every rank; `Served` describes its use as a context.

    Args:
        every_n_steps: optimizer steps between two checkpoints; default: `checkpoint.every_steps` of the run. The last
            step, and the one that the daemon asks for, are always saved.

    Attributes:
        resume: the verified checkpoint's file, as `Trainer.fit(ckpt_path=...)` takes it; None: from the start.
    """

    def __init__(self, every_n_steps: int | None = None, session: Session | None = None) -> None:
        # Before the base class: its constructor calls `_resume`, which sets it.
        self._place: _Place | None = None
        self._made_with: dict[str, Any] = {}
        self._rates: dict[str, Any] = {}
        self._patience: list[tuple[EarlyStopping, int]] = []
        super().__init__(session)
        self._every = every_n_steps
        self._due = False
        self._step, self._since = 0, 0.0
        self._began_epoch = False
        self._stepped = False

    def _resume(self) -> str | None:
        directory = self._own_files(_FILE, "Lightning")
        if directory is None:
            return None
        # Read at the construction, so a damaged file is refused before Lightning has loaded a model.
        self._place = _read_place(directory / _place_name(self.session.rank))
        return str(directory / _FILE)

    def fit(self, trainer: Trainer, *args: Any, **options: Any) -> None:
        """Runs `trainer.fit(*args, **options)`, resumed from the run's newest state.

        Raises:
            SystemExit: with 0, when the daemon asked to stop: the checkpoint is committed, or there will be none.
            VerlSlurmError: the daemon was told.
        """
        if not self.session.has_daemon:
            trainer.fit(*args, **options)
            return
        try:
            require_served(self._unserved(trainer))
            trainer.callbacks.insert(0, _BeforeTheAverages(self._save_last))
            # Last: a ModelCheckpoint has noted a validation's score before it is saved.
            trainer.callbacks.remove(self)
            trainer.callbacks.append(self)
            cli: Any = sys.modules.get("lightning.pytorch.cli")
            for callback in trainer.callbacks if cli is not None else ():
                if isinstance(callback, cli.SaveConfigCallback):
                    # A later start goes on in the same directory, where the file of the first one lies.
                    callback.overwrite = True
            # Not in the directories of another run: what lies there is that run's.
            if self._place is not None and not self.is_adopted:
                _go_on_logging(trainer, self._place, is_first=self.session.rank == 0)
                self._leave_out_finders(trainer)
            own = options.get("ckpt_path")
            options["ckpt_path"] = self._chosen("ckpt_path", own, looked_up=own in _LOOKED_UP)
            trainer.fit(*args, **options)
            # `on_train_end` has not run: Lightning found nothing to do.
            if self._finished_at is None:
                self._require_done(trainer)
        except BaseException as error:
            self.session.ended_by(error)
            self._close(broken=True)
            raise
        if not self._held:
            self._finish()

    def _leave_out_finders(self, trainer: Trainer) -> None:
        """Takes out what looks for a learning rate before the training."""
        # It would train on, and put its own state in the place of the checkpoint's, whose optimizer has the rate that
        # was found.
        for callback in [*trainer.callbacks]:
            if getattr(type(callback), "on_fit_start", None) is LearningRateFinder.on_fit_start:
                trainer.callbacks.remove(callback)
                self.session.notice("LearningRateFinder is not run again: its rate is in the checkpoint")

    def _unserved(self, trainer: Trainer) -> Iterator[tuple[object, str, str]]:
        """Yields settings that are incompatible with a daemon, as `require_served` takes them."""
        # pytorch_lightning has other classes of the same names, whose callbacks are never called by this one.
        other = f"a {type(trainer).__module__}.Trainer"
        yield not isinstance(trainer, Trainer), other, "import lightning, not pytorch_lightning"
        absent = "a Trainer without this callback"
        yield self not in trainer.callbacks, absent, "lightning.Trainer(callbacks=[service])"
        # It requeues the job itself at a signal, and would do so beside the daemon.
        slurm = isinstance(trainer._accelerator_connector.cluster_environment, SLURMEnvironment)
        remedy = "leave it out: the daemon starts the ranks, as torchrun would, and requeues"
        yield slurm, "SLURMEnvironment among the Trainer's plugins", remedy
        # It is found anew at each start, and no checkpoint says what it was.
        finds = any(isinstance(callback, BatchSizeFinder) for callback in trainer.callbacks)
        found = "a BatchSizeFinder, whose batch size no checkpoint keeps"
        yield finds, found, "set the batch size that it has found"
        # Lightning resumes from such a file by itself, without a word, when no ckpt_path is given.
        left = max(Path(trainer.default_root_dir).glob("hpc_ckpt_*.ckpt"), default=None)
        found = f"{left}, which Lightning would go on from by itself"
        yield self.resume is None and left, found, "move it away, or give another default_root_dir"

    def _require_done(self, trainer: Trainer) -> None:
        """Handles a Lightning that returned without a step: after the last one, or for lack of data."""
        step, limits = trainer.global_step, (trainer.max_steps, trainer.max_epochs)
        reached = self.session.resume is not None and (
            _is_at_max(trainer) or (limits[1] is not None and 0 < limits[1] <= trainer.current_epoch)
        )
        if not reached:
            raise DataError(
                "Lightning trained no step, and the training is not done",
                found=f"step {step}, epoch {trainer.current_epoch}",
                expected=f"max_steps={limits[0]}, max_epochs={limits[1]}",
                remedy="is there a sample in the training data?",
            )
        # Left out by Lightning: it puts the averages into the model, for the script's work after the training.
        for one in _averaging(trainer):
            one.on_train_end(trainer, trainer.lightning_module)
        self._finished_at = step

    # ---- Lightning's hooks, in their order; all of them on every rank

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Before Lightning restores it with the callback's counts.
        self._patience = [(one, one.patience) for one in trainer.callbacks if isinstance(one, EarlyStopping)]

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning has installed its handlers by now, and the sanity check may meet a warning.
        if self.session.has_daemon:
            _ignore_warnings(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning has made the optimizers, and restores their state next.
        named: dict[str, object] = {f"optimizer{at or ''}": one for at, one in enumerate(trainer.optimizers)}
        named |= {
            f"scheduler{at or ''}": one.scheduler for at, one in enumerate(trainer.lr_scheduler_configs)
        }
        self._made_with, self._rates = hyperparameters(named), rates(named)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.session.has_daemon:
            return
        # Again: without a sanity check this is the first hook after Lightning has installed its handlers.
        _ignore_warnings(trainer)
        self._step = trainer.global_step
        for one, patience in self._patience:
            one.patience = patience
        tell_replaced(self.session, self._made_with, _SET_THEM, rates=self._rates)
        metadata = {
            "library": f"lightning {lightning.__version__}",
            "made_with": self._made_with,
            "rates": self._rates,
        }
        self._begin(self._step, max(0, trainer.max_steps), metadata)
        place, self._place = self._place, None
        self._began_epoch = place is not None and place.in_epoch
        loaders = list(_flat(trainer.train_dataloader))
        if not all(isinstance(loader, ResumableDataLoader) for loader in loaders):
            self.session.notice(
                "the training data comes from a loader that cannot be resumed: an interrupted epoch goes on with "
                "batches of its start, as Lightning does. verl_slurm.loops.lightning.ResumableDataLoader can",
                loud=place is not None,
            )
        # After all loaders exist and before the first batch is drawn from one.
        if place is not None:
            self._take_up(place, trainer, loaders)
        self._watch_steps(trainer)

    def _watch_steps(self, trainer: Trainer) -> None:
        """Notes which batches step an optimizer, whether or not Lightning counts the step."""
        by_hand = not trainer.lightning_module.automatic_optimization
        # configure_optimizers gave none, so whatever the module steps is unknown here.
        self._stepped = by_hand and all(isinstance(one, _MockOptimizer) for one in trainer.optimizers)

        def note(*_: object) -> None:
            self._stepped = True

        for one in trainer.optimizers:
            if isinstance(one, Optimizer):  # a strategy may have wrapped it in a class of its own
                one.register_step_post_hook(note)

    def _require_counted(self, trainer: Trainer) -> None:
        if self._stepped:
            raise ConfigError(
                "the module steps its optimizers past Lightning, which counts none of these steps: nothing would be "
                "saved, and the training would be taken for hung",
                where=f"{type(trainer.lightning_module).__name__}.training_step",
                found=f"global_step={trainer.global_step} after a batch that trained",
                expected=f"more than {self._step}",
                remedy="return them from configure_optimizers, and step what self.optimizers() returns",
            )

    def _take_up(self, place: _Place, trainer: Trainer, loaders: list[object]) -> None:
        self._say_what_moved(place, trainer)
        if not place.in_epoch:
            # With max_steps, Lightning 2.6 would give the finished epoch one batch more, and count it twice.
            trainer.fit_loop.epoch_loop.restarting = False
        trainer.fit_loop._last_train_dl_reload_epoch = (
            place.made_in
        )  # the next ones are made when they were due
        # Otherwise the end of this epoch would skip a ReduceLROnPlateau for lack of its metric, which is here.
        trainer.fit_loop._restarting = False
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in place.metrics.items()})
        for loader, began in zip(loaders, place.loaders, strict=False):
            if isinstance(loader, ResumableDataLoader):
                # Lightning restores rank 0's loader state on every rank; each rank's own place replaces it.
                loader.forget()
                if place.in_epoch and began is not None:
                    loader.resume(place.served, began, place.generators)
        # Last: making iterators and loading a checkpoint draw from the same generators.
        rng.restore(place.generators)

    def _say_what_moved(self, place: _Place, trainer: Trainer) -> None:
        if place.in_epoch:  # the next epoch begins at its start, whatever its batches are
            tell_moved(self.session, place.data, _data(trainer))
        # Only the training's end can be in mid-epoch without the place in it.
        elif place.served < trainer.num_training_batches < math.inf and place.data == _data(trainer):
            self.session.notice(
                f"the run was done after {place.served} of {trainer.num_training_batches} batches of an epoch, which "
                "Lightning takes for a whole one: the rest is left out, and the next epoch begins. A max_steps at an "
                "epoch's end leaves out nothing",
                loud=True,
            )
        every = trainer.reload_dataloaders_every_n_epochs
        if every and place.made_in != trainer.current_epoch:
            self.session.notice(
                f"reload_dataloaders_every_n_epochs={every}: this attempt made its loaders in epoch "
                f"{trainer.current_epoch}, and without the interruption they would be those of epoch {place.made_in}: "
                "data that train_dataloader chooses by the epoch differ until they are made again. Choose the data of "
                "an epoch in the data set or its sampler",
                loud=True,
            )
        now = _directories(trainer)
        if self.is_adopted:
            if shared := {*now} & {*place.directories} - {""}:
                self.session.notice(
                    f"ModelCheckpoint has the directory of the run that it goes on from ({', '.join(shared)}): it "
                    "removes that run's best files as this run gets better ones. Give it a dirpath of its own",
                    loud=True,
                )
            return
        if now != place.directories:
            self.session.notice(
                f"ModelCheckpoint has another directory than before the interruption ({', '.join(now) or 'none'}, not "
                f"{', '.join(place.directories) or 'none'}): it has forgotten its best checkpoint and score. Give it "
                "a dirpath that is the same in each attempt",
                loud=True,
            )
        if (versions := _versions(trainer)) != place.versions:
            self.session.notice(
                f"a logger goes on under another version than before the interruption ({versions}; before "
                f"{place.versions}): its numbers are in two places. Give it a version",
                loud=True,
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        saver = self._saver
        if saver is None:
            return
        if trainer.global_step == self._step:
            self._require_counted(trainer)
            return  # gradients are being accumulated
        former, self._step, self._stepped = self._step, trainer.global_step, False
        step, every = self._step, self._every or saver.every_steps
        self._metrics = plain_numbers(trainer.logged_metrics)
        # The step's end is reported before it is asked for a save: reports and rows are in the order of the steps.
        saver.step_done(step, self._metrics)
        # Announced here though the save may follow a validation: the daemon allows that time, too.
        if saver.asked() is not None:
            saver.begins(step)
        # Remembered: the save is made by the hook after which all of this step is done.
        # Several optimizers count several steps in one batch, and may stride over the multiple.
        self._due = saver.request is not None or step // every > former // every
        # At the epoch's last batch Lightning still has schedules and callbacks to run, so the save waits for the next
        # epoch.
        if not _is_at_max(trainer) and not trainer.is_last_batch and not _validates_now(trainer):
            self._save(trainer, in_epoch=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since = self.session.clock()

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.session.alive()

    # What follows the training inside of a `with` block.
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._saver is None or trainer.sanity_checking:
            return
        self.session.leave_out(self._since)
        self._metrics |= plain_numbers(trainer.callback_metrics)
        # As above: after an epoch's last batch the save comes at the start of the next one.
        if not _is_at_max(trainer) and not trainer.is_last_batch:
            self._save(trainer, in_epoch=True)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Runs where all of the previous epoch is done, including Lightning's work after `on_train_epoch_end`."""
        # The first call of a start is no epoch's end. Taken up in mid-epoch, Lightning does not make that call.
        if self._saver is None or not self._began_epoch:
            self._began_epoch = True
            return
        self._due = self._saver.asked() is not None or self._due  # also during the validation
        self._save(trainer, in_epoch=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._saver is None:
            return
        self._save_last(trainer)
        self._finished_at = self._step

    # ---- what they have in common

    def _save_last(self, trainer: Trainer) -> None:
        if self._saver is None:
            return
        # The last step is always saved, whatever `every_n_steps` says, and an open request gets its answer.
        self._due = self._saver.saved_step != self._step or self._saver.request is not None
        self._save(trainer, in_epoch=False, last=True)

    def _save(self, trainer: Trainer, *, in_epoch: bool, last: bool = False) -> None:
        """Saves where a save is due. If the job ends, raises SystemExit(0), unless the training is done."""
        saver, step = self._saver, self._step
        assert saver is not None
        if not self._due:
            return
        # Cleared before the save: one that fails is not repeated at the next hook of the same step.
        self._due, name = False, f"step_{step}"

        def write() -> None:
            # Every rank: Lightning's save is collective, and each rank adds its own place.
            written = private_dir(saver.work / name, inside=saver.work)
            # Whole: with the weights alone nothing could be resumed.
            trainer.save_checkpoint(written / _FILE, weights_only=False)
            for logger in trainer.loggers:
                logger.save()  # rows up to the checkpoint outlast a kill
            place = _where(trainer, in_epoch=in_epoch)
            write_file(written / _place_name(self.session.rank), msgspec.msgpack.encode(place))

        if saver.saved_step != step or saver.request is not None:
            why = f"step {step} is one to save"
            failure = saver.save(step, saver.files(name, write), metrics=self._metrics, why=why, last=last)
            if failure is not None and last:
                raise failure
        # At the end of the training the run is done, and must be reported so instead of stopped.
        if saver.stopping is not None and not last:
            saver.leave()
            self._leave()


def _averaging(trainer: Trainer) -> list[WeightAveraging]:
    return [one for one in trainer.callbacks if isinstance(one, WeightAveraging)]


def _where(trainer: Trainer, *, in_epoch: bool) -> _Place:
    return _Place(
        generators=rng.capture(),
        in_epoch=in_epoch,
        # `batch_idx` is the batch that has just been trained on, from 0.
        served=trainer.fit_loop.batch_idx + 1,
        metrics=plain_numbers(trainer.callback_metrics),
        loaders=[
            loader.epoch_began if isinstance(loader, ResumableDataLoader) else None
            for loader in _flat(trainer.train_dataloader)
        ],
        # In mid-epoch Lightning has not counted the last one yet.
        batches=trainer.fit_loop.epoch_loop._batches_that_stepped + in_epoch,
        versions=_versions(trainer),
        directories=_directories(trainer),
        made_in=int(trainer.fit_loop._last_train_dl_reload_epoch),
        data=_data(trainer),
    )


def _data(trainer: Trainer) -> dict[str, int]:
    found: dict[str, int] = {}
    for at, loader in enumerate(_flat(trainer.train_dataloader)):
        # Of another one no place is kept, which is said elsewhere.
        if isinstance(loader, ResumableDataLoader):
            size = getattr(loader.batch_sampler, "batch_size", None)
            # Of Lightning's own sampler, which several ranks have. Others shuffle by the restored generators.
            seed = getattr(loader.sampler, "seed", None)
            found |= counted_in(loader, f"loader{at or ''}.", batch_size=size, sampler_seed=seed)
    return found


def _versions(trainer: Trainer) -> list[int | str | None]:
    return [logger.version for logger in trainer.loggers]


def _directories(trainer: Trainer) -> list[str]:
    found = (one.dirpath for one in trainer.callbacks if isinstance(one, ModelCheckpoint))
    return [str(one or "") for one in found]


def _go_on_logging(trainer: Trainer, place: _Place, *, is_first: bool) -> None:
    """Has each logger go on where it was. Before a logger is used for the first time."""
    # By itself each start takes a new `version_N`, and a `ModelCheckpoint`, whose directory lies in it, then forgets
    # its best.
    for logger, version in zip(trainer.loggers, place.versions, strict=False):
        # None: the user has given none, and the logger has not looked for the next one yet.
        if getattr(logger, "_version", "") is None:
            logger._version = version
        if is_first and isinstance(logger, CSVLogger):
            _keep_rows(logger, place.batches)


def _keep_rows(logger: CSVLogger, batches: int) -> None:
    """Keeps the rows of the first `batches`."""
    path = Path(logger.log_dir) / "metrics.csv"
    try:
        with open(path, newline="") as file:
            rows = [row for row in csv.DictReader(file) if int(row["step"]) < batches]
    except (OSError, KeyError, TypeError, ValueError, csv.Error):
        return  # none, or not one of its own
    # The logger's first use removes the file of an earlier attempt.
    writer = logger.experiment
    if rows:
        # As if this process had logged them.
        writer.metrics = [{name: value for name, value in row.items() if value} for row in rows]
        writer.save()


def _place_name(rank: int) -> str:
    return f"rank_{rank:04d}.msgpack"


def _read_place(path: Path) -> _Place:
    try:
        return msgspec.msgpack.decode(read_regular(path, RECORD), type=_Place)
    except (OSError, ValueError) as error:
        raise CheckpointCorrupt(
            "the place of this rank cannot be read",
            where=path,
            found=error,
            expected="as guest.lightning writes it",
        ) from error


def _flat(loaders: Any) -> Iterator[object]:
    """Flattens what Lightning allows: one loader, or lists and maps of them."""
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, list | tuple):
        for loader in loaders:
            yield from _flat(loader)
    elif loaders is not None:
        yield loaders


def _is_at_max(trainer: Trainer) -> bool:
    """Returns whether `max_steps` is reached; of several optimizers' steps the last ones may be beyond it."""
    return bool(0 < trainer.max_steps <= trainer.global_step)


def _validates_now(trainer: Trainer) -> bool:
    """Returns whether a validation follows this batch. Repeats Lightning's own decision, which it does not expose."""
    every, epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
    if not trainer.enable_validation or every is None or every == math.inf:
        return False
    if epochs is None:
        return bool((trainer.fit_loop.total_batch_idx + 1) % every == 0)
    return (trainer.current_epoch + 1) % epochs == 0 and bool((trainer.fit_loop.batch_idx + 1) % every == 0)


def _ignore_warnings(trainer: Trainer) -> None:
    """Has TERM and USR1 ignored, as the daemon set them: they are its business."""
    # Lightning handles TERM itself, in every environment, and then ends with an error at the end of a batch. To the
    # daemon TERM is a warning and not an end, and only one program may requeue a job.
    # Python allows signal handlers to be set in the main thread alone.
    if threading.current_thread() is threading.main_thread():
        # USR1 is what Lightning requeues at; TERM is what Slurm sends to every process when a preemption begins.
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
    # A TERM that came before our handlers would still end the training at the next batch.
    trainer._signal_connector.received_sigterm = False
