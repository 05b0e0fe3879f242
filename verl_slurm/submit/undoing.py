"""What a submission makes on the disk, each with its way back: callbacks of an `ExitStack`, run if it fails."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from verl_slurm.base.bounded import FINGERPRINT, read_regular
from verl_slurm.base.errors import Fenced
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.paths import RunPaths


def make_root(undo: ExitStack, root: Path) -> None:
    """Makes the run directory. On failure, removes the directories that it made, if empty."""
    missing = [root, *root.parents]
    # Noted before mkdir: afterwards nothing tells which names are new.
    missing = missing[: next(i for i, place in enumerate(missing) if place.exists())]
    for place in reversed(missing):
        undo.callback(_rmdir, place)
    private_dir(root)


def _rmdir(place: Path) -> None:
    # rmdir refuses a directory that is not empty: what somebody else has put there since stays.
    with suppress(OSError):
        place.rmdir()


def names_in(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()} if directory.is_dir() else set()


def remove_new(directory: Path, before: set[str]) -> None:
    for name in names_in(directory) - before:
        entry = directory / name
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def keep_content(undo: ExitStack, path: Path) -> None:
    """Restores the present content of `path`, if any, on failure."""
    if path.is_file():
        undo.callback(write_file, path, read_regular(path, FINGERPRINT))  # the largest of the kept files


def make_mark(undo: ExitStack, path: Path) -> None:
    """Makes an empty file. On failure, one of an earlier submission stays."""
    if not path.exists():
        undo.callback(path.unlink, missing_ok=True)
    write_file(path, b"")


def replace_content(undo: ExitStack, path: Path, data: bytes) -> None:
    keep_content(undo, path)
    write_file(path, data)


@contextmanager
def only_submitter(paths: RunPaths) -> Iterator[None]:
    """Holds the lock of a submission; Fenced: another one has it."""
    # The directory itself is locked: no lock file remains, and the kernel lets go when the process dies.
    fd = os.open(paths.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            # Two `submit`s of one run at once would queue two jobs.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Fenced(
                "another submit is at work on this run", where=paths.root, remedy="wait until it has ended"
            ) from None
        except OSError:
            pass  # a file system without locks: the lead's fencing still lets one of them work
        yield
    finally:
        os.close(fd)
