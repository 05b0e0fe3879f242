"""`verl_slurm.run` by hand: two ranks with every kind of state, killed, and bit for bit what nobody disturbed."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import verl_slurm
from tests.builders import write_config
from tests.fakes.agent import Agent
from tests.processes import free_port
from verl_slurm.base.errors import ConfigError
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.inspect.compare import compare, newest_checkpoint
from verl_slurm.checkpoint.store.verify import read_manifest, verify
from verl_slurm.loops.session import Session
from verl_slurm.save.ranks.collective import RanksFailed
from verl_slurm.wire.messages import (
    Finished,
    FromRank,
    RankNotice,
    RankRefused,
    RankSaved,
    RankSaveFailed,
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


def test_a_loop_that_was_killed_ends_bit_for_bit_like_one_that_nobody_disturbed(tmp_path: Path) -> None:
    straight, struck = tmp_path / "straight", tmp_path / "struck"
    train(straight)
    assert train(struck, DIE="5")[1] == -signal.SIGKILL
    assert newest_checkpoint(struck).name == "step_000004"
    train(struck)
    found = compare(newest_checkpoint(straight), newest_checkpoint(struck))
    assert found.same, found.differing
    assert found.num_files == 2 + 1 + 2  # a file a rank, what is common, and a shard each
    manifest = read_manifest(newest_checkpoint(struck))
    assert (manifest.name, manifest.parent, manifest.guest) == ("step_000009", "step_000004", "loop")


class Alone:
    """A run of one process under a stand-in for the agent, in this one."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(private_dir(root))
        write_config(self.paths, backend="command", command=("train.py",), every_steps=2, keep_last=2)
        self.attempt = take_attempt(self.paths, job_id="1", restart=0).attempt
        self.model = nn.Linear(2, 2)
        self.seen: list[int] = []

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
        monkeypatch.setattr("verl_slurm.loops.session.die_with_launcher", lambda: None)
        with Agent(self.paths, attempt=self.attempt, resume=resume) as agent:
            for name, value in agent.environ.items():
                monkeypatch.setenv(name, value)
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


def test_asked_to_save_in_mid_step_it_does_so_at_the_steps_end_and_goes_on(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = alone.life(monkeypatch, 4, ask=(0, False))
    first = next(m for m in said if isinstance(m, RankSaved))
    assert (first.name, first.request_id) == ("step_000001", 1)
    assert isinstance(said[-1], Finished)


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
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("verl_slurm.loops.state_files.torch.save", full)
    said: list[FromRank] = []
    monkeypatch.setattr(Agent, "heard", lambda self, heard=Agent.heard: said.extend(heard(self)) or said)
    with pytest.raises(SystemExit):
        alone.life(monkeypatch, 9, ask=(0, True))
    failed = next(m for m in said if isinstance(m, RankSaveFailed))
    assert "No space left" in failed.reason
    assert said[-1] == Stopped(rank=0, request_id=1)
    assert alone.names == []


def test_leaving_early_is_not_being_done(
    alone: Alone, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("verl_slurm.loops.session.die_with_launcher", lambda: None)
    with Agent(alone.paths, attempt=alone.attempt) as agent:
        for name, value in agent.environ.items():
            monkeypatch.setenv(name, value)
        with verl_slurm.run(model=alone.model) as run:
            for _ in run.steps(9):
                break
        assert not any(isinstance(m, Finished) for m in agent.heard())
    assert "call run.finish() if it is done" in capfd.readouterr().err


def test_an_error_of_the_loop_is_a_crash_and_no_last_word(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_slurm.loops.session.die_with_launcher", lambda: None)
    with Agent(alone.paths, attempt=alone.attempt) as agent:
        for name, value in agent.environ.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ZeroDivisionError), verl_slurm.run(model=alone.model) as run:
            for _ in run.steps(9):
                raise ZeroDivisionError
        assert not any(isinstance(m, Finished | RankRefused | Stopped) for m in agent.heard())


def test_a_checkpoint_of_other_objects_is_refused_before_anything_is_changed(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone.life(monkeypatch, 2)
    monkeypatch.setattr("verl_slurm.loops.session.die_with_launcher", lambda: None)
    with Agent(alone.paths, attempt=alone.attempt, resume="step_000002") as agent:
        for name, value in agent.environ.items():
            monkeypatch.setenv(name, value)
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


def test_what_could_only_be_pickled_is_refused_by_name_before_the_first_step() -> None:
    class Odd:
        def state_dict(self) -> dict[str, object]:
            return {"deep": [object()]}

        def load_state_dict(self, state: object) -> None: ...

    with pytest.raises(ConfigError, match=r"without a pickle: odd/deep/0 \(found object"):
        verl_slurm.run(odd=Odd()).__enter__()
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


def test_a_loop_of_ones_own_asks_behind_each_step(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_slurm.loops.session.die_with_launcher", lambda: None)
    with Agent(alone.paths, attempt=alone.attempt) as agent:
        for name, value in agent.environ.items():
            monkeypatch.setenv(name, value)
        with verl_slurm.run(model=alone.model) as run:
            while not run.stopping:
                if run.step == 4:
                    agent.ask(stop=True)
                run.step_done(run.step + 1, 100, loss=1.0)
        said = agent.heard()
    assert run.step == 5
    assert isinstance(said[-1], Stopped)
    assert verify(alone.paths.checkpoints / "step_000005").ok


def test_a_step_that_ends_too_late_is_said_at_once_and_not_waited_for(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_slurm.loops.session.die_with_launcher", lambda: None)
    heard = threading.Event()
    failed = Session.save_failed

    def told(session: Session, request_id: int, reason: str) -> None:
        failed(session, request_id, reason)
        heard.set()

    monkeypatch.setattr(Session, "save_failed", told)
    with Agent(alone.paths, attempt=alone.attempt) as agent:
        for name, value in agent.environ.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ZeroDivisionError), verl_slurm.run(model=alone.model) as run:
            for _ in run.steps(9):
                agent.ask(stop=True, seconds_left=1e-9)
                assert heard.wait(60.0)
                raise ZeroDivisionError  # the daemon has taken us down by now
        said = [m for m in agent.heard() if isinstance(m, RankSaveFailed)]
    assert [m.reason for m in said] == ["the end of the step cannot be reached: the deadline is over"]


def test_ranks_that_do_not_know_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="init_process_group before"):
        verl_slurm.run(model=nn.Linear(1, 1)).__enter__()
