"""A command line as a child process, with the memory and the time it took."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.harness import ROOT


class Measured(NamedTuple):
    """What a command did.

    `peak_mb`: resident, of the largest of its processes. `seconds`: of all of them on a processor, which a busy machine
    changes little; what waits without end ends with the test's own time limit.
    """

    code: int
    out: str
    err: str
    peak_mb: float
    seconds: float


def measured(*words: object, cwd: Path = ROOT, environ: Mapping[str, str] = {}) -> Measured:
    """Run `verl-slurm` with these words."""
    return measured_program("verl_slurm.cli", *words, cwd=cwd, environ=environ)


# A process's peak begins with that of the one that started it, which pytest's would be: so a small one stands between.
_BETWEEN = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[2:])
_, status, usage = os.wait4(process.pid, 0)
process.returncode = os.waitstatus_to_exitcode(status)
os.write(int(sys.argv[1]), b"%d %f" % (usage.ru_maxrss, usage.ru_utime + usage.ru_stime))
sys.exit(process.returncode)
"""


def measured_program(
    module: str,
    *words: object,
    cwd: Path = ROOT,
    environ: Mapping[str, str] = {},
    timeout_s: float | None = None,
) -> Measured:
    """Run `python -m MODULE` with these words.

    Raises:
        AssertionError: it has not ended after `timeout_s`; it is killed.
    """
    argv = [sys.executable, "-P", "-m", module, *map(str, words)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        read, write = os.pipe()
        with os.fdopen(read, "rb") as peak:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BETWEEN, str(write), *argv],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **environ},
                pass_fds=(write,),
                start_new_session=True,
            )
            os.close(write)
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise AssertionError(f"not ended after {timeout_s} s") from None
            peak_kb, seconds = map(float, peak.read().split())
        out.seek(0), err.seek(0)
        return Measured(process.returncode, out.read(), err.read(), peak_kb / 1024, seconds)
