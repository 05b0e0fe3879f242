"""A command line as a child process, with the memory and the time it took.

Children are forked from one process that has imported the command line already: tests start hundreds of them, and each
import takes half a second of a processor.
"""

import atexit
import gc
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.processes import ROOT, python_path

_Asked = tuple[str, list[str], str, dict[str, str]]
"""Module, words, working directory, environment."""


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


def measured_program(
    module: str,
    *words: object,
    cwd: Path = ROOT,
    environ: Mapping[str, str] = {},
    timeout_s: float | None = None,
) -> Measured:
    """Run `python -P -m MODULE` with these words.

    Raises:
        AssertionError: it has not ended after `timeout_s`; it is killed.
    """
    line = _line_to_parent()
    asked: _Asked = (module, [str(word) for word in words], str(cwd), {**os.environ, **environ})
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        socket.send_fds(line, [msgspec.json.encode(asked)], [out.fileno(), err.fileno()])
        child = int(line.recv(64))
        line.settimeout(timeout_s)
        try:
            ended = line.recv(4096)
        except BaseException as error:
            os.killpg(child, signal.SIGKILL)
            line.settimeout(None)
            line.recv(4096)
            if isinstance(error, TimeoutError):
                raise AssertionError(f"not ended after {timeout_s} s") from None
            raise
        finally:
            line.settimeout(None)
        code, peak_kb, seconds = msgspec.json.decode(ended, type=tuple[int, int, float])
        out.seek(0), err.seek(0)
        return Measured(code, out.read(), err.read(), peak_kb / 1024, seconds)


@cache
def _line_to_parent() -> socket.socket:
    """The line to the process that forks the children. It ends with this one."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.hostile.measured", str(its.fileno())],
        env=os.environ | python_path(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[its.fileno()],
    )
    its.close()
    atexit.register(parent.wait)
    atexit.register(ours.close)
    return ours


def _fork_as_asked(line: socket.socket) -> None:
    """Returns in each child when it has run its command, and in the parent when the other end of its line is gone."""
    from verl_slurm.cli.main import COMMANDS

    for entry in COMMANDS.values():
        import_module(f"verl_slurm.cli.{entry.module}")
    gc.freeze()  # or a child would copy every page when it looks for garbage at its end
    while True:
        data, outputs, _, _ = socket.recv_fds(line, 1 << 20, 2)
        if not data:
            return
        child = os.fork()
        if child == 0:
            line.close()
            return _run(msgspec.json.decode(data, type=_Asked), outputs)
        for fd in outputs:
            os.close(fd)
        line.send(b"%d" % child)
        _, status, usage = os.wait4(child, 0)
        ended: Any = (os.waitstatus_to_exitcode(status), usage.ru_maxrss, usage.ru_utime + usage.ru_stime)
        line.send(msgspec.json.encode(ended))


def _run(asked: _Asked, outputs: list[int]) -> None:
    module, words, place, environ = asked
    os.setsid()
    for number, fd in enumerate(outputs, start=1):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environ)
    added = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *sys.path)]
    sys.path[:0] = added
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _fork_as_asked(socket.socket(fileno=int(sys.argv[1])))
