"""The real Lightning `Trainer` as a guest, in this process: asked, stopped, resumed, done."""

import csv
import os
import signal
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import get_linear_schedule_with_warmup

from tests.fakes.daemon import Daemon
from tests.loops.frames_kit import Clock, Listening, Run, stop
from verl_slurm.base.errors import ConfigError, DataError
from verl_slurm.wire.messages import Finished, RankNotice, RankSaved, SaveRequest, SaveStarted

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::Warning"),
]  # Lightning's own, of all kinds

lightning = pytest.importorskip(
    "lightning", reason="NOT RUN: lightning is not installed (pip install '.[dev]')"
)

from lightning.pytorch.callbacks import (  # noqa: E402
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
)
from lightning.pytorch.cli import SaveConfigCallback  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.plugins.environments import SLURMEnvironment  # noqa: E402

from verl_slurm.base.run_id import note_adopted  # noqa: E402
from verl_slurm.checkpoint.store.verify import read_manifest  # noqa: E402
from verl_slurm.loops.lightning import ResumableDataLoader, VerlSlurmCheckpoint  # noqa: E402
from verl_slurm.loops.session import Session  # noqa: E402
from verl_slurm.wire.client import NoDaemon  # noqa: E402


class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Five batches of four; `noisy`: augmented at random, as images are."""

    def __init__(self, *, noisy: bool = False, length: int = 20) -> None:
        self._noisy, self._length = noisy, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x + torch.randn(8) * 0.01 if self._noisy else x, x.sum()


class Net(lightning.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self, schedule: str = "", lr: float = 1e-2) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
        self._schedule, self.lr = schedule, lr

    def _loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x).squeeze(-1), y)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        if self._schedule != "plateau":
            return optimizer
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, factor=0.5, threshold=9.0
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class ByHand(Net):
    """Two optimizers, both stepped in each batch."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(layer.parameters(), lr=self.lr) for layer in (self.net[0], self.net[3])]

    def stepped(self) -> list[Any]:
        return list(self.optimizers())

    def training_step(self, batch: Any, index: int) -> None:
        self.net.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        for each in self.stepped():
            each.step()


class OneStepThenTwos(ByHand):
    def stepped(self) -> list[Any]:
        return list(self.optimizers())[: 1 if self.trainer.global_step == 0 else 2]


class PastLightning(ByHand):
    def stepped(self) -> list[Any]:
        return list(self.optimizers(use_pl_optimizer=False))


class UnknownToLightning(ByHand):
    """Its optimizer is its own affair."""

    def configure_optimizers(self) -> None:
        self.own = torch.optim.AdamW(self.parameters(), lr=self.lr)

    def stepped(self) -> list[Any]:
        return [self.own]


class Life:
    """One attempt: what it was told to do, and what came of it."""

    def __init__(
        self,
        session: Session,
        *callbacks: Any,
        every: int | None = None,
        noisy: bool = False,
        validates: int = 0,
        schedule: str = "",
        lr: float = 1e-2,
        loader: type[Any] = ResumableDataLoader,
        workers: int = 0,
        batch_size: int = 4,
        length: int = 20,
        model: type[Net] = Net,
        fit: Mapping[str, object] | None = None,
        **settings: Any,
    ) -> None:
        lightning.seed_everything(3, verbose=False)
        self.model = model(schedule, lr)
        words = {
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": session.paths.root / "pl",
        } | settings
        if "max_steps" not in words:
            words.setdefault("max_epochs", 3)
        self.service = VerlSlurmCheckpoint(every, session)
        self.trainer = lightning.Trainer(callbacks=[self.service, *callbacks], **words)
        numbers = Numbers(noisy=noisy, length=length)
        data = loader(numbers, batch_size=batch_size, shuffle=True, num_workers=workers)
        held_out = [torch.utils.data.DataLoader(Numbers(), batch_size=validates)] if validates else []
        self.stopped = False
        try:
            self.service.fit(self.trainer, self.model, data, *held_out, **(fit or {}))
        except SystemExit as leave:
            self.stopped = leave.code == 0

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


class Killed(lightning.Callback):  # type: ignore[misc,name-defined]
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 6:
            raise RuntimeError("killed")


