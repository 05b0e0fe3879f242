"""Processes and signals of the daemon: starting children so that a warning does not kill them, ending them so that none
is left, reaping orphans, and hearing every signal.

Slurm sends its warnings (SIGTERM, SIGUSR1, SIGCONT) to EVERY process of a step. None of them is a reason to die. Ranks
and their launcher start with these ignored, and exec and fork pass that on; they are told through the control page
instead. Ending them therefore takes SIGKILL to the whole tree. Ranks have sessions of their own, so process groups do
not reach them. The agent is their subreaper, so the tree stays below it even if a process in between dies.

A subreaper must wait() for the processes it adopts, or they stay as zombies. An agent is the subreaper of its node's
ranks as long as they train, so it adopts what a reward program leaves behind without waiting for it. A lead that is the
first process of a container adopts orphans in the same way. The daemon's own children are left to the code that started
them. The session tells the two apart. A command that asks Slurm is in the daemon's session; agents and launchers lead
sessions of their own; processes that ranks start are in the ranks' sessions. A session leader may be either. asyncio
starts the daemon's own children and has a thread (or a descriptor) waiting for each. So a dead session leader that is
still there a while later is an orphan.

asyncio learns of a signal by a byte that Python's C handler writes to a socket. The socket holds a few hundred bytes.
A byte that finds no room is dropped, and its signal is lost. If a thousand children end while the loop waits for a
disk, the lost one may be a preemption's TERM. In `listen` the byte serves to wake the loop, and a full socket does that
as well. The signal is reported by a handler of its own, which Python keeps pending until it has run.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

from verl_slurm.base.processes import die_with_parent, stat_fields

__all__ = [
    "RELAYED",
    "WARNINGS",
    "bury_orphans",
    "child_setup",
    "kill_tree",
    "listen",
    "signal_ranks",
    "tail",
]


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


WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGCONT, signal.SIGHUP)
"""Signals that the ranks and their launcher ignore. In a Slurm job an agent relays them to its lead."""
RELAYED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
"""Signals that an agent outside Slurm relays to its lead: there may be a terminal, where Ctrl-C has to end it."""


def listen(loop: asyncio.AbstractEventLoop, number: signal.Signals, heard: Callable[[], None]) -> None:
    """Makes the loop call `heard` for each such signal, however many others arrive with it.

    Signals of one number that arrive together may be reported as one: Unix does not count them.

    Runs on the main thread.
    """

    def tell(_number: int, _frame: FrameType | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: no handler is left to call
            loop.call_soon_threadsafe(heard)

    loop.add_signal_handler(number, lambda: None)
    # asyncio makes Python print a warning on stderr when the socket is full. A full socket is harmless here.
    signal.set_wakeup_fd(signal.set_wakeup_fd(-1), warn_on_full_buffer=False)
    signal.signal(number, tell)


_LATE_S = 5.0


def bury_orphans(loop: asyncio.AbstractEventLoop) -> None:
    """Reaps adopted children as they end, from now on. Runs on the main thread."""
    due = late = False

    def bury(leaders: frozenset[int] = frozenset()) -> None:
        """Reaps the dead. Args: leaders: the session leaders that were dead a while ago already."""
        nonlocal due, late
        due, again = False, set()
        for pid in _adopted():
            session = _session_of_dead(pid)
            if session in (None, os.getsid(0)):
                continue
            if session == pid and pid not in leaders:
                again.add(pid)
                continue
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if again and not late:
            late = True
            loop.call_later(_LATE_S, look_again, frozenset(again))

    def look_again(leaders: frozenset[int]) -> None:
        nonlocal late
        late = False
        bury(leaders)

    def wake() -> None:
        nonlocal due
        if not due:  # a thousand may end at once; one look finds them all
            due = True
            loop.call_soon(bury)

    listen(loop, signal.SIGCHLD, wake)


def _adopted() -> list[int]:
    found: list[int] = []
    with suppress(OSError):  # no CONFIG_PROC_CHILDREN in this kernel: zombies stay until the end
        for task in Path("/proc/self/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def _session_of_dead(pid: int) -> int | None:
    """Returns the session of a dead process; None: it lives, or is gone."""
    try:
        fields = stat_fields(pid)
    except OSError:
        return None
    return int(fields[3]) if fields[0] == "Z" else None
