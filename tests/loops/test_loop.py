"""`verl_slurm.run` by hand: two ranks with every kind of state, killed, and bit for bit what nobody disturbed."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import get_linear_schedule_with_warmup

import verl_slurm
from tests.builders import write_config
from tests.fakes.agent import Agent
from tests.hostile.planted import modes
from tests.loops.frames_kit import Clock, Listening
from tests.processes import free_port
from verl_slurm.base.errors import ConfigError
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.keys import Keyring, new_key_file, read_key_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.inspect.compare import compare
from verl_slurm.checkpoint.store.catalog import newest_checkpoint
from verl_slurm.checkpoint.store.verify import read_manifest, verify
from verl_slurm.loops.plain import LoopRun
from verl_slurm.loops.reach import Reach
from verl_slurm.loops.session import Session
from verl_slurm.save.ranks.collective import RanksFailed
from verl_slurm.save.writer.handle import SaverProcess
from verl_slurm.wire.messages import (
    Finished,
    FromRank,
    RankNotice,
    RankRefused,
    RankSaved,
    RankSaveFailed,
    SaveRequest,
    Stopped,
)

pytestmark = pytest.mark.torch

WORKER = Path(__file__).with_name("loop_worker.py")


def train(
    run_dir: Path, steps: int = 9, *, num_ranks: int = 2, worker: Path = WORKER, **environ: str
) -> list[int]:
    """All ranks to their end; the exit codes."""
    common = dict(os.environ) | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_ranks),
    }
    common |= {"OMP_NUM_THREADS": "1"} | environ
    ranks = [
        subprocess.Popen(
            [sys.executable, str(worker), str(run_dir), str(steps)],
            env=common | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
        )
        for rank in range(num_ranks)
    ]
    said = [rank.communicate(timeout=240)[1].decode() for rank in ranks]
    codes = [rank.returncode for rank in ranks]
    assert "DIE" in environ or not any(codes), "".join(said)
    return codes


@pytest.mark.long
def test_a_loop_that_was_killed_ends_bit_for_bit_like_one_that_nobody_disturbed(tmp_path: Path) -> None:
    straight, struck = tmp_path / "straight", tmp_path / "struck"
    train(straight)
    assert train(struck, DIE="5")[1] == -signal.SIGKILL
    # The save of step 4 runs beside step 5, and may have died with it.
    before = newest_checkpoint(struck).name
    assert before in ("step_000002", "step_000004")
    train(struck)
    found = compare(newest_checkpoint(straight), newest_checkpoint(struck))
    assert found.same, found.differing
    assert (found.num_files, found.num_tensors > 20) == (0, True)
    manifest = read_manifest(newest_checkpoint(struck))
    assert (manifest.name, manifest.parent, manifest.guest) == ("step_000009", before, "loop")


class Alone:
    """A run of one process under a stand-in for the agent, in this one."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(private_dir(root))
        write_config(self.paths, backend="command", command=("train.py",), every_steps=2, keep_last=2)
        self.attempt = take_attempt(self.paths, job_id="1", restart=0).attempt
        self.model = nn.Linear(2, 2)
        self.seen: list[int] = []

    @contextmanager
    def served(self, monkeypatch: pytest.MonkeyPatch, resume: str = "") -> Iterator[Agent]:
        monkeypatch.setattr("verl_slurm.loops.session.die_with_launcher", lambda: None)
        with Agent(self.paths, attempt=self.attempt, resume=resume) as agent:
            for name, value in agent.environ.items():
                monkeypatch.setenv(name, value)
            yield agent

    def life(
        self,
        monkeypatch: pytest.MonkeyPatch,
        steps: int,
        *,
        resume: str = "",
        ask: tuple[int, bool] | None = None,
        **more: object,
    ) -> list[FromRank]:
        """One life of `steps` steps; asked to save (and stop) in the middle of step `ask`."""
        with self.served(monkeypatch, resume=resume) as agent:
            try:
                with verl_slurm.run(model=self.model, **more) as run:
                    for step in run.steps(steps):
                        self.seen.append(step)
                        with torch.no_grad():
                            self.model.weight += 1.0
                        if ask is not None and step == ask[0]:
                            agent.ask(stop=ask[1])
                        run.log(loss=float(step))
            finally:
                said = agent.heard()
        return said

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.paths.checkpoints.glob("step_*"))