CASES: dict[str, dict[str, Any]] = {
    "epochs": {},
    "max-steps": {"max_steps": 12},
    "accumulated": {"accumulate_grad_batches": 2},
    "augmented-in-workers": {"noisy": True, "workers": 1, "max_epochs": 2},
    "validated-in-mid-epoch": {"validates": 20, "val_check_interval": 3, "schedule": "plateau"},
    "plateau": {"validates": 20, "schedule": "plateau"},
    "part-of-the-data": {"limit_train_batches": 3, "noisy": True},
    "two-optimizers": {"model": ByHand},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_a_run_stopped_at_any_step_ends_bit_for_bit_as_if_it_had_not_been(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    daemon = Daemon()
    straight = Life(Run(tmp_path / "straight").life(daemon), **settings)
    steps = daemon.steps()
    of_epoch = {"accumulated": 3, "part-of-the-data": 3}.get(_name(settings), 5)
    for batch in sorted({2, of_epoch, of_epoch + 3}):  # in an epoch, at its end, in the next one
        step = steps[batch]
        run = Run(tmp_path / str(step))
        assert Life(run.life(Daemon({step: stop()})), **settings).stopped
        ended = Daemon()
        resumed = Life(run.life(ended), **settings)
        assert ended.steps() == steps[batch:]
        assert torch.equal(resumed.weights, straight.weights), f"stopped at {step}"
        assert [message.step for message in ended.heard(Finished)] == steps[-1:]
        assert resumed.trainer.current_epoch == straight.trainer.current_epoch


def test_a_run_stopped_again_and_again_ends_bit_for_bit_as_if_it_had_not_been(tmp_path: Path) -> None:
    straight = Life(Run(tmp_path / "straight").life(Daemon()), validates=20)
    run = Run(tmp_path / "run")
    for step in (2, 5, 6, 10, 13):
        daemon = Daemon({step: stop()})
        assert Life(run.life(daemon), validates=20).stopped
        assert [message.name for message in daemon.heard(RankSaved)] == [f"step_{step:06d}"]
    assert torch.equal(Life(run.life(Daemon()), validates=20).weights, straight.weights)


def _name(settings: dict[str, Any]) -> str:
    return next(name for name, case in CASES.items() if case == settings)


@pytest.mark.parametrize("model", [PastLightning, UnknownToLightning])
def test_optimizers_that_are_stepped_past_lightning_are_refused_at_the_first_batch(
    tmp_path: Path, model: type[Net]
) -> None:
    """Lightning counts no step of theirs, so that no step would ever be saved."""
    daemon = Daemon()
    with pytest.raises(ConfigError, match=r"steps its optimizers past Lightning.*self\.optimizers\(\)"):
        Life(Run(tmp_path / "run").life(daemon), model=model)
    assert daemon.kinds() == ["RankRefused"]
    assert daemon.steps() == [0]


def test_a_count_that_strides_over_a_step_to_save_is_saved_at_the_next_one(tmp_path: Path) -> None:
    daemon = Daemon()
    Life(Run(tmp_path / "run").life(daemon), model=OneStepThenTwos, every=4, max_epochs=2)
    assert daemon.steps() == [0, *range(1, 20, 2)]
    assert [message.name for message in daemon.heard(RankSaved)] == [
        f"step_{step:06d}" for step in (5, 9, 13, 17, 19)
    ]


def test_asked_at_a_last_step_that_is_beyond_max_steps_it_is_done_and_not_stopped(tmp_path: Path) -> None:
    daemon = Daemon({6: stop()})
    assert not Life(Run(tmp_path / "run").life(daemon), model=ByHand, max_steps=5).stopped
    assert daemon.kinds() == ["SaveStarted", "PartSaved", "RankSaved", "Finished"]


def test_what_is_asked_during_a_validation_is_done_before_the_next_step(tmp_path: Path) -> None:
    class AskedMeanwhile(lightning.Callback):  # type: ignore[misc,name-defined]
        def on_validation_start(self, trainer: Any, *_: Any) -> None:
            if not trainer.sanity_checking:
                daemon.asked = stop()

    daemon = Daemon()
    assert Life(Run(tmp_path / "run").life(daemon), AskedMeanwhile(), validates=20).stopped
    assert [message.step for message in daemon.heard(SaveStarted)] == [5]


class TakesTime(lightning.Callback):  # type: ignore[misc,name-defined]
    """A step takes a second, a batch of a validation 100; before step 7, two after one, it is asked."""

    def __init__(self, clock: Clock, session: Session) -> None:
        self.clock, self.session, self.found = clock, session, list[Any]()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.clock.seconds += 1.0
        if trainer.global_step == 6:
            self.found.append(self.session.reach(SaveRequest(request_id=1, stop=True, seconds_left=60.0)))

    def on_validation_batch_start(self, *_: Any) -> None:
        self.clock.seconds += 100.0


def test_a_validation_that_outlasts_hang_floor_s_is_no_silence_and_no_steps_time(tmp_path: Path) -> None:
    clock = Clock()
    daemon = Listening(clock)
    session = Run(tmp_path / "run").life(daemon, clock)
    timed = TakesTime(clock, session)
    Life(session, timed, validates=4, max_epochs=2)
    assert clock() >= 1000.0, "two validations of five batches"
    assert daemon.longest_silence_s <= 101.0
    # That of Lightning's sanity check counts to loading.
    assert daemon.kinds()[0] == "RankStarted"
    assert [(one.ok, "up to 1.0 s" in one.reason) for one in timed.found] == [(True, True)], timed.found


def test_slurms_term_and_usr1_end_nothing_and_requeue_nothing(tmp_path: Path) -> None:
    """Lightning takes TERM for itself, and left alone ends with an error at the end of the batch."""

    class Signalled(lightning.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            for number in (signal.SIGTERM, signal.SIGUSR1):
                os.kill(os.getpid(), number)

    before = [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGUSR1)]
    try:
        daemon = Daemon()
        Life(Run(tmp_path / "run").life(daemon), Signalled(), validates=20, max_epochs=1)
        assert [message.step for message in daemon.heard(Finished)] == [5]
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGUSR1), before, strict=True):
            signal.signal(number, handler)


