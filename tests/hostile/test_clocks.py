"""Clocks that disagree, and clocks that jump: whole runs, whose processes see the time that the test gives them."""

import re
import shutil
import signal
import struct
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from tests.harness import same_weights, wait_until_gone
from tests.journals import Line, read_events
from tests.ledger_stats import ledger_stats
from tests.local_runs import finish, lead, prepared, undisturbed, until
from tests.processes import held
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths

pytestmark = [pytest.mark.torch, pytest.mark.long]

HOUR = 3600
BEHIND_S, AHEAD_S = -600, 600
STEADY_S = 100_000


class Clocks:
    """Seconds added to the clocks of all processes that have `environ`."""

    def __init__(self, library: Path, file: Path) -> None:
        self._file = file
        self.set(0, 0)
        self.environ = {"LD_PRELOAD": str(library), "CLOCKSHIM": str(file)}

    def set(self, date_s: int, steady_s: int) -> None:
        """Of the time of day, and of the clocks that nobody sets. Takes effect at once, and for all together."""
        with self._file.open("r+b" if self._file.exists() else "w+b") as file:
            file.write(struct.pack("=2q", date_s, steady_s))  # in place: they have it mapped


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("NOT RUN: no C compiler (Debian's package gcc, with libc6-dev)")
    made = tmp_path_factory.mktemp("shim") / "clockshim.so"
    source = Path(__file__).with_name("clockshim.c")
    argv = [compiler, "-shared", "-fPIC", "-O2", "-o", str(made), str(source), "-ldl"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if "dlfcn.h: No such file" in done.stderr or "stdio.h: No such file" in done.stderr:
        pytest.skip("NOT RUN: no headers of C (Debian's package libc6-dev)")
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    return undisturbed(tmp_path_factory)


def told(paths: RunPaths, *kinds: str) -> list[Line]:
    return [event for event in read_events(paths) if event["event"] in kinds]


def first_log(paths: RunPaths, attempt: int, node_id: int) -> tuple[datetime, float]:
    """What an agent's first line says: the date, and the clock that nobody sets."""
    date, steady, *_ = paths.agent_log(attempt, node_id).read_text().split()
    assert re.fullmatch(r"\+\d+\.\d{3}", steady)
    return datetime.fromisoformat(date), float(steady)


@pytest.mark.scenario("K02", "K03")
@pytest.mark.variant
def test_hosts_whose_clocks_are_twenty_minutes_and_a_day_apart_are_interrupted_and_end_alike(
    library: Path, straight: RunPaths, tmp_path: Path
) -> None:
    namespace = ["unshare", "-T", "--monotonic", str(STEADY_S), "--fork", "--kill-child"]
    if subprocess.run([*namespace, "true"], check=False, capture_output=True).returncode:
        pytest.skip("NOT RUN: no time namespaces for this user, or in this kernel")
    behind, ahead = Clocks(library, tmp_path / "behind"), Clocks(library, tmp_path / "ahead")
    behind.set(BEHIND_S, 0)
    ahead.set(AHEAD_S, 0)
    paths = prepared(tmp_path / "run")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    join = [sys.executable, "-m", "verl_slurm_daemon", "join", "--run", str(paths.root)]
    joined = subprocess.Popen(
        [*namespace, *join, "--hostfile", str(hosts), "--host", "127.0.0.2"],
        env=psutil.Process().environ() | ahead.environ,
    )
    try:
        process = lead(paths, "--hostfile", str(hosts), environ=behind.environ)
        until(process, "first_rollout")
        process.send_signal(signal.SIGUSR2)  # 30 s from now, whatever the time is
        assert finish(process) == 0
        assert joined.wait(timeout=300) == 0
    finally:
        joined.kill()
        joined.wait()
    assert told(paths, "degraded", "hang", "crash", "save_failed", "one_copy") == []
    assert len(told(paths, "started")) == 2
    (save,) = [event for event in told(paths, "save") if event["stop"]]
    assert 20.0 < save["seconds_left"] <= 30.0
    here, there = first_log(paths, 1, 0), first_log(paths, 1, 1)
    assert 1100 < (there[0] - here[0]).total_seconds() < 1300, "as the test has it"
    assert there[1] - here[1] > STEADY_S - 100
    assert ledger_stats(paths).duplicates == ()
    same, said = same_weights(paths.root, straight.root)
    assert same, said
    wait_until_gone(str(paths.root))


@pytest.mark.soak
@pytest.mark.scenario("K03")
def test_a_machine_that_sleeps_for_hours_is_not_taken_for_hung_and_a_deadline_that_it_slept_over_is_said(
    library: Path, straight: RunPaths, tmp_path: Path
) -> None:
    clocks = Clocks(library, tmp_path / "clocks")
    paths = prepared(tmp_path / "run")
    process = lead(paths, environ=clocks.environ)
    until(process, "first_rollout")
    others = _below(process)
    with held(others):
        process.send_signal(signal.SIGUSR2)  # 30 s to live
        until(process, "stop=true")
        process.send_signal(signal.SIGSTOP)
        clocks.set(2 * HOUR, 2 * HOUR)
        process.send_signal(signal.SIGCONT)
        assert "deadline" in until(process, "degraded")
    until(process, "first_rollout")  # of the next life
    others = _below(process)
    process.send_signal(signal.SIGSTOP)
    with held(others):
        clocks.set(6 * HOUR, 6 * HOUR)
        process.send_signal(signal.SIGCONT)
    assert finish(process) == 0
    assert told(paths, "hang", "crash") == []
    assert len(told(paths, "restart")) == 2
    assert [event["accepted"] for event in told(paths, "requeue")] == [True]
    assert told(paths, "ended")[-1]["exit_code"] == ExitCode.OK
    same, said = same_weights(paths.root, straight.root)
    assert same, said
    wait_until_gone(str(paths.root))


def _below(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Agents, launchers and ranks."""
    found = psutil.Process(process.pid).children(recursive=True)
    assert sum("verl_slurm.trainer" in other.cmdline() for other in found) >= 2
    return found
