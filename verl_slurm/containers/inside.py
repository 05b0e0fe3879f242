"""The first process of ours in a container: gives the ranks' launcher its environment, and ends it with the agent.

    python -m verl_slurm.containers.inside CONTROL WORKDIR PROGRAM ARGS...

Some runtimes put a process of their own between an agent and the container, so the kernel's signal for a parent's death
(`wire.lifeline`) does not reach in, and a kill of the agent's children may miss the ranks. So this process holds a
connection to the agent (`LIFELINE`). When it closes, all processes below are killed; when they are gone, this process
ends, and the agent sees that by the same connection.

The environment comes by a private file (`ENVIRONMENT`), which is deleted: variables on a command line are seen by other
users, and some runtimes keep those that they are told on a disk.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, Popen

from verl_slurm.base.processes import become_subreaper, die_with_parent

ENVIRONMENT = "environment"
"""Name of the file in the control directory: `NAME=VALUE`, each ended by a zero byte."""
LIFELINE = "lifeline"
"""Name of the stream socket in the control directory. Nothing is sent."""

# As `processes.WARNINGS` of the daemon: a runtime may have reset what the agent had set to be ignored.
_WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGCONT, signal.SIGHUP)


def pack_environment(environ: dict[str, str]) -> bytes:
    """Returns the content of the file."""
    return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the launcher; returns its exit code."""
    control, workdir, *program = sys.argv[1:] if argv is None else argv
    for number in _WARNINGS:
        signal.signal(number, signal.SIG_IGN)
    become_subreaper()
    # A runtime that becomes this process may have started one that serves the image. Killed, it takes our code away.
    former = _children()
    try:
        os.chdir(workdir)
    except OSError as error:
        _say(f"ConfigError: slurm.container.workdir: {workdir}: {error.strerror} in the image; name another")
        return 1
    file = Path(control, ENVIRONMENT)
    pairs = [pair for pair in file.read_bytes().split(b"\0") if pair]
    file.unlink()
    environ = dict(os.environ) | {
        os.fsdecode(name): os.fsdecode(value) for name, _, value in (p.partition(b"=") for p in pairs)
    }
    line = socket.socket(socket.AF_UNIX)
    line.connect(str(Path(control, LIFELINE)))
    try:
        # A session of its own, as outside: `ranks` expects to lead one.
        launcher = Popen(
            program, env=environ, stdin=DEVNULL, start_new_session=True, preexec_fn=die_with_parent
        )
    except OSError as error:
        _say(f"OSError: {program[0]} was not started in the image: {error}")
        return 1
    threading.Thread(target=_end_with_agent, args=(line, launcher.pid), daemon=True).start()
    while True:
        pid, status = os.wait()  # of adopted processes, too, which would stay zombies
        if pid == launcher.pid:
            break
    _end_the_rest(former)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _end_with_agent(line: socket.socket, launcher: int) -> None:
    with suppress(OSError):
        line.recv(1)
    # Its ranks go with it (`wire.lifeline`), and the main thread waits for all of them.
    with suppress(ProcessLookupError):
        os.kill(launcher, signal.SIGKILL)


def _end_the_rest(former: set[int]) -> None:
    """Kills what is left below this process, except `former`, and waits for its end."""
    while rest := _children() - former:
        for pid in rest:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in rest:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> set[int]:
    found: set[int] = set()
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            found.update(map(int, (task / "children").read_text().split()))
    return found


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"verl-slurm: {text}\n".encode(errors="replace"))


if __name__ == "__main__":
    sys.exit(main())