def test_a_loader_that_cannot_be_resumed_is_told_of(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    first, second = Daemon({2: stop()}), Daemon()
    Life(run.life(first), loader=torch.utils.data.DataLoader)
    Life(run.life(second), loader=torch.utils.data.DataLoader)
    assert [message.loud for message in (*first.heard(RankNotice), *second.heard(RankNotice))] == [
        False,
        True,
    ]
    assert all("ResumableDataLoader" in message.text for message in second.heard(RankNotice))


def test_a_rate_that_the_program_changed_between_two_attempts_is_said_not_to_be_used(tmp_path: Path) -> None:
    run, same, changed = Run(tmp_path / "run"), Daemon({4: stop()}), Daemon()
    Life(run.life(Daemon({2: stop()})), schedule="plateau", validates=20)
    Life(run.life(same), schedule="plateau", validates=20)
    last = Life(run.life(changed), schedule="plateau", validates=20, lr=1e-5)
    assert not any("are not used" in message.text for message in same.heard(RankNotice))
    [said] = [message for message in changed.heard(RankNotice) if "are not used" in message.text]
    assert said.loud
    assert "optimizer.lr=1e-05 (0.01)" in said.text
    assert last.trainer.optimizers[0].param_groups[0]["lr"] > 1e-5


@pytest.mark.parametrize(
    ("step", "change", "said"),
    [
        (7, {}, []),
        (7, {"batch_size": 2}, ["loader.batch_size=2 (4)"]),
        (7, {"length": 24}, ["loader.samples=24 (20)"]),
        (5, {"batch_size": 2}, []),  # the next epoch begins at its start
    ],
    ids=["none", "batch", "data", "between-epochs"],
)
def test_a_changed_batch_size_or_data_set_in_mid_epoch_is_said(
    tmp_path: Path, step: int, change: dict[str, Any], said: list[str]
) -> None:
    run, daemon = Run(tmp_path / "run"), Daemon()
    Life(run.life(Daemon({step: stop()})))
    Life(run.life(daemon), **change)
    notices = [notice for notice in daemon.heard(RankNotice) if "place in the data" in notice.text]
    assert [(notice.loud, notice.topic) for notice in notices] == [(True, "rates")] * len(said)
    assert all(words in notice.text for words, notice in zip(said, notices, strict=True))


def test_no_data_is_refused_and_not_taken_for_the_end(tmp_path: Path) -> None:
    daemon = Daemon()
    with pytest.raises(DataError, match="trained no step"):
        Life(Run(tmp_path / "run").life(daemon), limit_train_batches=0)
    assert daemon.kinds() == ["RankRefused"]


def test_lightnings_own_requeueing_is_refused_with_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    daemon = Daemon()
    with pytest.raises(ConfigError, match="SLURMEnvironment among the Trainer's plugins"):
        Life(Run(tmp_path / "run").life(daemon), plugins=[SLURMEnvironment()])
    assert daemon.kinds() == ["RankRefused"]


def test_a_checkpoint_of_lightnings_own_requeueing_is_not_gone_on_from_in_silence(tmp_path: Path) -> None:
    run, daemon = Run(tmp_path / "run"), Daemon()
    (run.paths.root / "pl").mkdir()
    (run.paths.root / "pl/hpc_ckpt_1.ckpt").touch()
    with pytest.raises(ConfigError, match="hpc_ckpt_1.ckpt, which Lightning would go on from by itself"):
        Life(run.life(daemon))
    assert daemon.kinds() == ["RankRefused"]


@pytest.mark.parametrize("own", [None, "last"])
def test_the_checkpoint_of_the_run_takes_the_place_of_one_that_the_script_names(
    tmp_path: Path, own: str | None
) -> None:
    run, asked, daemon = Run(tmp_path / "run"), Daemon({4: stop()}), Daemon()
    for each in (asked, daemon):
        Life(run.life(each), fit={"ckpt_path": own})
    assert daemon.steps()[0] == 4
    said = [notice.text for notice in daemon.heard(RankNotice)]
    assert [text.partition(": the run goes on from ")[0] for text in said] == (
        ["ckpt_path=last is not used"] if own else []
    )


def test_a_training_that_loads_another_state_after_the_checkpoint_is_refused(tmp_path: Path) -> None:
    class Again(lightning.pytorch.callbacks.Callback):  # type: ignore[misc,name-defined]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = 0

    run, daemon = Run(tmp_path / "run"), Daemon()
    Life(run.life(Daemon({4: stop()})))
    with pytest.raises(ConfigError, match=r"found step 0, expected step 4"):
        Life(run.life(daemon), Again())
    assert "RankRefused" in daemon.kinds()


def test_a_learning_rate_is_looked_for_once(tmp_path: Path) -> None:
    def finder() -> Any:
        return LearningRateFinder(num_training_steps=20)

    ended = Daemon()
    straight = Life(Run(tmp_path / "straight").life(Daemon()), finder())
    run = Run(tmp_path / "run")
    assert Life(run.life(Daemon({4: stop()})), finder()).stopped
    resumed = Life(run.life(ended), finder())
    assert torch.equal(straight.weights, resumed.weights)
    assert any("not run again" in notice.text for notice in ended.heard(RankNotice))


def test_a_batch_size_that_no_checkpoint_keeps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="BatchSizeFinder"):
        Life(Run(tmp_path / "run").life(Daemon()), BatchSizeFinder())


