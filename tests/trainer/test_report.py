"""The daemon is told first, and nothing that is written for people can stop a rank."""

import sys
from pathlib import Path
from typing import Any

import pytest

from verl_slurm.base.paths import RunPaths
from verl_slurm.loops.session import Session
from verl_slurm.save.ranks.saver import SavedCheckpoint
from verl_slurm.trainer import reporter
from verl_slurm.trainer.reporter import Reporter
from verl_slurm.wire.client import NoDaemon
from verl_slurm.wire.messages import FromRank, RankNotice, RankSaved, RankSaveFailed

pytestmark = pytest.mark.torch

ROW = {"step": 1.0, "reward": 0.5, "kl": 0.0, "policy_loss": 0.0, "value_loss": 0.0}
TIMINGS = {"tokens_per_second": 1.0, "generate_s": 1.0, "score_s": 1.0, "update_s": 1.0}


class Full:
    """A stream on a full disk; notes in `log` when it was tried."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def write(self, text: str) -> int:
        self._log.append("print")
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


class Line(NoDaemon):
    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.messages: list[FromRank] = []

    def send(self, message: FromRank) -> None:
        self._log.append("send")
        self.messages.append(message)


def _reporter(tmp_path: Path, line: NoDaemon, rank: int = 0) -> Reporter:
    session = Session(line, rank=rank, world_size=2)
    return Reporter(session, total_steps=2, tensorboard=tmp_path / "curves", first_step=0)


def test_the_daemon_hears_of_a_save_even_where_no_line_can_be_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    line = Line(log)
    reporter = _reporter(tmp_path, line)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Full(log))
        patch.setattr(sys, "stderr", Full(log))
        reporter.saved(0, SavedCheckpoint(name="step_000001", seconds=0.1, num_bytes=10), "the last step")
        reporter.save_failed(0, "no space")
        reporter.step_done(ROW, TIMINGS)
        reporter.close()
    assert [type(message) for message in line.messages] == [RankSaved, RankSaveFailed]
    assert log == ["send", "print", "send", "print", "print"]


def test_curves_that_cannot_be_written_are_given_up_and_that_is_said_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def add_scalar(self, *_: object) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise OSError(28, "No space left on device")

    reporter = _reporter(tmp_path, NoDaemon())
    writer: Any = reporter._writer
    writer.close()
    reporter._writer = Broken()  # type: ignore[assignment]
    for _ in range(2):
        reporter.step_done(ROW, TIMINGS)
    reporter.close()
    captured = capfd.readouterr()
    assert captured.err.count("no curves for TensorBoard from here on") == 1
    assert captured.out.count("step 1/2") == 2


def test_a_directory_for_curves_that_cannot_be_made_stops_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "curves").write_bytes(b"")
    reporter = _reporter(tmp_path, NoDaemon())
    reporter.step_done(ROW, TIMINGS)
    reporter.close()
    assert capfd.readouterr().err.count("no curves") == 1


def test_a_step_s_row_is_logged_until_the_disk_is_full_and_evaluations_have_curves_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    logged: list[dict[str, float]] = []
    drawn: list[dict[str, float]] = []

    def log(paths: RunPaths, attempt: int, row: dict[str, float]) -> None:
        logged.append(row)
        if len(logged) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Reporter, "_draw", lambda self, curves, step: drawn.append(curves))
    line = Line([])
    options: dict[str, Any] = {"total_steps": 2, "tensorboard": tmp_path / "curves", "first_step": 0}
    monkeypatch.setattr("verl_slurm.loops.session.append_step", log)
    sessions = [Session(line, rank=rank, world_size=2, paths=RunPaths(tmp_path)) for rank in (0, 1)]
    reporter = Reporter(sessions[0], **options)
    for _ in range(3):
        reporter.step_done(ROW | {"eval/reward": 0.5}, TIMINGS)
    assert logged == [ROW | {"eval/reward": 0.5} | TIMINGS | {"stall_s": 0.0}] * 2
    assert capfd.readouterr().err.count("no rows in steps.jsonl from here on") == 1
    assert {"train/reward", "eval/reward", "time/update_s"} <= set(drawn[0])
    assert len(drawn) == 3
    reporter.evaluated(ROW | {"eval/reward": 0.5}, 1.25, ", the best so far")
    (notice,) = line.messages
    assert isinstance(notice, RankNotice)
    assert (notice.topic, notice.loud) == ("evaluation", False)
    assert notice.text == "step 1: eval/reward 0.5  in 1.2 s, the best so far"
    Reporter(sessions[1], **options).step_done(ROW, TIMINGS)
    assert len(logged) == 2
    reporter.close()


def test_a_step_that_teaches_nothing_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = Line([])
    reporter = _reporter(tmp_path, line)
    for share in (0.5, 1.0, 1.0):
        reporter.step_done(ROW | {"equal_rewards": share, "reward": 1.0}, TIMINGS)
    reporter.close()
    (notice,) = line.messages
    assert isinstance(notice, RankNotice)
    assert (notice.topic, notice.loud) == ("reward", True)
    assert notice.text == "step 1: all rewards equal (1): nothing is learned from them"


def test_other_ranks_keep_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = Line([])
    quiet = _reporter(tmp_path, line, rank=1)
    quiet.saved(0, SavedCheckpoint(name="step_000001", seconds=0.1, num_bytes=10), "the last step")
    quiet.step_done(ROW, TIMINGS)
    quiet.complain("x")
    quiet.close()
    assert line.messages == []
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "curves").exists()
    assert reporter.progress_line(ROW, TIMINGS, 2).startswith("step 1/2")


def test_saves_have_curves_of_their_own_and_failures_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[dict[str, float], int]] = []
    monkeypatch.setattr(Reporter, "_draw", lambda self, curves, step: drawn.append((curves, step)))
    reporter = _reporter(tmp_path, Line([]))
    reporter.stalled(0.25)
    reporter.stalled(0.5)
    reporter.step_done(ROW, TIMINGS)
    step = int(ROW["step"])
    assert drawn.pop()[0]["save/stall_s"] == 0.75
    reporter.saved(0, SavedCheckpoint(name="step_000001", seconds=0.1, num_bytes=10), "the last step")
    assert drawn.pop() == ({"save/seconds": 0.1, "save/bytes": 10.0, "save/one_copy": 0.0}, step)
    for number in (1.0, 2.0):
        reporter.save_failed(0, "no space")
        assert drawn.pop() == ({"save/failed": number}, step)
    reporter.close()


def test_a_step_without_a_critic_is_told_without_its_loss() -> None:
    assert "value loss 0.0000" in reporter.progress_line(ROW, TIMINGS, 2)
    row = {name: value for name, value in ROW.items() if name != "value_loss"}
    line = reporter.progress_line(row, TIMINGS, 2)
    assert "value" not in line
    assert "policy loss +0.0000  1 tokens/s" in line


def test_a_step_has_what_training_waited_for_saves_in_it(tmp_path: Path) -> None:
    reporter = _reporter(tmp_path, NoDaemon())
    rows: list[dict[str, float]] = []
    reporter.session.log_step = lambda row: rows.append(dict(row)) or ""  # type: ignore[method-assign, func-returns-value]
    reporter.stalled(0.5)
    reporter.stalled(0.25)
    reporter.step_done(ROW, TIMINGS)
    reporter.step_done(ROW | {"step": 2.0}, TIMINGS)
    assert [row["stall_s"] for row in rows] == [0.75, 0.0]
