"""The deadline and the memory behind every check of a stranger's file: each is what ends the work here."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = [pytest.mark.scenario("SEC09"), pytest.mark.slow]

# A library that catches everything, and goes on.
STUBBORN = """
try:
    with bounded_work(64 << 20, {seconds}):
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
WORK = {
    "a loop": STUBBORN.format(work=LOOP, seconds=0.2),
    "a loop in C": STUBBORN.format(work="sum(range(1 << 62))", seconds=0.2),
    "memory": STUBBORN.format(work="bytearray(65 << 20)", seconds=300),
    "memory afterwards": STUBBORN.format(work="pass\n    bytearray(256 << 20)", seconds=300),
}
# The libraries behind the check are imported once, and each piece of work has a process of its own.
EACH = """
import json, os, sys
from verl_slurm.export.skeleton import bounded_work
for name, source in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        sys.stdout = open(name, "w")
        exec(source)
        sys.stdout.close()
        os._exit(0)
    print(json.dumps([name, os.waitstatus_to_exitcode(os.wait()[1])]))
"""


class Ended(NamedTuple):
    code: int
    said: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    place: Path = tmp_path_factory.mktemp("work")
    argv = [sys.executable, "-P", "-c", EACH, json.dumps(WORK)]
    done = subprocess.run(argv, cwd=place, capture_output=True, text=True, timeout=500, check=True)
    codes = dict(json.loads(line) for line in done.stdout.splitlines())
    return {name: Ended(code, (place / name).read_text()) for name, code in codes.items()}


def test_a_library_that_goes_on_without_end_is_ended_by_the_alarm(ended: dict[str, Ended]) -> None:
    assert ended["a loop"] == (0, "TimeoutError no end after 0.2 s\n")


def test_a_loop_in_c_which_sees_no_alarm_is_ended_by_the_kernel(ended: dict[str, Ended]) -> None:
    assert ended["a loop in C"] == (-signal.SIGXCPU, "")


def test_memory_beyond_the_limit_is_refused_and_the_limit_ends_with_the_work(ended: dict[str, Ended]) -> None:
    assert ended["memory"] == (0, "MemoryError \n")
    assert ended["memory afterwards"] == (0, "ended by itself\n")
