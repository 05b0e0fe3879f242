"""Real processes: the launcher is killed, and its rank must be gone."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import python_path
from verl_slurm.wire.environment import CONTROL_VARIABLE

REPOSITORY = Path(__file__).resolve().parents[2]

RANK = """
import os, signal
from verl_slurm.wire.lifeline import run_and_leave

def train():
    os.write(1, b"training\\n")
    signal.pause()

run_and_leave(train)
"""
LAUNCHER = """
import signal, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
signal.pause()
"""


def _environ(control: str | None) -> dict[str, str]:
    environ = os.environ | python_path()
    environ.pop(CONTROL_VARIABLE, None)
    return environ | ({CONTROL_VARIABLE: control} if control else {})


@pytest.mark.scenario("P02")
def test_a_rank_dies_with_its_launcher(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK],
        stdout=write_end,
        env=_environ(str(tmp_path)),
        start_new_session=True,
    )
    os.close(write_end)
    try:
        assert _next(read_end) == b"training\n"
        launcher.kill()
        launcher.wait()
        # End of file: nobody who holds the other end is alive.
        assert _next(read_end) == b""
    finally:
        os.close(read_end)
        launcher.kill()
        _kill_session(launcher.pid)
        launcher.wait()


def test_a_rank_that_finds_its_launcher_dead_does_not_begin(tmp_path: Path) -> None:
    """We are no launcher of the rank: we do not have its control directory. So it takes itself for an orphan."""
    done = subprocess.run(
        [sys.executable, "-c", RANK],
        env=_environ(str(tmp_path)),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, b"")


def test_by_hand_a_rank_belongs_to_nobody() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RANK], env=_environ(None), stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        try:
            assert _next(process.stdout.fileno()) == b"training\n"
        finally:
            process.kill()


def _next(fd: int) -> bytes:
    """What comes next from a pipe; at most 20 s, so that a failing test fails."""
    ready, _, _ = select.select([fd], [], [], 20)
    if not ready:
        pytest.fail("nothing came")
    return os.read(fd, 100)


def _kill_session(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return
