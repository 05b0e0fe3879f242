"""The real Hugging Face `Trainer` as a guest, in this process: asked, stopped, resumed, done."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.fakes.daemon import Daemon
from tests.lanes import with_variants
from tests.loops.frames_kit import Clock, Listening, Run, stop
from verl_slurm.base.errors import ConfigError, DataError
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.wire.messages import (
    Finished,
    Progress,
    RankNotice,
    RankSaved,
    RankSaveFailed,
    SaveRequest,
    SaveStarted,
)

pytest.importorskip("accelerate", reason="NOT RUN: accelerate is not installed (pip install '.[dev]')")
pytestmark = pytest.mark.torch

from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments, set_seed  # noqa: E402

from verl_slurm.loops.huggingface import VerlSlurmCallback  # noqa: E402
from verl_slurm.loops.session import Session  # noqa: E402
from verl_slurm.wire.client import NoDaemon  # noqa: E402


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Five batches of four."""

    def __init__(self, length: int = 20) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum()}


class Rows(Numbers):
    """The same, of different lengths."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= len(self):
            raise IndexError(index)
        return super().__getitem__(index) | {"input_ids": torch.zeros(1 + index % 7)}


class OnlyOnce(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Eight samples, and never again."""

    def __init__(self) -> None:
        self._left = iter([Numbers()[index] for index in range(8)])

    def __iter__(self) -> Any:
        return self._left


