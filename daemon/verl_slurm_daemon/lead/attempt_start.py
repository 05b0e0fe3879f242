"""Prepares a lead's start: the configuration, the directories, and storage that takes a file.

Storage that is full, read-only or silent, and a Slurm that is away, cost no run. The lead waits for storage as long as
`IN_PLACE_S` lasts, and for Slurm until it answers (`patiently`). After that the start has failed, and the policy has
the job requeued: `failed_starts` counts such starts, and `policy` says how long each waits.
"""

import asyncio
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from verl_slurm.base.bounded import JOURNAL, TooMuch
from verl_slurm.base.errors import (
    ConfigError,
    DataError,
    DatasetDrift,
    KeyRefused,
    NoRoom,
    PermissionRefused,
    SlurmMissing,
    VerlSlurmError,
    is_transient_storage_error,
)
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import private_dir, share_output
from verl_slurm.base.one_line import counted
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import run_id
from verl_slurm.checkpoint.store.lost import require_run_id
from verl_slurm.config.load import load_own
from verl_slurm.config.roles import data_root
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal import events as ev
from verl_slurm.journal.events import Warned
from verl_slurm.journal.files import read_history
from verl_slurm.journal.history import History
from verl_slurm.program.code_record import CodeRecord, package_drift, read_record
from verl_slurm.program.copying import check_copy
from verl_slurm.program.installed import Installed, look
from verl_slurm.program.programs import Moves
from verl_slurm.slurm.rank_setup import python_of
from verl_slurm.slurm.slurm_environment import SlurmJob
from verl_slurm_daemon.allocation.contract import Allocation
from verl_slurm_daemon.allocation.hostfile import Host, check_hosts, read_hostfile
from verl_slurm_daemon.allocation.local import HostfileAllocation, LocalAllocation
from verl_slurm_daemon.allocation.slurm_job import SlurmAllocation
from verl_slurm_daemon.decide.inputs import CauseKnown, StartHindered
from verl_slurm_daemon.decide.lead_model import IN_PLACE_S, SLURM_AWAY_S
from verl_slurm_daemon.journal import Journal

T = TypeVar("T")

