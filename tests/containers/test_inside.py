"""The first process in a container: it hands the environment on, and ends everything with its agent."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from verl_slurm.containers.inside import ENVIRONMENT, LIFELINE, pack_environment

pytestmark = pytest.mark.slow

# A launcher, and a rank that has left its session and would outlive it.
LAUNCHER = """
import os, subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(rank.pid, os.environ["SAID"], os.environ["DEMO_TOKEN"], flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.fixture
def agent(short_dir: Path) -> Iterator[socket.socket]:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(short_dir / LIFELINE))
    listener.listen(1)
    (short_dir / ENVIRONMENT).write_bytes(pack_environment({"SAID": "two\nlines", "DEMO_TOKEN": "sesame"}))
    yield listener
    listener.close()


def start(place: Path, seconds: int, workdir: str = "/") -> subprocess.Popen[str]:
    argv = [sys.executable, "-P", "-m", "verl_slurm.containers.inside", str(place), workdir]
    program = [sys.executable, "-c", LAUNCHER, str(seconds)]
    return subprocess.Popen([*argv, *program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rank_of(process: subprocess.Popen[str]) -> psutil.Process:
    assert process.stdout is not None
    told = process.stdout.readline() + process.stdout.readline()
    pid, rest = told.split(" ", 1)
    assert rest == "two\nlines sesame\n"
    return psutil.Process(int(pid))


@pytest.mark.parametrize("how", ["the agent lets go", "the agent is killed"])
def test_everything_in_the_container_ends_with_the_agent(
    agent: socket.socket, short_dir: Path, how: str
) -> None:
    with start(short_dir, 600) as process, agent.accept()[0] as line:
        rank = rank_of(process)
        for number in (signal.SIGTERM, signal.SIGUSR1):  # Slurm's warnings, which end nothing
            process.send_signal(number)
        if how == "the agent lets go":
            line.shutdown(socket.SHUT_WR)
            assert line.recv(1) == b""  # only now: all processes are gone
            assert not rank.is_running()
        else:
            line.close()
        assert process.wait(20) == 128 + signal.SIGKILL
        psutil.wait_procs([rank], timeout=20)
        assert not rank.is_running()


def test_the_environment_is_read_once_and_what_a_launcher_leaves_is_ended(
    agent: socket.socket, short_dir: Path
) -> None:
    with start(short_dir, 0) as process, agent.accept()[0]:
        rank = rank_of(process)
        assert process.wait(20) == 0
        assert not rank.is_running()
    assert not (short_dir / ENVIRONMENT).exists()


def test_a_directory_that_the_image_lacks_is_told_in_one_line(short_dir: Path) -> None:
    with start(short_dir, 0, "/no/such") as process:
        _, told = process.communicate(timeout=20)
    assert process.returncode == 1
    assert told == (
        "verl-slurm: ConfigError: slurm.container.workdir: /no/such: No such file or directory in the image; "
        "name another\n"
    )
    assert os.listdir(short_dir) == []