class SixteenInAPass(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Any:
        return iter([Numbers()[index] for index in range(16)])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.net(x).squeeze(-1)
        return {"loss": ((y - labels) ** 2).mean(), "logits": y}


class Life:
    """One attempt: what it was told to do, and what came of it."""

    def __init__(
        self,
        session: Session,
        *callbacks: TrainerCallback,
        data: Any = None,
        own: str | bool | None = None,
        **settings: Any,
    ) -> None:
        set_seed(3)
        self.model = Net()
        words = {
            "max_steps": 12,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 20,
            "save_strategy": "no",
            "logging_strategy": "no",
            "learning_rate": 1e-2,
            "lr_scheduler_type": "cosine",
        } | settings
        out = str(session.paths.root / "out") if session.has_run else "out"
        args = TrainingArguments(out, use_cpu=True, report_to=[], disable_tqdm=True, **words)
        self.service = VerlSlurmCallback(session)
        self.trainer = Trainer(
            self.model,
            args,
            train_dataset=data or Numbers(),
            eval_dataset=Numbers(),
            callbacks=[self.service, *callbacks],
        )
        self.stopped = False
        try:
            self.service.train(self.trainer, resume_from_checkpoint=own)
        except SystemExit as leave:
            self.stopped = leave.code == 0

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


class Killed(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 6:
            raise RuntimeError("killed")


def short(tmp_path: Path, service: VerlSlurmCallback, *more: TrainerCallback, **settings: Any) -> Trainer:
    """A Trainer of two steps that the callback has not begun to serve."""
    words = {"max_steps": 2, "use_cpu": True, "report_to": [], "disable_tqdm": True} | settings
    args = TrainingArguments(str(tmp_path / "out"), **words)
    return Trainer(Net(), args, train_dataset=Numbers(), callbacks=[service, *more])


PLATEAU = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "threshold": 9.0},
    "eval_strategy": "steps",
    "eval_steps": 2,
    "metric_for_best_model": "loss",
}


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    with_variants(
        {"dataloader_num_workers": 1},
        {"gradient_accumulation_steps": 2, "max_steps": 6},
        {"max_steps": -1, "num_train_epochs": 2},
        PLATEAU,
    ),
    ids=["max-steps-and-workers", "accumulated", "epochs", "plateau"],
)
def test_a_run_stopped_at_any_step_ends_bit_for_bit_as_if_it_had_not_been(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    daemon = Daemon()
    straight = Life(Run(tmp_path / "straight").life(daemon), **settings)
    total = max(daemon.steps())
    for step in sorted({2, 5, total - 1}):  # in an epoch, at its end, just before the end of all
        run = Run(tmp_path / str(step))
        assert Life(run.life(Daemon({step: stop()})), **settings).stopped
        ended = Daemon()
        resumed = Life(run.life(ended), **settings)
        assert ended.steps()[:2] == [step, step + 1]
        assert torch.equal(resumed.weights, straight.weights), f"stopped at {step}"
        assert [message.step for message in ended.heard(Finished)] == [total]


def test_saved_is_what_the_trainer_saves_and_at_each_every_steps_and_rotation_finds_nothing(
    tmp_path: Path,
) -> None:
    run, daemon = Run(tmp_path / "run", every_steps=5), Daemon()
    Life(run.life(daemon), save_strategy="steps", save_steps=4, save_total_limit=1, logging_steps=1)
    names = [message.name for message in daemon.heard(RankSaved)]
    assert names == [f"step_{step:06d}" for step in (4, 5, 8, 10, 12)]
    # Without it the daemon takes a slow save for silence.
    assert [(m.request_id, m.step) for m in daemon.heard(SaveStarted)] == [(0, s) for s in (4, 5, 8, 10, 12)]
    assert [path.name for path in run.checkpoints()] == names[-3:], "checkpoint.keep_last says how many stay"


def test_within_a_with_block_the_run_is_done_at_its_end_only(tmp_path: Path) -> None:
    run, daemon = Run(tmp_path / "run"), Daemon()
    with VerlSlurmCallback(run.life(daemon)) as service:
        service.train(short(tmp_path, service))
        assert not daemon.heard(Finished)
    assert daemon.heard(Finished)


def test_early_stopping_is_an_end_and_no_interruption(tmp_path: Path) -> None:
    class Enough(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 5

    daemon, run = Daemon(), Run(tmp_path / "run")
    Life(run.life(daemon), Enough())
    assert [message.step for message in daemon.heard(Finished)] == [5]
    assert run.checkpoints()[-1].name == "step_000005", "its last step is saved, as any other's"


def test_data_that_runs_out_is_refused_and_not_taken_for_the_end(tmp_path: Path) -> None:
    daemon, undispatched = Daemon(), {"dispatch_batches": False}
    with pytest.raises(DataError, match="no samples left"):
        Life(Run(tmp_path / "run").life(daemon), data=OnlyOnce(), accelerator_config=undispatched)
    assert daemon.kinds()[-1] == "RankRefused"


def test_save_strategy_best_does_not_overrule_the_daemon(tmp_path: Path) -> None:
    run, daemon = Run(tmp_path / "run"), Daemon({4: stop()})
    life = Life(
        run.life(daemon),
        EarlyStoppingCallback(99),
        save_strategy="best",
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model="loss",
        greater_is_better=True,  # so that none is ever the best
    )
    assert life.stopped
    assert run.checkpoints()[-1].name == "step_000004"
    assert life.trainer.args.save_strategy == "best"


def test_an_evaluation_for_which_there_is_no_time_is_left_out_and_said(tmp_path: Path) -> None:
    soon = SaveRequest(request_id=1, stop=True, seconds_left=1e-9)
    run, daemon = Run(tmp_path / "run"), Daemon({4: soon})
    assert Life(run.life(daemon), eval_strategy="steps", eval_steps=2).stopped
    [notice] = daemon.heard(RankNotice)
    assert "the evaluation of step 4 is left out" in notice.text
    assert notice.loud


def test_in_the_middle_of_a_step_it_says_so_where_the_end_comes_too_late(tmp_path: Path) -> None:
    class AskedAtAStep(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                daemon.asked = SaveRequest(request_id=1, stop=True, seconds_left=-1.0)
                assert daemon.refused_a_save.wait(60)

    run, daemon = Run(tmp_path / "run"), Daemon()
    Life(run.life(daemon), AskedAtAStep())
    [failed] = daemon.heard(RankSaveFailed)
    assert "the end of the step cannot be reached" in failed.reason
    assert daemon.told.index(failed) < daemon.told.index(daemon.heard(SaveStarted)[0])


class TakesTime(TrainerCallback):
    """A step takes a second, a batch of an evaluation 100."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.seconds += 1.0

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.seconds += 100.0


def test_an_evaluation_that_outlasts_hang_floor_s_is_no_silence(tmp_path: Path) -> None:
    clock = Clock()
    daemon = Listening(clock)
    run = Run(tmp_path / "run", every_steps=2)
    Life(
        run.life(daemon, clock),
        TakesTime(clock),
        max_steps=5,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=4,
    )
    assert clock() >= 1000.0, "two evaluations of five batches"
    assert daemon.longest_silence_s <= 101.0
    # The save that follows the evaluation keeps the limit of a save.
    assert isinstance(daemon.told[daemon.told.index(daemon.heard(RankSaved)[0]) - 2], SaveStarted)
    assert [message.phase for message in daemon.heard(Progress) if message.step == 4][1:] == []


def test_an_evaluation_is_not_expected_of_the_next_steps(tmp_path: Path) -> None:
    clock, found = Clock(), list[Any]()

    class Asks(TakesTime):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            super().on_step_begin(args, state, control, **kwargs)
            if state.global_step in (3, 6):
                found.append(session.reach(SaveRequest(request_id=1, stop=True, seconds_left=60.0)))

    session = Run(tmp_path / "run", every_steps=1000).life(Daemon(), clock)
    Life(session, Asks(clock), max_steps=7, eval_strategy="steps", eval_steps=2)
    assert [(one.ok, "up to 1.0 s" in one.reason) for one in found] == [(True, True)] * 2, found


def test_a_save_that_fails_loses_itself_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    run, daemon = Run(tmp_path / "run", every_steps=5), Daemon()
    session = run.life(daemon)
    with monkeypatch.context() as patched:
        patched.setattr("verl_slurm.loops.step_end.commit_tree", full)
        with pytest.raises(Exception, match="committing the checkpoint failed"):
            Life(session)  # the last step's is not lost in silence
    assert [type(m) for m in daemon.told if isinstance(m, RankSaveFailed)] == [RankSaveFailed] * 3
    assert not daemon.heard(Finished)
    assert not list(run.paths.work(1).iterdir())


def too_large_until(batch: int, at_step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has larger batches than `batch` not fit into memory from `at_step` on."""
    step = Trainer.training_step

    def tried(trainer: Trainer, model: Any, inputs: Any, *args: Any) -> Any:
        if len(inputs["x"]) > batch and trainer.state.global_step >= at_step:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        return step(trainer, model, inputs, *args)

    monkeypatch.setattr(Trainer, "training_step", tried)


@pytest.mark.long
def test_batches_that_did_not_fit_leave_the_output_directory_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_large_until(3, 0, monkeypatch)
    settings = {"auto_find_batch_size": True, "per_device_train_batch_size": 5}
    straight = Life(Run(tmp_path / "straight").life(Daemon()), **settings)
    run, asked, ended = Run(tmp_path / "run"), Daemon({4: stop()}), Daemon()
    assert Life(run.life(asked), **settings).stopped
    resumed = Life(run.life(ended), **settings)
    out = str(run.paths.root / "out")
    assert resumed.trainer.args.output_dir == out
    assert straight.trainer.args.output_dir == str(tmp_path / "straight/out")
    assert torch.equal(resumed.weights, straight.weights)
    assert ended.steps()[:2] == [4, 5]
    assert [(notice.loud, "did not fit" in notice.text) for notice in asked.heard(RankNotice)] == [
        (False, True)
    ] * 2
    assert not ended.heard(RankNotice), "the size that fits is in the checkpoint"


def test_steps_that_are_done_again_since_a_later_batch_did_not_fit_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_large_until(3, 3, monkeypatch)
    run, daemon = Run(tmp_path / "run", every_steps=2), Daemon()
    life = Life(run.life(daemon), auto_find_batch_size=True)
    [notice] = daemon.heard(RankNotice)
    assert notice.loud
    assert "Steps 1 to 3 are done again" in notice.text
    assert daemon.steps() == [0, 1, 2, 3, *range(13)]
    assert [message.step for message in daemon.heard(Finished)] == [12]
    assert life.trainer.args.output_dir == str(run.paths.root / "out")
    assert verify(run.checkpoints()[-1]).ok


def test_a_second_training_with_one_callback_is_refused(tmp_path: Path) -> None:
    run, daemon = Run(tmp_path / "run"), Daemon()
    with (
        pytest.raises(ConfigError, match="a run is one training"),
        VerlSlurmCallback(run.life(daemon)) as held,
    ):
        first = short(tmp_path, held)
        held.train(first)
        held.train(first)
    assert first.args.output_dir == str(tmp_path / "out")
    assert daemon.kinds()[-1] == "RankRefused"
    assert not daemon.heard(Finished)

    run = Run(tmp_path / "done")
    service = VerlSlurmCallback(run.life(Daemon()))
    service.train(short(tmp_path, service))
    with pytest.raises(ConfigError, match="a run is one training"):
        service.train(short(tmp_path, service))


def test_a_training_that_raised_is_not_served_again_in_the_same_process(tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("no luck")

    service = VerlSlurmCallback(Run(tmp_path / "run").life(Daemon()))
    trainer = short(tmp_path, service, Fails())
    with pytest.raises(RuntimeError, match="no luck"):
        service.train(trainer)
    trainer.remove_callback(Fails)
    with pytest.raises(ConfigError, match="let the process end"):
        service.train(trainer)
    assert trainer.args.output_dir == str(tmp_path / "out")


def test_a_training_that_was_not_begun_by_the_callback_is_refused(tmp_path: Path) -> None:
    """As each trial of `hyperparameter_search` is."""
    daemon = Daemon()
    service = VerlSlurmCallback(Run(tmp_path / "run").life(daemon))
    with pytest.raises(ConfigError, match="hyperparameter_search"):
        short(tmp_path, service).train()
    assert daemon.kinds() == ["RankRefused"]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"ignore_data_skip": True}, "ignore_data_skip"),
        ({"accelerator_config": {"use_seedable_sampler": False}}, "RandomSampler"),
        ({"train_sampling_strategy": "group_by_length"}, "LengthGroupedSampler"),
    ],
    ids=["skip", "unseeded", "by-length"],
)
def test_settings_that_cost_data_of_an_interrupted_epoch_are_said(
    tmp_path: Path, settings: dict[str, Any], word: str
) -> None:
    run, first, second = Run(tmp_path / "run"), Daemon({7: stop()}), Daemon()
    for daemon in (first, second):
        Life(run.life(daemon), data=Rows(), **settings)
    said = [
        (notice.loud, word in notice.text)
        for daemon in (first, second)
        for notice in daemon.heard(RankNotice)
    ]
    assert said == [(False, True), (True, True)], "loud where it has cost something"


