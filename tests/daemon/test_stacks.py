"""Who is asked for the stacks of a hang: each process below the agent that answers, and no other."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest
from verl_slurm_daemon.agent.node import write_stacks
from verl_slurm_daemon.descendants import listeners

from verl_slurm.wire.environment import LOG_VARIABLE, STACKS_SIGNAL

pytestmark = pytest.mark.slow

ANSWERS = """
import sys, threading
from verl_slurm.wire.hang_records import answer_with_stacks
answer_with_stacks()
def waits_for_a_tool(): threading.Event().wait()
print("ready", flush=True)
waits_for_a_tool()
"""
DEAF = "print('ready', flush=True); import time; time.sleep(1000)"


def start(program: str, **environ: str) -> "subprocess.Popen[bytes]":
    argv = [sys.executable, "-c", program]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_processes_that_answer_write_into_the_ranks_log_and_no_other_is_ended(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    log.write_text("the ranks' own words\n")
    below = [start(ANSWERS, **{LOG_VARIABLE: str(log)}) for _ in range(2)]
    deaf = start(DEAF)
    try:
        assert {process.pid for process, _ in listeners(STACKS_SIGNAL)} == {one.pid for one in below}
        asyncio.run(write_stacks(log))
        deadline = time.monotonic() + 30
        # Nothing tells that a process has written; on a busy machine the second may be asked before the first has.
        while log.read_text().count("in waits_for_a_tool") < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [one.poll() for one in (*below, deaf)] == [None, None, None]
    finally:
        for one in (*below, deaf):
            one.kill()
            one.communicate()
    text = log.read_text()
    assert text.startswith("the ranks' own words\n")
    parts = text.split("\n---- stacks of ")[1:]
    assert {part.splitlines()[0].rpartition("(pid ")[2] for part in parts} == {f"{one.pid})" for one in below}
    assert text.count("in waits_for_a_tool") == 2
