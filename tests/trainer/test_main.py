"""Which end of a rank is final, and which is a crash that the daemon answers with another start."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.daemon import Daemon
from verl_slurm.base.errors import CheckpointCorrupt, DataError, Fenced, WireError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.loops import verl_sft as sft
from verl_slurm.loops.session import Session
from verl_slurm.save.ranks.collective import Collective, RanksFailed
from verl_slurm.trainer import __main__ as entry
from verl_slurm.trainer.loop import FinalSaveFailed
from verl_slurm.wire.messages import RankRefused

pytestmark = pytest.mark.torch


def _chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def _end(error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[int, list[int]]:
    """The exit code of a rank that meets `error`, and those it sent as Refused."""
    daemon = Daemon()

    def train(*_: Any) -> None:
        raise error

    monkeypatch.delenv(entry.CONTROL_VARIABLE, raising=False)
    monkeypatch.setattr(entry, "NoDaemon", lambda: daemon)
    monkeypatch.setattr(entry, "_train", train)
    monkeypatch.setattr(os, "umask", lambda _: 0)
    code = entry.main(["--run", str(tmp_path), "--attempt", "1"])
    return code, [message.exit_code for message in daemon.heard(RankRefused)]


def test_what_no_start_can_change_is_refused_with_its_own_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    corrupt = CheckpointCorrupt("x")
    told = _chained(RanksFailed("checking failed"), corrupt)
    for error in (corrupt, told):
        assert _end(error, monkeypatch, tmp_path) == (ExitCode.CORRUPT, [ExitCode.CORRUPT])


def test_a_rank_that_was_fenced_off_in_a_save_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fenced = _chained(Fenced("another attempt owns the run"), RanksFailed("committing failed"))
    assert _end(fenced, monkeypatch, tmp_path) == (ExitCode.FENCED, [ExitCode.FENCED])


def test_a_failed_final_save_is_a_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert _end(FinalSaveFailed("x"), monkeypatch, tmp_path) == (ExitCode.INTERNAL, [])


@pytest.mark.scenario("P14")
def test_a_rank_that_does_not_reach_its_agent_is_a_crash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next start has another agent; refused, it would end the run for good."""
    lost = WireError("the agent of this node does not listen", where="/tmp/verl-slurm-1-x/store.sock")
    for error in (lost, _chained(RanksFailed("the group was not made"), lost)):
        assert _end(error, monkeypatch, tmp_path) == (ExitCode.INTERNAL, [])


def _end_of_sft(error: Exception, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[int]]:
    daemon = Daemon()

    def train(*_: Any) -> None:
        raise error

    monkeypatch.setattr(sft.Session, "open", lambda: Session(daemon, rank=0, world_size=1))
    monkeypatch.setattr(sft, "_train", train)
    return sft.main([]), [message.exit_code for message in daemon.heard(RankRefused)]


@pytest.mark.parametrize(
    ("number", "ended"),
    [
        (errno.EIO, (ExitCode.INTERNAL, [])),
        (errno.ENOSPC, (ExitCode.INTERNAL, [])),
        (errno.ESTALE, (ExitCode.INTERNAL, [])),
        (errno.EACCES, (ExitCode.DATA, [ExitCode.DATA])),
        (errno.ENOENT, (ExitCode.DATA, [ExitCode.DATA])),
    ],
)
def test_our_loop_and_verls_restart_for_the_same_storage_errors(
    number: int, ended: tuple[int, list[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unread = _chained(DataError("a data file cannot be read"), OSError(number, os.strerror(number)))
    told = _chained(RanksFailed("checking data and models failed"), unread)
    for error in (unread, told):
        assert _end(error, monkeypatch, tmp_path) == ended
        assert _end_of_sft(error, monkeypatch) == ended


def test_an_os_error_on_one_rank_reaches_all_as_a_crash() -> None:
    def fail() -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(RanksFailed) as caught:
        Collective(None).first_does("looking", fail)
    assert caught.value.exit_code is ExitCode.INTERNAL