@pytest.fixture
def alone(tmp_path: Path) -> Alone:
    return Alone(tmp_path / "run")


def test_it_saves_as_configured_keeps_what_it_should_and_says_when_all_is_done(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = alone.life(monkeypatch, 7)
    saved = [m for m in said if isinstance(m, RankSaved)]
    assert [(m.name, m.request_id) for m in saved] == [(f"step_{step:06d}", 0) for step in (2, 4, 6, 7)]
    assert saved[-1].reason == "all steps are done"
    assert said[-1] == Finished(rank=0, step=7)
    assert alone.names == ["step_000006", "step_000007"]
    assert read_manifest(alone.paths.checkpoints / "step_000007").metrics == {"loss": 6.0}


def test_it_is_encrypted_kept_on_the_node_too_and_the_best_stays(
    alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_key_file(tmp_path / "key")
    (local := tmp_path / "local").mkdir(mode=0o700)
    kept = {"key_file": tmp_path / "key", "local_dir": local}
    best = {"keep_best": 1, "best_metric": "loss", "best_mode": "min"}
    write_config(
        alone.paths, backend="command", command=("train.py",), every_steps=2, keep_last=2, **kept, **best
    )
    optimizer = torch.optim.AdamW(alone.model.parameters())  # it has no tensors before its first step
    alone.life(monkeypatch, 8, optimizer=optimizer)
    assert alone.names == ["step_000002", "step_000006", "step_000008"]
    assert sorted(path.name for path in local.rglob("step_*")) == ["step_000006", "step_000008"]
    newest = alone.paths.checkpoints / "step_000008"
    assert verify(newest, keys=Keyring(read_key_file(tmp_path / "key"))).ok
    assert b"model" not in (newest / "guest/index.json").read_bytes()
    weight = alone.model.weight.clone()
    nn.init.zeros_(alone.model.weight)
    alone.life(monkeypatch, 8, resume="step_000008", optimizer=optimizer)
    assert torch.equal(alone.model.weight, weight)


def test_an_evaluation_within_a_step_is_no_silence_and_no_steps_time() -> None:
    clock = Clock()
    line, found = Listening(clock), list[Reach]()
    session = Session(line, rank=0, world_size=1, clock=clock)
    with LoopRun(session, {"model": nn.Linear(2, 2)}) as run:
        for step in run.steps(6):
            clock.seconds += 1.0
            if step == 3:
                for _ in run.evaluation(range(5)):
                    clock.seconds += 100.0
            if step == 5:
                found.append(session.reach(SaveRequest(request_id=1, stop=True, seconds_left=60.0)))
    assert line.longest_silence_s <= 101.0
    assert [(one.ok, "up to 1.0 s" in one.reason) for one in found] == [(True, True)], found


def test_a_saver_process_that_died_costs_one_save(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    made = SaverProcess.wait_ready
    monkeypatch.setattr(SaverProcess, "wait_ready", lambda one: (pids.append(one.pid), made(one)))
    with alone.served(monkeypatch) as agent:
        with verl_slurm.run(model=alone.model) as run:
            for step in run.steps(6):
                if step == 3:
                    while not alone.paths.checkpoint(2).exists():  # it is written beside the steps
                        time.sleep(0.01)
                    os.kill(pids[0], signal.SIGKILL)
                run.log(loss=1.0)
        said = agent.heard()
    assert {m.name for m in said if isinstance(m, RankSaved)} == {"step_000002", "step_000006"}
    [failed] = [m.reason for m in said if isinstance(m, RankSaveFailed)]
    assert "SaverDied" in failed


class BufferShuffledExamplesIterable:
    """As a stream of `datasets` has it, which is no package of ours."""


class Stream:
    """A stream that shuffles, and a loader of it: its place is its state, and its buffer is not."""

    def __init__(self) -> None:
        self._ex_iterable = SimpleNamespace(ex_iterable=BufferShuffledExamplesIterable())

    def state_dict(self) -> dict[str, int]:
        return {"shard": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"shard": 1}


def test_a_stream_that_shuffles_in_a_buffer_is_said_and_loudly_where_it_has_cost_rows(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = alone.life(monkeypatch, 2, stream=Stream())
    second = alone.life(monkeypatch, 4, resume="step_000002", stream=Stream())
    said = [
        [(m.loud, "stream shuffles" in m.text) for m in life if isinstance(m, RankNotice)]
        for life in (first, second)
    ]
    assert said == [[(False, True)], [(True, True)]]


def test_asked_to_stop_it_leaves_with_a_saved_step_and_goes_on_there_later(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as left:
        alone.life(monkeypatch, 5, ask=(2, True))
    assert left.value.code == 0
    assert alone.seen == [0, 1, 2]
    assert alone.names[-1] == "step_000003"
    weight = alone.model.weight.clone()
    nn.init.zeros_(alone.model.weight)
    said = alone.life(monkeypatch, 5, resume="step_000003")
    assert alone.seen == [0, 1, 2, 3, 4]
    assert torch.equal(alone.model.weight, weight + 1.0 + 1.0)
    assert said[-1] == Finished(rank=0, step=5)


def test_a_save_that_fails_is_said_and_the_loop_leaves_all_the_same(
    alone: Alone, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("verl_slurm.checkpoint.store.commit.begin", full)
    said: list[FromRank] = []
    monkeypatch.setattr(Agent, "heard", lambda self, heard=Agent.heard: said.extend(heard(self)) or said)
    with pytest.raises(SystemExit):
        alone.life(monkeypatch, 9, ask=(0, True))
    failed = next(m for m in said if isinstance(m, RankSaveFailed))
    assert "No space left" in failed.reason
    assert said[-1] == Stopped(rank=0, request_id=1)
    assert "save failed: " in capfd.readouterr().err, "by hand no daemon says it"
    assert alone.names == []


def test_leaving_early_is_not_being_done(
    alone: Alone, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with alone.served(monkeypatch) as agent:
        with verl_slurm.run(model=alone.model) as run:
            for _ in run.steps(9):
                break
        assert not any(isinstance(m, Finished) for m in agent.heard())
    assert "call run.finish() if it is done" in capfd.readouterr().err


def test_an_error_of_the_loop_is_a_crash_and_no_last_word(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    with alone.served(monkeypatch) as agent:
        with pytest.raises(ZeroDivisionError), verl_slurm.run(model=alone.model) as run:
            for _ in run.steps(9):
                raise ZeroDivisionError
        assert not any(isinstance(m, Finished | RankRefused | Stopped) for m in agent.heard())


def test_a_checkpoint_of_other_objects_is_refused_before_anything_is_changed(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone.life(monkeypatch, 2)
    with alone.served(monkeypatch, resume="step_000002") as agent:
        with pytest.raises(RanksFailed, match="does not fit these objects"):
            verl_slurm.run(model=alone.model, other=nn.Linear(1, 1)).__enter__()
        refused = agent.heard()[-1]
    assert isinstance(refused, RankRefused)
    assert "expected model" in refused.reason


def test_a_model_of_another_shape_is_refused_and_no_crash(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone.life(monkeypatch, 2)
    alone.model = nn.Linear(3, 3)
    with pytest.raises(
        RanksFailed, match=r"does not fit these objects: model \(found RuntimeError: .*size mismatch"
    ):
        alone.life(monkeypatch, 4, resume="step_000002")
    assert alone.seen == [0, 1]


def test_by_hand_it_keeps_its_hands_off_a_run_that_a_daemon_serves(alone: Alone) -> None:
    write_file(private_dir(alone.paths.control) / alone.paths.lead_address.name, b"{}")
    with pytest.raises(RanksFailed, match="a daemon serves this run"):
        verl_slurm.run(model=alone.model, run_dir=alone.paths.root).__enter__()


def test_by_hand_it_says_that_a_newer_checkpoint_is_gone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(tmp_path / "run")
    for steps in (2, 4, 4):
        with verl_slurm.run(model=nn.Linear(2, 2), run_dir=paths.root) as run:
            for _ in run.steps(steps):
                pass
        heard = capfd.readouterr().err
        shutil.rmtree(paths.checkpoint(4), ignore_errors=True)
    said = "step_000004 was saved and is gone: the run goes back to step_000002, and does steps 3 and 4 again"
    assert said in heard


def test_what_cannot_be_saved_is_refused_before_the_first_step(alone: Alone) -> None:
    odd = torch.optim.SGD(alone.model.parameters(), lr=0.1)
    odd.param_groups[0]["deep"] = [object()]
    with pytest.raises(ConfigError, match=r"without a pickle: odd/param_groups/0/deep/0 \(found object"):
        verl_slurm.run(odd=odd).__enter__()
    with pytest.raises(ConfigError, match=r"run\(loader=...\).*StatefulDataLoader"):
        verl_slurm.run(loader=[1, 2]).__enter__()


def test_without_a_daemon_and_a_directory_it_is_a_range_and_nothing_else() -> None:
    model = nn.Linear(1, 1)
    with verl_slurm.run(model=model, left_out=None) as run:
        assert list(run.steps(3)) == [0, 1, 2]
    assert run.resume is None


def test_a_loop_finds_the_services_beside_it_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_SLURM_SERVICE_JUDGE", "n3:8000,n4:8000")
    monkeypatch.setenv("VERL_SLURM_SERVICE_TOKEN", "secret")
    with verl_slurm.run(model=nn.Linear(1, 1)) as run:
        assert run.services == {"judge": ["n3:8000", "n4:8000"]}


def test_what_the_program_writes_has_the_users_umask_and_the_run_stays_private(
    alone: Alone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model that the program saved for its colleagues was 0600: the process had our umask from then on."""
    before = os.umask(0o002)
    try:
        with alone.served(monkeypatch), verl_slurm.run(model=alone.model) as run:
            for step in run.steps(2):
                (tmp_path / f"during{step}").touch()
        (tmp_path / "after").touch()
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir() if file.is_file()} == {0o664}
    assert newest_checkpoint(alone.paths.root).name == "step_000002"
    assert modes([alone.paths.checkpoints, alone.paths.steps]) == []


def test_a_loop_of_ones_own_asks_behind_each_step(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    with alone.served(monkeypatch) as agent:
        with verl_slurm.run(model=alone.model) as run:
            while not run.stopping:
                if run.step == 4:
                    agent.ask(stop=True)
                run.step_done(run.step + 1, 100, loss=1.0)
        said = agent.heard()
    assert run.step == 5
    assert isinstance(said[-1], Stopped)
    assert verify(alone.paths.checkpoints / "step_000005").ok


def test_a_count_that_strides_over_a_step_to_save_is_saved_at_the_next_one(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    with alone.served(monkeypatch) as agent:
        with verl_slurm.run(model=alone.model, save_every=4) as run:
            for step in (1, 3, 5, 7, 9):
                run.step_done(step, 9)
            run.finish()
        said = agent.heard()
    assert [each.name for each in said if isinstance(each, RankSaved)] == ["step_000005", "step_000009"]


def test_ranks_that_do_not_know_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="init_process_group before"):
        verl_slurm.run(model=nn.Linear(1, 1)).__enter__()


@pytest.mark.parametrize(("saved_at", "warned"), [(4, 0), (5, 1)])
def test_gradients_that_a_save_leaves_out_are_said(
    alone: Alone, monkeypatch: pytest.MonkeyPatch, saved_at: int, warned: int
) -> None:
    """The program accumulates over two steps by itself."""
    optimizer = torch.optim.SGD(alone.model.parameters(), lr=0.1)
    with alone.served(monkeypatch) as agent:
        with verl_slurm.run(model=alone.model, optimizer=optimizer, save_every=saved_at) as run:
            for step in run.steps(7):
                alone.model(torch.ones(1, 2)).sum().backward()
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        said = agent.heard()
    found = [each for each in said if isinstance(each, RankNotice) and "accumulated" in each.text]
    assert [notice.loud for notice in found] == [True] * warned


def test_a_save_behind_an_update_leaves_no_gradient_out(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a loop of its own, which saves when it likes."""
    optimizer = torch.optim.SGD(alone.model.parameters(), lr=0.1)
    with alone.served(monkeypatch) as agent:
        with verl_slurm.run(model=alone.model, optimizer=optimizer, save_every=100) as run:
            for step in range(2):
                optimizer.zero_grad()
                alone.model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                run.step_done(step + 1, 3)
                run.save()
            run.finish()
        said = agent.heard()
    assert not any("accumulated" in each.text for each in said if isinstance(each, RankNotice))


def test_a_window_of_accelerates_is_one_step_to_save(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip(
        "accelerate", reason="NOT RUN: accelerate is not installed (pip install '.[dev]')"
    )
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, optimizer = accelerator.prepare(alone.model, torch.optim.SGD(alone.model.parameters(), lr=0.1))
    with alone.served(monkeypatch) as agent:
        with pytest.raises(SystemExit), verl_slurm.run(model=model, optimizer=optimizer, save_every=4) as run:
            for step in run.steps(12):
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.ones(1, 2)).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                if step == 6:
                    agent.ask(stop=True)
        said = agent.heard()
    assert [each.name for each in said if isinstance(each, RankSaved)] == ["step_000006", "step_000009"]
    assert not any("accumulated" in each.text for each in said if isinstance(each, RankNotice))


class Loader:
    """Of rows that are drawn from others, as torch's `random_split` draws them."""

    def __init__(self, batch_size: int, rows: list[int]) -> None:
        numbers = torch.utils.data.TensorDataset(torch.arange(4))
        self.batch_size, self.dataset = batch_size, torch.utils.data.Subset(numbers, rows)

    def state_dict(self) -> dict[str, int]:
        return {"place": 1}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (Loader(2, [0, 1, 2]), None),
        (Loader(4, [0, 1, 2]), "loader.batch_size=4 (2) are"),
        (Loader(2, [2, 1, 0]), "loader.digest_of_rows="),
    ],
    ids=["same", "batch", "order"],
)
def test_another_batch_size_or_order_of_the_rows_is_said(
    alone: Alone, monkeypatch: pytest.MonkeyPatch, now: Loader, said: str | None
) -> None:
    alone.life(monkeypatch, 2, resume="", loader=Loader(2, [0, 1, 2]))
    heard = alone.life(monkeypatch, 2, resume="step_000002", loader=now)
    notices = [each for each in heard if isinstance(each, RankNotice) and "place in the data" in each.text]
    assert (
        [said in each.text for each in notices if said]
        == [True] * bool(said)
        == [each.loud for each in notices]
    )


def _warmed_up(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    schedules = torch.optim.lr_scheduler
    parts = [
        schedules.LinearLR(optimizer, total_iters=2),
        schedules.CosineAnnealingLR(optimizer, T_max=steps),
    ]
    return schedules.SequentialLR(optimizer, parts, milestones=[2])


def _falling(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return get_linear_schedule_with_warmup(optimizer, 1, steps)


def _prepared(schedule: object) -> object:
    accelerate = pytest.importorskip(
        "accelerate", reason="NOT RUN: accelerate is not installed (pip install '.[dev]')"
    )
    return accelerate.Accelerator(cpu=True).prepare(schedule)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (_warmed_up, "scheduler[1].T_max=20 (10) are not used"),
        (_falling, "scheduler.num_training_steps=20 (10) change the schedule"),
    ],
    ids=["restored", "of-transformers"],
)
@pytest.mark.parametrize("wrapped", [lambda schedule: schedule, _prepared], ids=["plain", "of-accelerate"])
def test_what_a_schedule_is_made_of_is_compared_too(
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
    made: Callable[[torch.optim.Optimizer, int], object],
    text: str,
    wrapped: Callable[[object], object],
) -> None:
    said = []
    for steps, resume in ((10, ""), (10, "step_000002"), (20, "step_000002")):
        optimizer = torch.optim.SGD(alone.model.parameters(), lr=0.1)
        scheduler = wrapped(made(optimizer, steps))
        heard = alone.life(monkeypatch, 2, resume=resume, optimizer=optimizer, scheduler=scheduler)
        said.append([each.text for each in heard if isinstance(each, RankNotice) and each.topic == "rates"])
    assert said[:2] == [[], []]
    assert [text in each for each in said[2]] == [True]