def test_a_stream_that_had_started_over_is_said_to_begin_its_pass_again(tmp_path: Path) -> None:
    said = []
    for step in (3, 7):  # a pass has four
        run, daemon = Run(tmp_path / str(step)), Daemon()
        for one in (Daemon({step: stop()}), daemon):
            Life(run.life(one), data=SixteenInAPass(), accelerator_config={"dispatch_batches": False})
        assert max(daemon.steps()) == 12
        said.append(["interrupted in pass 2" in notice.text for notice in daemon.heard(RankNotice)])
    assert said == [[], [True]]


@pytest.mark.parametrize(
    "settings",
    [
        {"save_only_model": True},
        {"enable_jit_checkpoint": True},
        {
            "load_best_model_at_end": True,
            "save_strategy": "steps",
            "save_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
        },
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_cannot_be_served_is_refused_with_words(tmp_path: Path, settings: dict[str, Any]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    daemon = Daemon()
    try:
        with pytest.raises(ConfigError, match=next(iter(settings))):
            Life(Run(tmp_path / "run").life(daemon), **settings)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert daemon.kinds() == ["RankRefused"]


@pytest.mark.parametrize("own", [None, True, "elsewhere/checkpoint-2"])
def test_the_checkpoint_of_the_run_takes_the_place_of_one_that_the_script_names(
    tmp_path: Path, own: str | bool | None
) -> None:
    run, daemon = Run(tmp_path / "run"), Daemon()
    Life(run.life(Daemon({4: stop()})), own=own if own is True else None)
    Life(run.life(daemon), own=own)
    assert daemon.steps()[0] == 4
    said = [notice.text for notice in daemon.heard(RankNotice)]
    assert [text.partition(": the run goes on from ")[0] for text in said] == (
        [f"resume_from_checkpoint={own} is not used"] if own else []
    )


def test_a_checkpoint_that_the_daemon_did_not_choose_is_not_gone_on_from(tmp_path: Path) -> None:
    first, daemon = Run(tmp_path / "first"), Daemon()
    Life(first.life(Daemon({4: stop()})))
    with pytest.raises(ConfigError, match="found step 4, expected step 0"):
        Life(Run(tmp_path / "run").life(daemon), own=str(first.checkpoints()[0] / "guest"))
    assert daemon.kinds() == ["RankRefused"]


def test_a_checkpoint_of_another_loop_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    Life(run.life(Daemon({2: stop()})))
    [checkpoint] = run.checkpoints()
    (checkpoint / "guest/trainer_state.json").unlink()
    daemon = Daemon()
    with pytest.raises(ConfigError, match="not one of the Hugging Face Trainer"):
        Life(run.life(daemon))
    assert daemon.kinds() == ["RankRefused"]


def test_without_a_daemon_it_is_a_trainer_like_any_other(tmp_path: Path) -> None:
    service = VerlSlurmCallback(Session(NoDaemon(), rank=0, world_size=1))
    service.train(short(tmp_path, service, max_steps=4, save_steps=2))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-2", "checkpoint-4"]


class Own(TrainerCallback):
    """Has state that nothing saves."""


class Constant(TrainerCallback):
    """Gives each evaluation a metric that never changes."""

    def on_evaluate(self, *args: Any, metrics: dict[str, float], **named: Any) -> None:
        metrics["eval_never_better"] = 0.5


class MovesTheRun(TrainerCallback):
    """Takes the run away during step 2, and brings it back during step 4."""

    def __init__(self, root: Path) -> None:
        self.root, self.away = root, root.with_name("away")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.root.rename(self.away)
        if state.global_step == 3:
            assert not self.root.exists()
            self.away.rename(self.root)


def test_a_run_that_is_away_is_not_made_again_and_saves_go_on_when_it_is_back(tmp_path: Path) -> None:
    run, daemon = Run(tmp_path / "run", every_steps=1), Daemon()
    Life(run.life(daemon), MovesTheRun(run.paths.root), max_steps=5)
    assert [path.name for path in run.checkpoints()][-1] == "step_000005"
    assert [message.step for message in daemon.heard(Finished)] == [5]
    assert ["looking for the run failed" in message.reason for message in daemon.heard(RankSaveFailed)] == [
        True
    ] * 2


def test_a_stop_while_the_run_is_away_is_answered_and_obeyed(tmp_path: Path) -> None:
    run, daemon = Run(tmp_path / "run", every_steps=1), Daemon({2: stop()})
    assert Life(run.life(daemon), MovesTheRun(run.paths.root), max_steps=5).stopped
    assert [message.request_id for message in daemon.heard(RankSaveFailed)] == [1]
    assert daemon.kinds()[-1] == "Stopped"
    assert not run.paths.root.exists()


def test_a_rate_that_the_program_changed_between_two_attempts_is_said_not_to_be_used(tmp_path: Path) -> None:
    run, same, changed = Run(tmp_path / "run"), Daemon({4: stop()}), Daemon()
    Life(run.life(Daemon({2: stop()})))
    Life(run.life(same))
    last = Life(run.life(changed), learning_rate=1e-5, weight_decay=0.5)
    assert not any("are not used" in message.text for message in same.heard(RankNotice))
    [said] = [message for message in changed.heard(RankNotice) if "are not used" in message.text]
    assert said.loud
    assert "learning_rate=1e-05 (0.01), weight_decay=0.5 (0.0)" in said.text
    assert last.trainer.optimizer.param_groups[0]["initial_lr"] == 1e-2


class Evaluates(TrainerCallback):
    """Notes at which steps."""

    def __init__(self) -> None:
        self.steps = list[int]()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)


@pytest.mark.parametrize("former", [2, 0.5], ids=["steps", "share"])
def test_changed_intervals_are_used_from_the_resumed_step_on_and_said(tmp_path: Path, former: float) -> None:
    run, first, daemon, evaluates = Run(tmp_path / "run"), Daemon({4: stop()}), Daemon(), Evaluates()
    words = {"eval_strategy": "steps", "save_strategy": "steps", "logging_strategy": "steps"}
    Life(run.life(first), eval_steps=former, save_steps=2, logging_steps=3, **words)
    Life(run.life(daemon), evaluates, eval_steps=3, save_steps=5, logging_steps=7, **words)
    assert evaluates.steps == [6, 9, 12]
    assert [message.name for message in daemon.heard(RankSaved)] == [
        "step_000005",
        "step_000010",
        "step_000012",
    ]
    assert [message.step for message in daemon.heard(Progress) if "loss" in message.metrics] == [7]
    then = 2 if former == 2 else 6
    [said] = daemon.notices("rates")
    assert f"logging_steps=7 (3), eval_steps=3 ({then}), save_steps=5 (2) are used" in said
    assert not first.notices("rates")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_steps": 24}, "lr_scheduler.num_training_steps=24 (12)"),
        ({"warmup_steps": 5}, "lr_scheduler.num_warmup_steps=5 (0)"),
        ({"lr_scheduler_type": "linear"}, "lr_scheduler_type=linear (cosine)"),
        ({"lr_scheduler_kwargs": {"num_cycles": 2.5}}, "lr_scheduler.num_cycles=2.5 (0.5)"),
        ({}, ""),
    ],
    ids=["length", "warm-up", "kind", "words", "none"],
)
def test_a_longer_schedule_or_another_one_is_said(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    run, daemon = Run(tmp_path / "run"), Daemon()
    Life(run.life(Daemon({4: stop()})))
    Life(run.life(daemon), **change)
    texts = daemon.notices("rates")
    assert [said in text and "learning rates differ from here on" in text for text in texts] == [True] * bool(
        said
    )


def test_a_length_that_a_constant_schedule_does_not_read_is_not_said(tmp_path: Path) -> None:
    run, daemon = Run(tmp_path / "run"), Daemon()
    Life(run.life(Daemon({4: stop()})), lr_scheduler_type="constant")
    Life(run.life(daemon), lr_scheduler_type="constant", max_steps=14)
    assert not daemon.heard(RankNotice)


def test_changed_words_of_a_schedule_that_is_restored_are_said_not_to_be_used(tmp_path: Path) -> None:
    run, daemon = Run(tmp_path / "run"), Daemon()
    Life(run.life(Daemon({4: stop()})), **PLATEAU)
    last = Life(run.life(daemon), **PLATEAU | {"lr_scheduler_kwargs": {"patience": 5}})
    [said] = daemon.notices("rates")
    assert "lr_scheduler_kwargs={'patience': 5} ({'patience': 0," in said
    assert "are not used" in said
    assert last.trainer.lr_scheduler.patience == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"per_device_train_batch_size": 2}, ["per_device_train_batch_size=2 (4)"]),
        ({"gradient_accumulation_steps": 2}, ["gradient_accumulation_steps=2 (1)"]),
        ({"data": Numbers(24)}, ["samples=24 (20)"]),
        ({"seed": 7}, ["sampler_seed=7 (42)"]),
    ],
    ids=["none", "batch", "accumulation", "data", "seed"],
)
def test_a_changed_batch_size_accumulation_seed_or_data_set_is_said(
    tmp_path: Path, change: dict[str, Any], said: list[str]
) -> None:
    run, daemon = Run(tmp_path / "run"), Daemon()
    Life(run.life(Daemon({2: stop()})))
    Life(run.life(daemon), **change)
    notices = [notice for notice in daemon.heard(RankNotice) if "place in the data" in notice.text]
    assert [(notice.loud, notice.topic) for notice in notices] == [(True, "rates")] * len(said)
    assert all(words in notice.text for words, notice in zip(said, notices, strict=True))


