"""Finds the processes that belong to a cluster, and ends exactly those.

The daemons are recognised by name and command line, which has a path in our directory; slurmstepd and slurmscriptd,
whose titles overwrite command line and environment, by the log file in our directory that they hold open. Job
processes are recognised by the variables that slurmstepd sets, SLURMD_NODENAME together with our SLURM_CONF, and by
their ancestry.
"""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from verl_slurm.base.processes import KnownProcess, known

# The daemons of a cluster, those with accounting included (tests/devcluster/accounting.py).
_LOGGERS = frozenset({"munged", "slurmctld", "slurmscriptd", "slurmd", "slurmstepd", "slurmdbd", "mariadbd"})
_POLL_S = 0.02


class Daemons(msgspec.Struct, frozen=True, kw_only=True):
    """The daemons of one cluster that are alive now."""

    munged: KnownProcess | None = None
    slurmctld: KnownProcess | None = None
    slurmd: dict[str, KnownProcess] = {}
    """By node name; a failed node is absent."""

    @property
    def can_answer(self) -> bool:
        """Returns whether the cluster answers at all; single nodes may be down."""
        return self.munged is not None and self.slurmctld is not None


def _environment(pid: int) -> dict[str, str]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # another user's, or gone
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if b"=" in item)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def find_daemons(directory: Path, slurm_conf: Path) -> Daemons:
    """Looks at every process of the machine. While a daemon replaces itself, finds the old process or the new one."""
    munged: KnownProcess | None = None
    slurmctld: KnownProcess | None = None
    slurmd: dict[str, KnownProcess] = {}
    # Pids are not recorded: from 23.11 `scontrol reconfigure` replaces slurmctld and slurmd by new processes.
    for pid in psutil.pids():
        name, argv = _command(pid)
        if name not in _LOGGERS or (process := known(pid)) is None:
            continue
        # The whole path tells ours from another cluster's, and from the machine's own daemons.
        if name == "munged" and f"--key-file={directory / 'munge' / 'key'}" in argv:
            munged = process
        elif name == "slurmctld" and argv[1:] == ["-f", str(slurm_conf)]:
            slurmctld = process
        elif name == "slurmd" and argv[1:2] == ["-N"] and argv[3:] == ["-f", str(slurm_conf)]:
            slurmd[argv[2]] = process
    return Daemons(munged=munged, slurmctld=slurmctld, slurmd=slurmd)


def _command(pid: int) -> tuple[str, list[str]]:
    try:
        name = _name(pid)
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "", []
    return name, os.fsdecode(line).removesuffix("\0").split("\0")


def _name(pid: int) -> str:
    # Any bytes: every process of the machine is looked at, and each names itself (PR_SET_NAME).
    return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()


def _logs_to(pid: int, logs: Path, node: str | None) -> bool:
    try:
        # A `tail -f` of a log is left alone.
        if _name(pid) not in _LOGGERS:
            return False
        for fd in os.listdir(f"/proc/{pid}/fd"):
            # A later start removes the directory of the logs: what an earlier one left holds a deleted file.
            target = Path(os.readlink(f"/proc/{pid}/fd/{fd}").removesuffix(" (deleted)"))
            if target.parent == logs and (node is None or target.name == node_log_name(node)):
                return True
    except OSError:  # another user's, or gone
        pass
    return False


def node_log_name(node: str) -> str:
    """Returns the file name of a node's log, which slurmd and its slurmstepds hold open."""
    return f"slurmd.{node}.log"


def list_members(directory: Path, slurm_conf: Path, node: str | None = None) -> list[KnownProcess]:
    """Lists every process of the cluster in `directory`, or of one of its nodes: daemons, steps, jobs.

    Leaves out this process and its ancestors.
    """
    spared = {os.getpid()} | {parent.pid for parent in psutil.Process().parents()}
    daemons = find_daemons(directory, slurm_conf)
    # a daemon that has not opened its log yet counts as well
    everywhere = [*daemons.slurmd.values(), daemons.slurmctld, daemons.munged]
    ours = everywhere if node is None else [daemons.slurmd.get(node)]
    members = {process.pid for process in ours if process is not None}
    for pid in psutil.pids():
        if pid in spared:
            continue
        environment = _environment(pid)
        on_node = environment.get("SLURMD_NODENAME")
        # Both variables: a user's shell that has sourced `devcluster env` has SLURM_CONF, and no SLURMD_NODENAME.
        is_job = (
            environment.get("SLURM_CONF") == str(slurm_conf)
            and "SLURM_JOB_ID" in environment
            and on_node is not None
            and (node is None or on_node == node)
        )
        if is_job or _logs_to(pid, directory / "log", node):
            members.add(pid)
            # A job may clean the environment of its children.
            members.update(_descendants(pid) - spared)
    found = (known(pid) for pid in sorted(members))
    return [process for process in found if process is not None]


def _descendants(pid: int) -> set[int]:
    try:
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    except psutil.Error:
        return set()


def end_all(processes: Iterable[KnownProcess], *, wait_s: float = 5.0) -> list[KnownProcess]:
    """Sends SIGKILL to each and waits until it is gone; returns those still there after `wait_s`, in a system call."""
    left = list(processes)
    for process in left:
        # By its birth, too: the pid may be another process's since the look.
        if process.is_running():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + wait_s
    while True:
        left = [process for process in left if process.is_running()]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(_POLL_S)