def test_loaders_are_made_again_when_they_would_be_without_the_interruption(tmp_path: Path) -> None:
    run, asked, daemon = Run(tmp_path / "run"), Daemon({22: stop()}), Daemon()
    settings = {"reload_dataloaders_every_n_epochs": 3, "max_epochs": 7}
    assert Life(run.life(asked), **settings).stopped
    assert not asked.heard(RankNotice)
    resumed = Life(run.life(daemon), **settings)
    assert resumed.trainer.fit_loop._last_train_dl_reload_epoch == 6
    [notice] = daemon.heard(RankNotice)
    assert notice.loud
    assert "in epoch 4, and without the interruption they would be those of epoch 3" in notice.text


def test_without_a_daemon_it_is_a_trainer_like_any_other(tmp_path: Path) -> None:
    service = VerlSlurmCheckpoint(session=Session(NoDaemon(), rank=0, world_size=1))
    trainer = lightning.Trainer(
        callbacks=[service], max_steps=3, default_root_dir=tmp_path, logger=False, enable_progress_bar=False
    )
    service.fit(trainer, Net(), ResumableDataLoader(Numbers(), batch_size=4, shuffle=True))
    assert trainer.global_step == 3


class BestIsFirst(lightning.pytorch.callbacks.Callback):  # type: ignore[misc,name-defined]
    """Logs a score that is best in the first epoch."""

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("score", 1.0 if trainer.current_epoch == 0 else 0.1)


