"""Commands that start a cluster or jobs, ended by a signal: nothing of theirs stays."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.harness import SMALL
from tests.processes import tell
from verl_slurm.slurm.devcluster.cluster import DevCluster

pytestmark = pytest.mark.slurm

PATIENCE_S = 120


def _started(*argv: str, environ: dict[str, str] | None = None) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "verl_slurm.cli", *argv]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, env=environ, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def _processes_with(word: str) -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if any(word in part for part in process.info["cmdline"] or [])]


def _none_is_left(directory: Path) -> None:
    """Processes that were killed may take a moment to be gone."""
    deadline = time.monotonic() + 20
    while left := _processes_with(str(directory)):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.fixture
def place(short_dir: Path) -> Iterator[Path]:
    """Whatever the command leaves is ended."""
    yield short_dir
    DevCluster(short_dir / "cluster").stop()
    DevCluster(short_dir).stop()
    tell(_processes_with(str(short_dir)), signal.SIGKILL)


@pytest.mark.torch
@pytest.mark.scenario("USE13")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_ended_leaves_nothing_running(place: Path, number: signal.Signals) -> None:
    with _started("demo", "--dir", str(place), *SMALL) as demo:
        assert demo.stdout is not None
        line = ""
        while "job" not in line:
            line = demo.stdout.readline()
            assert line, "the demo is over"
        assert _processes_with(str(place / "cluster"))
        demo.send_signal(number)
        demo.stdout.read()
        assert demo.wait(PATIENCE_S) == 128 + number
    _none_is_left(place)


@pytest.mark.torch
@pytest.mark.scenario("USE13")
def test_a_demo_without_slurm_that_is_ended_leaves_nothing_running(place: Path) -> None:
    with _started("demo", "--cluster", "local", "--dir", str(place), *SMALL) as demo:
        assert demo.stdout is not None
        while "first" not in (line := demo.stdout.readline()):
            assert line, "the demo is over"
        demo.send_signal(signal.SIGTERM)
        demo.stdout.read()
        assert demo.wait(PATIENCE_S) == 128 + signal.SIGTERM
    _none_is_left(place)


@pytest.mark.scenario("USE13")
def test_a_start_that_is_ended_half_way_leaves_nothing_running(place: Path) -> None:
    with _started("devcluster", "start", "--nodes", "16", "--dir", str(place)) as start:
        while not _processes_with(f"{place}/slurm.conf"):
            assert start.poll() is None, start.stdout
        start.send_signal(signal.SIGTERM)
        assert start.wait(PATIENCE_S) == 128 + signal.SIGTERM
    _none_is_left(place)


@pytest.mark.scenario("USE13")
def test_a_fire_drill_that_is_ended_leaves_no_job(
    make_cluster: Callable[..., DevCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(nodes=2, kill_wait_s=2)
    monkeypatch.chdir(tmp_path)

    def jobs() -> list[str]:
        argv = ["squeue", "-h", "-o", "%i %T"]
        done = subprocess.run(argv, env=cluster.client_env(), capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    with _started("doctor", "--fire-drill", environ=os.environ | cluster.env()) as drill:
        deadline = time.monotonic() + PATIENCE_S
        while not any("RUNNING" in job for job in jobs()):
            assert drill.poll() is None, drill.stdout
            assert time.monotonic() < deadline
        drill.send_signal(signal.SIGTERM)
        assert drill.wait(PATIENCE_S) == 128 + signal.SIGTERM
    while left := jobs():
        assert time.monotonic() < deadline, left
    assert not list(tmp_path.rglob(".verl-slurm-drill-*"))
