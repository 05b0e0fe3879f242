"""Child processes: starting them so that a warning does not kill them, and ending them so that none is left.

Slurm sends its warnings (SIGTERM, SIGUSR1, SIGCONT) to EVERY process of a step. Ranks and their launcher
start with these ignored, and exec and fork pass that on; they are told through the control page instead.
Ending them therefore takes SIGKILL to the whole tree. Ranks have sessions of their own, so process groups do
not reach them. The agent is their subreaper, so the tree stays below it even if a process in between dies.
"""

import os
import signal
from collections.abc import Iterable
from contextlib import suppress

import psutil

from verl_slurm.base.processes import die_with_parent
from verl_slurm_daemon.signals import WARNINGS

__all__ = ["child_setup", "kill_tree", "signal_ranks", "tail"]


def child_setup() -> None:
    """Runs between fork and exec of a launcher: makes it survive warnings and die with the agent."""
    for number in WARNINGS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()


# /proc may answer with any of these for a process that dies during the look; psutil does not convert all of
# them.
_GOING = (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError, ProcessLookupError)
_LOOKS = 5


def kill_tree(patience_s: float = 3.0) -> list[int]:
    """Sends SIGKILL to everything below this process; returns the processes that did not die in time (state
    D: left to Slurm).

    Repeats as long as it finds a new process: one may fork between the look and the kill.
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
    """Signals those of `pids` that are below this process: a number that a rank reported is not trusted by itself."""
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
    """Returns the last bytes of a log for an error's detail; empty if there is no log."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        return ""
