"""What a guest says, hears, and is told of its run."""

import json
import math
import os
import signal
from pathlib import Path

import pytest

from tests.fakes.agent import Agent
from tests.fakes.daemon import Daemon
from verl_slurm.base.errors import ConfigError, DataError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.loops.session import Session
from verl_slurm.wire.messages import (
    Finished,
    Progress,
    RankNotice,
    RankRefused,
    RankSaved,
    RankSaveFailed,
    RankStarted,
    SaveStarted,
    Stopped,
)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(private_dir(tmp_path / "run"))


@pytest.fixture(autouse=True)
def _no_handlers_left() -> None:
    import faulthandler

    from verl_slurm.wire.environment import STACKS_SIGNAL

    faulthandler.unregister(STACKS_SIGNAL)
    signal.signal(STACKS_SIGNAL, signal.SIG_DFL)


def opened(agent: Agent, **environ: str) -> Session:
    return Session.open(agent.environ | environ, lifeline=False)


def test_without_a_daemon_everything_may_be_called_and_does_nothing() -> None:
    session = Session.open({})
    assert (session.rank, session.world_size, session.has_daemon, session.has_run) == (0, 1, False, False)
    session.started(0, 10)
    session.step_done(1, {"loss": 1.0}, 10)
    assert session.request() is None
    session.save_started(0, 1)
    session.part_saved(0)
    session.saved(0, "step_000001", seconds=1.0, num_bytes=2)
    session.save_failed(0, "no")
    session.stopped(0)
    session.finished(1)
    session.refused(DataError("no data"))
    session.notice("a word")
    session.close()
    with pytest.raises(ConfigError, match="no run to save into"):
        _ = session.paths


def test_a_life_is_told_in_the_ranks_own_words(paths: RunPaths) -> None:
    with Agent(paths, attempt=3) as agent:
        session = opened(agent)
        session.started(0, 2)
        session.step_done(1, {"loss": 0.5, "odd": math.nan, "name": "no number"}, 2)
        session.save_started(0, 1)
        session.saved(0, "step_000001", seconds=0.25, num_bytes=7, reason="every step")
        session.step_done(2, {"loss": 0.25}, 2)
        session.finished(2)
        session.close()
        said = agent.heard()
    assert isinstance(said[0], RankStarted)
    first, last = (m for m in said if isinstance(m, Progress))
    assert (first.step, first.safe_points, first.total) == (0, 0, 2)
    # The one between came too soon behind it to be news; the last of all always is.
    assert (last.step, last.safe_points, last.metrics) == (2, 2, {"loss": 0.25})
    assert [type(m) for m in said if not isinstance(m, Progress)] == [
        RankStarted,
        SaveStarted,
        RankSaved,
        Finished,
    ]
    rows = [json.loads(line) for line in paths.steps.read_text().splitlines()]
    assert [(row["attempt"], row["step"], row["loss"]) for row in rows] == [(3, 1, 0.5), (3, 2, 0.25)]
    assert all(row["step_s"] >= 0 and "odd" not in row and "name" not in row for row in rows)


def test_a_request_is_new_until_it_is_answered(paths: RunPaths) -> None:
    with Agent(paths) as agent:
        session = opened(agent)
        assert session.request() is None
        first = agent.ask()
        asked = session.request()
        assert asked is not None
        assert (asked.request_id, asked.stop) == (first, False)
        session.saved(first, "step_000001", seconds=0.0, num_bytes=0)
        assert session.request() is None
        second = agent.ask(stop=True)
        session.save_failed(second, "no room")
        assert session.request() is None
        session.stopped(second)
        session.close()
        failed, stopped = agent.heard()[-2:]
    assert (failed, stopped) == (
        RankSaveFailed(rank=0, request_id=second, reason="no room"),
        Stopped(rank=0, request_id=second),
    )


def test_the_steps_that_were_measured_tell_whether_the_end_can_be_reached(paths: RunPaths) -> None:
    now = [0.0]
    with Agent(paths) as agent:
        line = opened(agent)
        session = Session(line.line, rank=0, world_size=1, clock=lambda: now[0])
        session.started()
        agent.ask(stop=True, seconds_left=50.0)
        asked = session.request()
        assert asked is not None
        assert session.reach(asked).ok  # nothing was measured
        now[0] = 900.0
        session.step_done(1)
        assert session.reach(asked).ok  # the first step of a start warms up, and tells nothing of the next
        now[0] = 1000.0
        session.step_done(2)
        found = session.reach(asked)
        assert not found.ok
        assert "steps take up to 100.0 s" in found.reason
        line.close()


