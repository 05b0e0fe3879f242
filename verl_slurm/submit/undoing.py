"""What a submission makes on the disk, each with its way back: callbacks of an `ExitStack`, run if it fails."""

import shutil
from contextlib import ExitStack, suppress
from pathlib import Path

from verl_slurm.base.bounded import FINGERPRINT, read_regular
from verl_slurm.base.files import private_dir, write_file

__all__ = ["keep_content", "make_root", "names_in", "remove_new", "replace_content"]


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


def replace_content(undo: ExitStack, path: Path, data: bytes) -> None:
    keep_content(undo, path)
    write_file(path, data)