def _with_logger(
    run: Run, daemon: Daemon, best: dict[str, Any] | None = None, **settings: Any
) -> tuple[Any, Any, Life]:
    best = ModelCheckpoint(monitor="score", mode="max", filename="best-{epoch}", **(best or {}))
    logger = CSVLogger(run.paths.root / "csv", flush_logs_every_n_steps=1)
    words = {"validates": 20, "log_every_n_steps": 1, "logger": logger} | settings
    # LightningCLI adds it; by itself it refuses a directory that has the file already.
    config = SaveConfigCallback(mock.Mock(save=_saved), Namespace())
    return best, logger, Life(run.life(daemon), BestIsFirst(), best, config, **words)


def _saved(config: Namespace, path: str, *, overwrite: bool, **_: Any) -> None:
    assert overwrite or not Path(path).exists()
    Path(path).write_text(str(config))


# Lightning logs a step after the callbacks that leave with it: the row of a step in mid-epoch is not written.
# Rows are counted in batches, however many steps those have.
@pytest.mark.parametrize(
    ("step", "lost", "model"), [(7, {6}, Net), (10, set(), Net), (14, {6}, ByHand), (20, set(), ByHand)]
)
def test_a_best_checkpoint_and_the_loggers_directory_outlast_an_interruption(
    tmp_path: Path, step: int, lost: set[int], model: type[Net]
) -> None:
    run = Run(tmp_path / "run")
    first, logger, life = _with_logger(run, Daemon({step: stop()}), model=model)
    assert life.stopped
    # A row of a step that is done again: a killed attempt has gone further than its checkpoint.
    file = Path(logger.log_dir) / "metrics.csv"
    header, *rows = file.read_text().splitlines()
    redone = "12" if model is ByHand else "99"
    file.write_text("\n".join([header, *rows, ",".join(redone for _ in header.split(","))]) + "\n")
    daemon = Daemon()
    second, again, _ = _with_logger(run, daemon, model=model)
    assert again.log_dir == logger.log_dir
    assert (second.best_model_path, float(second.best_model_score)) == (first.best_model_path, 1.0)
    assert Path(second.best_model_path).is_file()
    with file.open(newline="") as lines:
        steps = [int(row["step"]) for row in csv.DictReader(lines) if row["loss"]]
    assert steps == sorted(set(range(15)) - lost)
    assert not [notice for notice in daemon.heard(RankNotice) if "interruption" in notice.text]


class Rising(lightning.pytorch.callbacks.Callback):  # type: ignore[misc,name-defined]
    """Logs a score that is better at each validation."""

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("score", float(trainer.global_step))


def test_the_best_of_a_validation_is_in_the_checkpoint_of_its_step(tmp_path: Path) -> None:
    run, words = Run(tmp_path / "run"), {"validates": 20, "val_check_interval": 3, "logger": False}

    def lived(daemon: Daemon) -> ModelCheckpoint:
        best = ModelCheckpoint(tmp_path / "best", monitor="score", mode="max")
        assert Life(run.life(daemon), Rising(), best, **words).stopped
        return best

    assert [float(lived(Daemon({step: stop()})).best_model_score) for step in (3, 4)] == [3.0, 3.0]