def test_an_evaluation_is_told_of_once_a_second_as_what_its_limit_is_of() -> None:
    now, line = [0.0], Daemon()
    session = Session(line, rank=0, world_size=1, clock=lambda: now[0])

    def batches() -> list[object]:
        line.told.clear()
        for _ in range(6):
            now[0] += 0.5
            session.alive()
        return [
            type(m) if not isinstance(m, Progress) else (m.step, m.phase, m.safe_points) for m in line.told
        ]

    # Loading goes on: a loop that has not begun cannot be asked to save.
    assert batches() == [RankStarted] * 3
    session.started(4)
    session.step_done(5)
    assert batches() == [(5, "evaluate", 1)] * 3
    # A framework may evaluate between its word of a save and the save.
    session.save_started(0, 5)
    assert batches() == [SaveStarted] * 3
    session.step_done(6)
    assert batches() == [(6, "evaluate", 2)] * 3


def test_what_it_resumes_from_is_a_name_below_the_runs_own_checkpoints(paths: RunPaths) -> None:
    with Agent(paths, resume="step_000012") as agent:
        session = opened(agent)
        assert session.resume == paths.checkpoints / "step_000012"
        session.close()
    for odd in ("../step_000012", "/etc", "step_000012_sp0003\n", "latest"):
        with Agent(paths, resume=odd) as agent, pytest.raises(ConfigError, match="no checkpoint's name"):
            opened(agent)


def test_an_environment_that_is_half_a_daemons_is_refused(paths: RunPaths) -> None:
    with Agent(paths) as agent:
        with pytest.raises(ConfigError, match="for which run"):
            opened(agent, VERL_SLURM_RUN="")
        with pytest.raises(ConfigError, match="RANK"):
            opened(agent, RANK="first")


def test_what_no_start_would_change_is_said_with_its_exit_code(paths: RunPaths) -> None:
    with Agent(paths) as agent:
        session = opened(agent)
        session.refused(DataError("the data is gone", where="/data"))
        session.close()
        said = agent.heard()[-1]
    assert said == RankRefused(rank=0, exit_code=11, reason="the data is gone: /data")


@pytest.mark.torch
def test_a_file_of_the_checkpoint_that_would_run_code_is_named_and_another_one_is_the_programs(
    paths: RunPaths,
) -> None:
    import torch

    class Program:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, ("true",)

    private_dir(paths.checkpoints / "step_000012")
    with Agent(paths, resume="step_000012") as agent:
        session = opened(agent)
        for file in (paths.root / "own.pt", paths.checkpoints / "step_000012/optimizer.pt"):
            torch.save({"a": Program()}, file)
            with file.open("rb") as stream, pytest.raises(Exception, match="Weights only") as caught:
                torch.load(stream, weights_only=True)
            session.ended_by(caught.value)
        session.close()
        [said] = [message for message in agent.heard() if isinstance(message, RankRefused)]
    assert said.exit_code == ExitCode.CORRUPT
    assert "step_000012/optimizer.pt (found posix.system, expected tensors" in said.reason


def test_the_story_of_a_thousand_ranks_does_not_end_the_line(paths: RunPaths) -> None:
    """A message longer than `MAX_MESSAGE` cannot be read, and whoever sends one is not listened to any more."""
    with Agent(paths) as agent:
        session = opened(agent)
        session.save_failed(1, "; ".join(f"rank {rank}: {'x' * 400}" for rank in range(1000)))
        session.refused(DataError("x" * 100_000))
        session.finished(3)
        session.close()
        said = agent.heard()
    assert [type(message) for message in said[-3:]] == [RankSaveFailed, RankRefused, Finished]


def test_a_rank_other_than_the_first_speaks_for_itself_alone(paths: RunPaths) -> None:
    daemon = Daemon()
    session = Session(daemon, rank=3, world_size=4, paths=paths, attempt=1, resume=None)
    session.notice("the same on every rank")
    session.notice("its ledger is full", own=True)
    assert [message.text for message in daemon.heard(RankNotice)] == ["rank 3: its ledger is full"]
