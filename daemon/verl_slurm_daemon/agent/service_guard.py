"""Runs one service and leaves nothing of it behind: it ends all its descendants when the service or its host ends.

The service's host cannot do this alone, since it may be killed itself. The three ends that can come alone:

* the service ends: the guard ends what it left, and ends with its exit code;
* the host ends, killed or not: the kernel signals the guard, which ends everything;
* the guard is killed: the kernel kills the service, and its host, a subreaper, ends what it inherits.

    python -P -m verl_slurm_daemon.agent.service_guard PROGRAM ARGS...

Slurm's warnings are blocked in the service and not only ignored. A web server installs a handler of its own for
SIGTERM, and would leave at the start of the save that may still need it.
"""

import os
import signal
import subprocess
import sys
from types import FrameType

from verl_slurm.base.processes import become_subreaper, die_with_parent
from verl_slurm.wire.environment import HOST_PID_VARIABLE
from verl_slurm_daemon.descendants import WARNINGS, kill_tree

HOST_GONE = signal.SIGRTMIN + 4
"""What the kernel sends the guard when its host ends. No program sends it."""


def main(argv: list[str]) -> int:
    """Runs the program; returns its exit code, 128 + N if signal N ended it, 127 if it cannot be started."""
    become_subreaper()
    signal.signal(HOST_GONE, _host_gone)
    die_with_parent(HOST_GONE)
    # A host that died before `die_with_parent` sent no signal: another parent than the host means that it is gone.
    if os.getppid() == 1 or os.getppid() != int(os.environ.pop(HOST_PID_VARIABLE, "0")):
        return 1
    signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)
    try:
        service = subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
    except OSError as error:
        os.write(2, f"verl-slurm: {argv[0]}: {error.strerror}\n".encode())
        return 127
    while True:
        # Any of them: a subreaper must wait for what it adopts.
        pid, status = os.wait()
        if pid == service.pid:
            break
    kill_tree()
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _host_gone(_number: int, _frame: FrameType | None) -> None:
    kill_tree()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
