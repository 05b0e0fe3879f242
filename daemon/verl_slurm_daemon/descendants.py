"""Processes and signals of the daemon: starting children so that a warning does not kill them, ending them so
that none is left, reaping orphans, and hearing every signal.

Slurm sends its warnings (SIGTERM, SIGUSR1, SIGCONT) to EVERY process of a step. None of them is a reason to
die. Ranks and their launcher start with these ignored; they are told through the control page instead. Ending
them therefore takes SIGKILL to the whole tree. Ranks have sessions of their own, so process groups do not
reach them. The agent is their subreaper, so the tree stays below it even if a process in between dies.

A subreaper must wait() for the processes it adopts, or they stay as zombies. The daemon's own children are
left to the code that started them. The session tells the two apart: a command that asks Slurm is in the
daemon's session, agents and launchers lead sessions of their own, and processes that ranks start are in the
ranks' sessions.
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


def child_setup() -> None:
    """Runs between fork and exec of a launcher: makes it survive warnings and die with the agent."""
    # SIG_IGN survives fork and exec, a handler does not: data loader workers and vLLM's children need it, too.
    for number in WARNINGS:
        signal.signal(number, signal.SIG_IGN)
    # An agent that Slurm kills (SIGKILL) cannot end its ranks any more; the kernel does.
    die_with_parent()


# /proc may answer with any of these for a process that dies during the look; psutil does not convert all of
# them.
_GOING = (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError, ProcessLookupError)
_LOOKS = 5


def kill_tree(patience_s: float = 3.0) -> list[int]:
    """Kills everything below this process; returns what did not die in time (state D: left to Slurm)."""
    stubborn: set[int] = set()
    while True:
        # A look after each kill: a process may have forked after the former one.
        children = [c for c in _children() if c.pid not in stubborn]
        if not children:
            return sorted(stubborn)
        for child in children:
            with suppress(*_GOING):
                child.kill()
        _, alive = psutil.wait_procs(children, timeout=patience_s)
        stubborn |= {child.pid for child in alive}


def listeners(number: int) -> list[tuple[psutil.Process, str]]:
    """Returns the processes below this one that catch a signal, with their names. It would end any other."""
    found = []
    for child in _children():
        with suppress(*_GOING, ValueError, IndexError):
            status = Path(f"/proc/{child.pid}/status").read_text()
            caught = int(status.split("SigCgt:")[1].split()[0], 16)
            if caught >> (number - 1) & 1:
                # Ray's workers rename themselves by what they do.
                found.append((child, " ".join(child.cmdline()) or child.name()))
    return found


def _children() -> Iterable[psutil.Process]:
    # A walk of /proc breaks off when a process ends in it. It is repeated, since "none" would leave ranks alive.
    for _ in range(_LOOKS):
        with suppress(*_GOING):
            own = [c for c in psutil.Process(os.getpid()).children() if c.pid not in _former]
            below = [c for parent in own for c in parent.children(recursive=True)]
            return [c for c in (*own, *below) if _lives(c)]
    return []


_former: set[int] = set()


def spare_former_children() -> None:
    """Leaves alone what is below this process already: in an image, that may be what serves the image's files."""
    _former.update(child.pid for child in psutil.Process(os.getpid()).children())


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except _GOING:
        return False


def tail(path: str | os.PathLike[str], limit: int = 4096) -> str:
    """Returns the last bytes of a log for an error's detail; empty if there is no log."""
    try:
        with open(path, "rb") as file:
            # The end of it: a launcher's last line says what ended the ranks.
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        return ""


WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGCONT, signal.SIGHUP)
"""Signals that the ranks and their launcher ignore. In a Slurm job an agent relays them to its lead."""
RELAYED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
"""Signals that an agent outside Slurm relays to its lead: there may be a terminal, where Ctrl-C has to end it."""


def listen(loop: asyncio.AbstractEventLoop, number: signal.Signals, heard: Callable[[], None]) -> None:
    """Has the loop call `heard` for each such signal, several of one number maybe once. On the main thread."""

    def tell(_number: int, _frame: FrameType | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: no handler is left to call
            loop.call_soon_threadsafe(heard)

    # asyncio learns of a signal by a byte that Python's C handler writes to a socket of a few hundred bytes. A byte
    # that finds no room is dropped, and its signal is lost: if a thousand children end while the loop waits for a disk,
    # that may be a preemption's TERM. So the byte wakes the loop, which a full socket does as well, and the signal is
    # reported by `tell`, which Python keeps pending until it has run.
    loop.add_signal_handler(number, lambda: None)
    # asyncio makes Python print a warning on stderr when the socket is full. A full socket is harmless here.
    signal.set_wakeup_fd(signal.set_wakeup_fd(-1), warn_on_full_buffer=False)
    # Replaces asyncio's handler, not the descriptor to wake by that it has set.
    signal.signal(number, tell)


_LATE_S = 5.0


def bury_orphans(loop: asyncio.AbstractEventLoop) -> None:
    """Reaps adopted children as they end, from now on. Runs on the main thread."""
    due = late = False

    # `leaders`: session leaders that were dead a while ago already.
    def bury(leaders: frozenset[int] = frozenset()) -> None:
        nonlocal due, late
        due, again = False, set()
        for pid in _adopted():
            session = _session_of_dead(pid)
            # Alive; or in the daemon's session: a command that asks Slurm, whose starter waits for its exit status.
            if session in (None, os.getsid(0)):
                continue
            # A leader may be our agent or launcher. A thread or descriptor of asyncio waits for each of those, so one
            # that is still there after `_LATE_S` is an orphan.
            if session == pid and pid not in leaders:
                again.add(pid)
                continue
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        # One timer at a time finds all of them.
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