ENVIRONMENT = (OSError, SlurmMissing, PermissionRefused, NoRoom)
"""Errors that say nothing about the run: storage that fails or is full, a node without processes, a Slurm that is away,
or files that somebody has opened to others (`chmod -R g+w`), until they are closed again."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
"""Signals that a lead handles. Blocked until it listens, so that none is lost or fatal."""
_LOOK_S = 0.2
# For storage, once a signal has come: KillWait may run, and a requeue is still to be asked for.
_LAST_WAIT_S = 15.0
_LAST_LOOK_S = 3.0
_SILENT = "storage did not answer, and a signal came"
_ASK_AGAIN_S = 5.0
"""Between questions for the causes of signals that ended no start so far."""
_GOES_ON = ("operator", "none", "suspended")
"""Causes that take no nodes from the job."""
_FIRST_WORD_S = 60.0
_MOST_ATTEMPTS = 100_000
_NOT_KNOWN = 3
"""Assumed number of failed starts before this one, if the journal that counts them cannot be read."""
_CODES = {
    # Every other error (EIO, ESTALE, ETIMEDOUT) says of storage no more than that it fails: NO_PROGRESS.
    errno.ENOSPC: ExitCode.NO_ROOM,
    errno.EDQUOT: ExitCode.NO_ROOM,
    errno.EACCES: ExitCode.PERMISSION,
    errno.EPERM: ExitCode.PERMISSION,
}


class Ground(NamedTuple):
    """The run, configuration and allocation of a lead. `failed`: the error that prevented the rest (`ENVIRONMENT`)."""

    paths: RunPaths
    config: RunConfig
    allocation: Allocation
    failed: OSError | VerlSlurmError | None = None


class SignalsHeard:
    """The signals that have come while the lead only waits, as at its start, and whether they end the wait.

    `cause`: of the allocation. An operator's signal ends none: a save is asked for, or the job was suspended.
    """

    def __init__(self, cause: Callable[[str], Awaitable[CauseKnown]]) -> None:
        self.heard: list[str] = []
        self._cause, self._judged, self._due, self._is_final = cause, 0, 0.0, False

    async def are_final(self) -> bool:
        """Returns whether the job ends, by what the scheduler says."""
        is_new = self._judged < len(self.heard)
        if self._is_final or not (is_new or (self.heard and time.monotonic() >= self._due)):
            return self._is_final
        name = self.heard[self._judged if is_new else -1]
        self._judged += is_new
        try:
            async with asyncio.timeout(_LAST_WAIT_S):
                kind = (await self._cause(f"{name} to lead")).kind
        except (OSError, VerlSlurmError):  # outside of Slurm a cause is read from storage
            kind = "unknown"
        # These two alone are often an operator's; they are asked about again.
        is_doubtful = kind == "unknown" and name in ("SIGUSR1", "SIGCONT")
        self._is_final = not is_doubtful and kind not in _GOES_ON
        self._due = time.monotonic() + _ASK_AGAIN_S
        return self._is_final


async def prepare(root: Path, hostfile: Path | None) -> Ground:
    """Reads the configuration and makes the run's directories, until storage answers, patience ends, or a
    signal comes that ends the job.

    Raises VerlSlurmError: the configuration or the hostfile is wrong.
    """
    # With a hostfile Slurm has no part in the run, even inside of a job.
    job = None if hostfile is not None else SlurmJob.from_environ(dict(os.environ))
    restarted = job is not None and job.restart_count > 0

    def attempt() -> tuple[RunPaths, RunConfig, str]:
        paths, host = RunPaths(root.resolve()), ""
        if restarted:
            paths.run_yaml.stat()  # missing on a node without the file system: not a wrong configuration
        config = load_own(paths.run_yaml)
        # A guest's tracker would make its directory with the user's umask, and RUN may be open to a group.
        guests = [paths.tensorboard] if config.trainer.is_guest else []
        for directory in (paths.control, paths.logs, paths.ledger, paths.checkpoints, *guests):
            private_dir(directory, inside=paths.run)
        require_run_id(paths)
        run_id(paths)  # made here, so that no two ranks make it at once
        share_output(paths.logs)
        if hostfile is not None:
            hosts = read_hostfile(hostfile)
            check_hosts(hosts, config)
            # Before any rank starts: ranks would be the first to look it up, and fail as in a crash, again and again.
            _require_resolvable(hosts, hostfile)
            host = hosts[0].name
        return paths, config, host

    async def look() -> tuple[RunPaths, RunConfig, str] | PermissionRefused:
        try:
            return await spoken(asyncio.to_thread(attempt), "the look at the run directory")
        except PermissionRefused as error:
            if restarted or await asyncio.to_thread((root / "attempt").exists):
                raise  # somebody has changed it since, and may change it back
            return error

    paths, config, host = RunPaths(Path(os.path.abspath(root))), RunConfig(), ""
    failed: OSError | VerlSlurmError | None = None
    early = LocalAllocation(config, paths) if job is None else SlurmAllocation(job, config, paths)
    calls = SignalsHeard(early.cause)

    async def interrupted() -> bool:
        # Signals are blocked until the lead listens, and stay pending for it.
        pending = (number.name for number in SIGNALS if number in signal.sigpending())
        calls.heard.extend(name for name in pending if name not in calls.heard)
        return await calls.are_final()

    try:
        found = await patiently(look, interrupted, say_again)
    except ENVIRONMENT as error:
        found, failed = (paths, config, host), error
    if isinstance(found, PermissionRefused):
        raise found
    paths, config, host = found
    if hostfile is not None:
        return Ground(paths, config, HostfileAllocation(config, paths, host), failed)
    if job is None:
        return Ground(paths, config, LocalAllocation(config, paths), failed)
    return Ground(paths, config, SlurmAllocation(job, config, paths), failed)


async def answered(work: Callable[[], T]) -> T:
    """Returns the result of `work` on storage, on the way out. Raises TimeoutError: none after some seconds."""
    try:
        async with asyncio.timeout(_LAST_LOOK_S):
            return await asyncio.to_thread(work)
    except TimeoutError:
        raise TimeoutError(errno.ETIMEDOUT, f"storage did not answer in {_LAST_LOOK_S:.0f} s") from None


def _require_resolvable(hosts: Sequence[Host], hostfile: Path) -> None:
    """Raises ConfigError: a host name does not resolve here, so the agents would never find each other."""
    for host in hosts:
        try:
            socket.getaddrinfo(host.name, None)
        except socket.gaierror as error:
            raise ConfigError(
                "a host of the hostfile is not known here",
                where=hostfile,
                found=f"{host.name}: {error.strerror}",
                expected="a name or an address that resolves",
                remedy=f"correct the name, or add it to /etc/hosts: getent hosts {host.name}",
            ) from None


async def patiently(
    work: Callable[[], Coroutine[Any, Any, T]],
    interrupted: Callable[[], Awaitable[bool]],
    say: Callable[[Exception, float], None],
) -> T:
    """Returns the result of `work`, tried again while storage fails (half a minute) or Slurm does not answer.

    `say` is told of each wait. Once `interrupted`, there are no more tries. Raises what the last one did
    (`ENVIRONMENT`).
    """
    tries = 0
    while True:
        try:
            return await _or_interrupted(work(), interrupted)
        except ENVIRONMENT as error:
            # While Slurm is away it takes no requeue either, and no other job gets the nodes.
            if await interrupted() or (tries >= len(IN_PLACE_S) and not isinstance(error, SlurmMissing)):
                raise
            pause = IN_PLACE_S[tries] if tries < len(IN_PLACE_S) else SLURM_AWAY_S
            say(error, pause)
        tries += 1
        until = time.monotonic() + pause
        while not await interrupted() and time.monotonic() < until:  # noqa: ASYNC110 - signals wait in a queue
            await asyncio.sleep(_LOOK_S)


async def _or_interrupted(work: Coroutine[Any, Any, T], interrupted: Callable[[], Awaitable[bool]]) -> T:
    """Raises OSError: storage had not answered when Slurm wanted the nodes, or the user the end."""
    task, since = asyncio.ensure_future(work), None
    while not task.done():
        await asyncio.wait([task], timeout=_LOOK_S)
        asked = time.monotonic()  # KillWait may run while Slurm is asked
        since = (since or asked) if await interrupted() else None
        if since is not None and time.monotonic() - since > _LAST_WAIT_S and not task.done():
            task.cancel()
            raise TimeoutError(errno.ETIMEDOUT, _SILENT)
    return task.result()


async def spoken(work: Awaitable[T], what: str, journal: Journal | None = None) -> T:
    """Returns the result of `work`; says now and then that it still waits: in the journal, or in the log alone."""

    async def say() -> None:
        pause = _FIRST_WORD_S
        while True:
            await asyncio.sleep(pause)
            text = f"{what} is not done after {pause:.0f} s: storage is slow, or does not answer; the start waits"
            if journal is None:
                _say(text)
            else:
                # In a thread, and first: where the journal itself does not answer, a write would stop the lead's loop.
                await asyncio.to_thread(os.stat, journal.paths.events)
                journal.write(Warned("start", text))
            pause *= 2

    words = asyncio.create_task(say())
    try:
        return await work
    finally:
        words.cancel()


def journal_faults(paths: RunPaths, events: Sequence[ev.Event], attempt: int) -> list[Warned]:
    """Returns what the journal lacks when `attempt` begins, and has not said yet. OSError: it cannot be read."""
    texts = [event.text for event in events if isinstance(event, ev.Foreign)]
    told = {event.attempt for event in events}
    lacking = [number for number in range(1, min(attempt, _MOST_ATTEMPTS)) if number not in told]
    # Of a longer file the oldest lines are not read.
    if lacking and (not events or paths.events.stat().st_size <= JOURNAL.num_bytes):
        named = ", ".join(map(str, lacking[:5]))
        texts.append(
            f"{paths.events} says nothing of {counted(len(lacking), 'attempt')} ({named}): what they saved, and what "
            "interrupted them, is not counted, unless the file is put back from a backup while no job of the run lives"
        )
    said = {event.text for event in events if isinstance(event, Warned) and not isinstance(event, ev.Foreign)}
    return [Warned("journal", text) for text in texts if text not in said]


def require_mounted(config: RunConfig, history: History) -> None:
    """Raises FileNotFoundError: a place that ranks of this run have used is missing or empty."""
    # At the first start a wrong path is more likely, and its reader refuses it.
    if not history.counts["restart"]:
        return
    places: dict[str, Path | str | None] = {"data.root": data_root(config), "Python": sys.executable}
    if (keys := config.checkpoint.encryption) is not None:
        places["checkpoint.encryption.key_file"] = keys.key_file
        places |= {f"checkpoint.encryption.old_key_files: {path}": path for path in keys.old_key_files}
    if not config.trainer.is_guest:
        places |= {"data.eval_root": config.data.eval_root, "model.path": config.model.path}
    if (container := config.slurm.container) is not None and container.digest is not None:
        places |= {"slurm.container.image": container.image}
    # A mount point without its file system is an empty directory, or none: that is storage, and no changed
    # data.
    for key, place in places.items():
        if place is not None and os.path.isabs(place) and _is_away(place):
            what = f"{key} was there when the run started, and is now missing or empty; is its file system mounted?"
            raise FileNotFoundError(errno.ENOENT, what, str(place))


def _is_away(place: Path | str) -> bool:
    try:
        with os.scandir(place) as entries:
            return next(entries, None) is None
    except NotADirectoryError:
        return False
    except FileNotFoundError:
        return True


def storage_fault(error: VerlSlurmError, config: RunConfig, history: History) -> OSError | None:
    """Returns the fault of storage that made a place of the configuration unreadable; None: the place is wrong.

    `error`: of the look at data, image, code or key before ranks are started.
    """
    cause = error.__cause__
    # Those of `ENVIRONMENT` are waited for with their own words.
    if not isinstance(error, ConfigError | DataError | DatasetDrift | KeyRefused) or not isinstance(
        cause, OSError
    ):
        return None
    if history.counts["restart"] or is_transient_storage_error(cause):
        return cause
    # At the first start a wrong path is more likely (`require_mounted`), or a key that the job may not read. The files
    # below data.root were there as the run was submitted.
    container = config.slurm.container
    named = {str(data_root(config)), container.image if container is not None else ""}
    absent = isinstance(cause, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    wrong = isinstance(error, KeyRefused) or (absent and str(cause.filename) in named)
    return None if wrong else cause


def say_again(error: Exception, pause_s: float) -> None:
    """Writes to the lead's log: the journal may be on the storage that fails."""
    _say(f"{error}: tries again in {pause_s:.0f} s")


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stdout.write(f"verl-slurmd: {text}\n")
        sys.stdout.flush()


