"""Children: started so that a warning does not kill them, ended so that nothing of them stays.

Slurm sends its warnings (SIGTERM, SIGUSR1, SIGCONT) to EVERY process of a step. Ranks and their launcher start with
these ignored, which exec and fork hand on; whoever is to be told is told through the control page. Ending
them is then a matter of SIGKILL to the whole tree: ranks are in sessions of their own, so process
groups do not reach them; the agent is their subreaper, so the tree stays below it whoever dies in between.
"""

import os
import signal
from collections.abc import Iterable
from contextlib import suppress

import psutil

from verl_slurm.base.prctl import die_with_parent
from verl_slurm_daemon.signals import WARNINGS

__all__ = ["child_setup", "kill_tree", "signal_ranks", "tail"]


def child_setup() -> None:
    """Between fork and exec of a launcher: survive warnings, but not the agent."""
    for number in WARNINGS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()


# What /proc says of a process that dies while it is looked at; psutil does not turn all of it into its own errors.
_GOING = (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError, ProcessLookupError)
_LOOKS = 5


def kill_tree(patience_s: float = 3.0) -> list[int]:
    """SIGKILL everything below this process; returns who did not die in time (state D: Slurm's to wait for).

    Repeats while it finds someone new: a process may fork between the look and the kill.
    """
    stubborn: set[int] = set()
    while True:
        children = [c for c in _children() if c.pid not in stubborn]
        if not children:
            return sorted(stubborn)
        for child in children:
            with suppress(*_GOING):
                child.kill()
        _, alive = psutil.wait_procs(children, timeout=patience_s)
        stubborn |= {child.pid for child in alive}


def signal_ranks(pids: Iterable[int], number: int) -> None:
    """Signal those of `pids` that are below this process: a number that a rank told is not believed by itself."""
    for child in _children():
        if child.pid in set(pids):
            with suppress(*_GOING):
                child.send_signal(number)


def _children() -> Iterable[psutil.Process]:
    for _ in range(_LOOKS):
        with suppress(*_GOING):
            return [c for c in psutil.Process(os.getpid()).children(recursive=True) if _lives(c)]
    return []


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except _GOING:
        return False


def tail(path: str | os.PathLike[str], limit: int = 4096) -> str:
    """The last bytes of a log, for an error's detail; empty where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        return ""