def test_a_best_checkpoint_that_is_forgotten_is_said(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    assert _with_logger(run, Daemon({7: stop()}))[2].stopped
    daemon = Daemon()
    _with_logger(run, daemon, logger=CSVLogger(run.paths.root / "another"))
    [said] = [notice for notice in daemon.heard(RankNotice) if "forgotten" in notice.text]
    assert said.loud
    assert "another" in said.text


@pytest.mark.parametrize("shared", [False, True])
def test_a_run_that_goes_on_from_anothers_checkpoint_leaves_that_runs_logs_and_best_files(
    tmp_path: Path, shared: bool
) -> None:
    run, daemon = Run(tmp_path / "run"), Daemon()
    where = {"dirpath": tmp_path / "best"} if shared else {}
    first, logger, life = _with_logger(run, Daemon({10: stop()}), best=where)
    rows = (Path(logger.log_dir) / "metrics.csv").read_bytes()
    note_adopted(run.paths, read_manifest(run.checkpoints()[-1]).digest)
    _, again, _ = _with_logger(run, daemon, best=where)
    assert life.stopped
    assert again.log_dir != logger.log_dir
    assert (Path(logger.log_dir) / "metrics.csv").read_bytes() == rows
    assert Path(first.best_model_path).is_file()
    said = [notice.text for notice in daemon.heard(RankNotice) if "ModelCheckpoint" in notice.text]
    assert [str(tmp_path / "best") in text for text in said] == [True] * shared, said


class Falling(Net):
    """Its rate falls to zero at the last step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = get_linear_schedule_with_warmup(optimizer, 0, self.trainer.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_a_longer_schedule_is_said(tmp_path: Path) -> None:
    run, daemon = Run(tmp_path / "run"), Daemon()
    Life(run.life(Daemon()), model=Falling, max_steps=10)
    Life(run.life(daemon), model=Falling, max_steps=15)
    [said] = daemon.notices("rates")
    assert "scheduler.num_training_steps=15 (10) change the schedule" in said


@pytest.mark.parametrize("step", [3, 10], ids=["stopped", "done"])
def test_a_longer_run_goes_on_from_the_weights_and_not_from_their_averages(tmp_path: Path, step: int) -> None:
    def averages() -> Any:
        return EMAWeightAveraging(decay=0.5)

    twin = Life(Run(tmp_path / "twin").life(Daemon()), averages(), max_steps=13)
    run = Run(tmp_path / "run")
    Life(run.life(Daemon({3: stop()} if step == 3 else {})), averages(), max_steps=10)
    longer = Life(run.life(Daemon()), averages(), max_steps=13)
    assert torch.equal(longer.weights, twin.weights)


def test_a_start_after_the_last_step_leaves_the_averages_in_the_model(
    tmp_path: Path,
) -> None:
    run, daemon = Run(tmp_path / "run"), Daemon()
    first = Life(run.life(Daemon()), EMAWeightAveraging(decay=0.5), max_steps=5)
    again = Life(run.life(daemon), EMAWeightAveraging(decay=0.5), max_steps=5)
    assert torch.equal(again.weights, first.weights)
    assert [message.step for message in daemon.heard(Finished)] == [5]


@pytest.mark.parametrize(("first", "left"), [(6, True), (5, False)], ids=["in-mid-epoch", "at-an-epochs-end"])
def test_a_longer_run_that_leaves_out_the_rest_of_an_epoch_says_so(
    tmp_path: Path, first: int, left: bool
) -> None:
    run, daemon = Run(tmp_path / "run"), Daemon()
    Life(run.life(Daemon()), max_steps=first)
    Life(run.life(daemon), max_steps=12)
    assert [(notice.loud, "after 1 of 5 batches" in notice.text) for notice in daemon.heard(RankNotice)] == [
        (True, True)
    ] * left


def test_a_patience_that_the_program_changed_between_two_attempts_is_used(tmp_path: Path) -> None:
    run, daemon = Run(tmp_path / "run"), Daemon()

    def lived(daemon: Daemon, patience: int) -> Life:
        stops = EarlyStopping("score", mode="max", patience=patience)
        return Life(run.life(daemon), BestIsFirst(), stops, validates=20, max_epochs=5)

    assert lived(Daemon({12: stop()}), 9).stopped
    lived(daemon, 2)
    assert [message.step for message in daemon.heard(Finished)] == [15]