async def start_failed(
    paths: RunPaths, allocation: Allocation, error: OSError | VerlSlurmError
) -> StartHindered:
    """Returns the input that tells the policy that `error` stopped the start."""
    try:
        # Counted from the journal, since the process that failed before is gone; it may be on the storage that fails.
        history = await answered(lambda: read_history(paths))
        before = history.failed_starts(allocation.job_id, allocation.restart)
    except (OSError, TooMuch):
        before = _NOT_KNOWN
    return StartHindered(str(error), before, failed_code(error))


def failed_code(error: OSError | VerlSlurmError) -> ExitCode:
    """Returns the code to end with at last, where no job can be held."""
    if isinstance(error, VerlSlurmError):
        return error.exit_code
    return _CODES.get(error.errno or 0, ExitCode.NO_PROGRESS)


def check_code(paths: RunPaths, config: RunConfig) -> list[ev.Event]:
    """Checks the copy of the user's code and the ranks' packages; returns what the journal is told.

    Raises DataError: the copy is not what was submitted. ConfigError: packages have changed, and
    `code.on_drift` is `refuse`. OSError: storage does not answer.
    """
    record = read_record(paths)
    # A run that was not submitted (`sbatch` by hand) has none.
    if record is None:
        return []
    told: list[ev.Event] = []
    for tree in record.trees:
        if further := check_copy(paths, tree.digest):
            some = ", ".join(further[:3])
            text = f"{counted(len(further), 'file')} beside the submitted ones that Python may import: {some}"
            told.append(ev.Warned("code", f"{paths.code_tree(tree.digest)} has {text}"))
    if gone := Moves(paths, record).lost_directory(config):
        told.append(ev.Warned("code", gone))
    if not record.python:
        return told  # the submission could not ask either: the ranks' Python is in an image
    python = python_of(config.slurm) or sys.executable
    # PYTHONPATH included: packages may lie there.
    found = look(python)
    if not found.python:
        told.append(ev.Warned("code", f"{python} does not tell which packages it has"))
    elif drift := package_drift(record, _record_of(found)):
        if config.code.on_drift == "refuse":
            raise ConfigError(
                "the packages are not those that the run was submitted with",
                where=python,
                found="; ".join(drift),
                remedy="install the former ones, or accept these with verl-slurm submit RUN --code new",
            )
        told.append(ev.Warned("packages", f"not those of the submission: {'; '.join(drift)}"))
    return told


def _record_of(found: Installed) -> CodeRecord:
    return CodeRecord(python=found.python, packages=found.packages)
