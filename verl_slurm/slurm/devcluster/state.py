"""The cluster's state file: records what was started. Written before the first daemon, read by every command.

`DIR/state.json`, 0600, replaced atomically. A file of another boot is read as "not running".
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from verl_slurm.base.errors import UNREADABLE, VerlSlurmError
from verl_slurm.base.files import write_file
from verl_slurm.base.processes import boot_id
from verl_slurm.slurm.devcluster.conf import ClusterOptions


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """One started cluster. Fields of other versions are ignored."""

    boot_id: str
    name: str
    slurm_version: str
    options: ClusterOptions
    gpus: dict[str, tuple[str, ...]] = {}
    """Maps a node's name to the files of its GPUs."""


def _path(directory: Path) -> Path:
    return directory / "state.json"


def read_state(directory: Path) -> ClusterState | None:
    """Returns the state, or None if nothing was started since the boot."""
    try:
        data = _path(directory).read_bytes()
    except FileNotFoundError:
        return None
    try:
        state = msgspec.json.decode(data, type=ClusterState)
    except UNREADABLE as error:
        raise VerlSlurmError(
            "the cluster's state file is damaged",
            where=_path(directory),
            found=error,
            remedy="end its slurmctld, slurmd and munged by hand, then remove the directory",
        ) from error
    # After a reboot none of its processes is left, whatever the file says.
    return state if state.boot_id == boot_id() else None


def write_state(directory: Path, state: ClusterState | None) -> None:
    if state is None:
        _path(directory).unlink(missing_ok=True)
    else:
        write_file(_path(directory), msgspec.json.format(msgspec.json.encode(state)))


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Allows one start, stop, fail or restore at a time; the lock ends with the process that holds it."""
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