@pytest.mark.parametrize(("step", "on_start"), [(2, True), (2, False), (4, False), (5, False)])
def test_early_stopping_counts_on_over_an_interruption(tmp_path: Path, step: int, on_start: bool) -> None:
    run = Run(tmp_path / "run")

    def lived(daemon: Daemon, patience: EarlyStoppingCallback) -> Life:
        # The first value is the best, and four more end the training at step 5.
        return Life(
            run.life(daemon),
            Constant(),
            Own(),
            patience,
            eval_strategy="steps",
            eval_steps=1,
            metric_for_best_model="never_better",
            greater_is_better=True,
            eval_on_start=on_start,
        )

    # At step 5 the request and the early stopping come together.
    assert lived(Daemon({step: stop()}), EarlyStoppingCallback(4)).stopped
    daemon, patience = Daemon(), EarlyStoppingCallback(4)
    # A resume evaluates no start once more, which would count.
    assert lived(daemon, patience).trainer.state.global_step == 5
    assert patience.early_stopping_patience_counter == 4
    assert [message.step for message in daemon.heard(Finished)] == [5]
    [said] = [
        notice.text for notice in daemon.heard(RankNotice) if "no state of the callbacks" in notice.text
    ]
    assert "Own" in said
    assert "EarlyStopping" not in said
