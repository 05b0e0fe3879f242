"""Agents and ranks that stand by for the next restart: for real, without Slurm."""

import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.harness import same_weights, wait_until_gone
from tests.journals import read_events
from tests.ledger_stats import ledger_stats
from tests.local_runs import finish, lead, prepared, undisturbed, until
from verl_slurm.base.paths import RunPaths

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.long]

_PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    return undisturbed(tmp_path_factory)


def _below(process: "subprocess.Popen[str]", word: str) -> list[psutil.Process]:
    """Processes of the run with this word in their command line."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if word in child.cmdline():
                found.append(child)
        except psutil.Error:
            continue
    return found


def _standbys(process: "subprocess.Popen[str]", count: int = 2) -> list[psutil.Process]:
    """Polls: nothing tells when a rank that stands by has begun."""
    deadline = time.monotonic() + _PATIENCE_S
    while len(found := _below(process, "--imports")) < count:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def _ranks(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return [one for one in _below(process, "verl_slurm.loops.rendezvous") if "--imports" not in one.cmdline()]


def test_a_killed_rank_is_replaced_by_one_that_stood_by_and_the_run_ends_bit_for_bit_alike(
    straight: RunPaths, tmp_path: Path
) -> None:
    paths = prepared(tmp_path / "run", "daemon.standby_after_s=0")
    process = lead(paths)
    until(process, "first_rollout")
    stood_by = {one.pid for one in _standbys(process)}
    _ranks(process)[0].kill()
    until(process, "training")
    assert {one.pid for one in _standbys(process)} & stood_by, "they train now"
    assert finish(process) == 0
    restarts = [event for event in read_events(paths) if event["event"] == "restart"]
    assert [(event["number"], event.get("standby", False)) for event in restarts] == [(1, False), (2, True)]
    same, said = same_weights(paths.root, straight.root)
    assert same, said
    assert ledger_stats(paths).duplicates == ()
    wait_until_gone(str(paths.root))


@pytest.mark.variant
def test_one_that_died_meanwhile_is_started_anew(tmp_path: Path) -> None:
    paths = prepared(tmp_path / "run", "daemon.standby_after_s=0")
    process = lead(paths)
    until(process, "first_rollout")
    _standbys(process)[0].kill()
    _ranks(process)[0].kill()
    until(process, "training")
    assert finish(process) == 0
    assert [event["number"] for event in read_events(paths) if event["event"] == "restart"] == [1, 2]
    wait_until_gone(str(paths.root))


@pytest.mark.variant
def test_an_agent_that_stands_by_and_dies_costs_those_that_train_nothing(tmp_path: Path) -> None:
    paths = prepared(tmp_path / "run", "daemon.standby_after_s=0")
    process = lead(paths)
    until(process, "first_rollout")
    _standbys(process)
    _below(process, "--stand-by")[0].kill()
    until(process, "its agent is gone")
    assert finish(process) == 0
    events = read_events(paths)
    assert [event["number"] for event in events if event["event"] == "restart"] == [1]
    assert not [event for event in events if event["event"] == "crash"]
    wait_until_gone(str(paths.root))


@pytest.mark.variant
def test_a_cancel_leaves_nothing_that_stands_by(tmp_path: Path) -> None:
    paths = prepared(tmp_path / "run", "daemon.standby_after_s=0")
    process = lead(paths)
    until(process, "first_rollout")
    _standbys(process)
    process.send_signal(signal.SIGTERM)
    assert finish(process) == 23
    wait_until_gone(str(paths.root))


def test_a_lead_that_is_killed_takes_what_stands_by_with_it(tmp_path: Path) -> None:
    paths = prepared(tmp_path / "run", "daemon.standby_after_s=0")
    process = lead(paths)
    until(process, "first_rollout")
    _standbys(process)
    process.kill()
    finish(process)
    wait_until_gone(str(paths.root))
