"""Ends a rank: by the kernel when its launcher ends, and by itself when its work is done.

An agent that is killed takes the launcher with it (PR_SET_PDEATHSIG), but the ranks are in sessions of their own. They
would continue and write. The kernel sends its signal only for a parent that dies after the request, so an earlier death
is checked, too.
"""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.processes import die_with_parent
from verl_slurm.wire.environment import CONTROL_VARIABLE


def die_with_launcher() -> None:
    """Under a daemon, on Linux: makes this process die with its parent, and at once if that is dead already."""
    control = os.environ.get(CONTROL_VARIABLE)
    if control is None or sys.platform != "linux":
        return
    parent = os.getppid()
    # A worker of Ray's: its raylet forks it in a thread that may end, and dies with our launcher, like all of Ray.
    if _name(parent) == "raylet":
        return
    # The signal comes with the end of the *thread* that forked us (prctl(2)); the launcher has one thread.
    die_with_parent()
    # Checked after the request: the kernel signals a death from then on, and the launcher may have died before.
    if parent == 1 or not _is_launcher(parent, control) or os.getppid() != parent:
        os._exit(1)


def run_and_leave(main: Callable[[], int]) -> NoReturn:
    """Runs `main` and exits without the interpreter's own shutdown."""
    # Before anything else: a rank whose launcher is gone would train on, unseen by the daemon.
    die_with_launcher()
    code = int(ExitCode.INTERNAL)
    try:
        code = main()
    except SystemExit as leave:  # argparse
        code = leave.code if isinstance(leave.code, int) else int(ExitCode.USAGE)
    except BaseException:  # noqa: BLE001 - the root of this process: no caller is left to say it
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        # At shutdown torch 2.13 destroys threads that still run. About one in ten processes that used FSDP2
        # then dies with SIGABRT ("terminate called without an active exception") after all its work is done,
        # which the launcher takes for a crash. By now everything that must be written is flushed and closed.
        os._exit(code)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _is_launcher(pid: int, control: str) -> bool:
    """Returns whether `pid` belongs to our launch: it has our control directory."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True  # /proc does not tell; the changed parent is still noticed
    # A process that adopts an orphan (the agent, as its subreaper, or init) has none: the agent makes the
    # directory up.
    return f"{CONTROL_VARIABLE}={control}".encode() in environment.split(b"\0")
