"""The deadline and the memory behind every check of a stranger's file: each is what ends the work here."""

import signal
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.scenario("SEC09"), pytest.mark.slow]

# A library that catches everything, and goes on.
STUBBORN = """
import sys
from verl_slurm.export.skeleton import bounded_work
try:
    with bounded_work(64 << 20, float(sys.argv[1])):
        {work}
except (TimeoutError, MemoryError) as error:
    print(type(error).__name__, error)
else:
    print("ended by itself")
"""
LOOP = """while True:
            try:
                while True:
                    pass
            except Exception:
                pass"""


def run(work: str, seconds: float = 0.2) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-P", "-c", STUBBORN.format(work=work), str(seconds)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=500, check=False)


def test_a_library_that_goes_on_without_end_is_ended_by_the_alarm() -> None:
    done = run(LOOP)
    assert (done.returncode, done.stdout) == (0, "TimeoutError no end after 0.2 s\n"), done.stderr


def test_a_loop_in_c_which_sees_no_alarm_is_ended_by_the_kernel() -> None:
    done = run("sum(range(1 << 62))")
    assert (done.returncode, done.stdout) == (-signal.SIGXCPU, ""), done.stderr


def test_memory_beyond_the_limit_is_refused_and_the_limit_ends_with_the_work() -> None:
    done = run("bytearray(65 << 20)", 300)
    assert done.stdout == "MemoryError \n", done.stderr
    done = run("pass\n    bytearray(256 << 20)", 300)
    assert done.stdout == "ended by itself\n", done.stderr
