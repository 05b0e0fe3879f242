"""Walks and opens below a directory without ever following a link (openat, O_NOFOLLOW)."""

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from verl_slurm.base.bounded import TooMuch
from verl_slurm.base.files import no_directory
from verl_slurm.checkpoint.format.specification import MAX_DEPTH

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO in place of a file must not wait for a writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One name below a directory.

    Attributes:
        path: relative, `/` between names.
    """

    path: str
    info: os.stat_result

    @property
    def kind(self) -> str:
        mode = self.info.st_mode
        if stat.S_ISREG(mode):
            return "file"
        if stat.S_ISDIR(mode):
            return "directory"
        return "link" if stat.S_ISLNK(mode) else "special file"


@contextmanager
def open_directory(path: Path | str, *, below: int | None = None) -> Iterator[int]:
    """Returns a descriptor of a directory that is no link.

    Raises:
        OSError: it does not exist, is a link (ELOOP, ENOTDIR), or is not readable for us.
    """
    # O_NOFOLLOW: a link in the place of a checkpoint could lead anywhere, and be turned after a check.
    fd = os.open(path, _DIRECTORY, dir_fd=below)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def open_own(run: Path, folder: Path) -> Iterator[int]:
    """Returns a descriptor of a run's directory, below which entries are to be listed, moved or removed.

    The way to `run` may have links, which its user typed. Below it no link is followed: in a run from elsewhere it can
    lead anywhere.

    Raises:
        PermissionRefused: a name between is a link.
        OSError: a name is missing, or not readable for us.
    """
    with ExitStack() as opened:
        # Links up to the run are the user's own; the flags differ from `_DIRECTORY` in that alone.
        fd = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, fd)
        way = run
        for name in folder.relative_to(run).parts:
            way /= name
            try:
                # Each name below the descriptor of the one before: what was opened cannot be exchanged any more.
                fd = opened.enter_context(open_directory(name, below=fd))
            except OSError as error:
                raise no_directory(error, way) from error
        yield fd


def names_in(run: Path, folder: Path) -> list[str]:
    """Lists the names in a directory of a run; none if it is missing. Raises as `open_own`."""
    try:
        with open_own(run, folder) as fd:
            return os.listdir(fd)
    except FileNotFoundError:
        return []


@contextmanager
def open_below(root: int, path: str) -> Iterator[int]:
    """Returns a read descriptor of `path` below the directory `root`; no name on the way may be a link.

    Raises:
        OSError: a name is missing, a link, or not readable for us.
    """
    *folders, name = path.split("/")
    opened: list[int] = []
    try:
        current = root
        for folder in folders:
            # Name by name: O_NOFOLLOW guards the last name of a path and no other.
            current = os.open(folder, _DIRECTORY, dir_fd=current)
            opened.append(current)
        # Callers ask fstat for the kind: a FIFO opens here, too.
        opened.append(os.open(name, _FILE, dir_fd=current))
        yield opened[-1]
    finally:
        for fd in opened:
            os.close(fd)


def list_tree(root: int, most: int = sys.maxsize) -> list[Entry]:
    """Lists everything below the directory `root`, links and special files as themselves; sorted by path.

    Directories deeper than any checkpoint has are named and not entered. Entries removed during the walk are left out:
    a tree that others work in must not look as if it did not exist.

    Args:
        most: entries that are held in memory, each about 1 KB.

    Raises:
        OSError: a directory cannot be read.
        TooMuch: there are more than `most`; no more of them were read.
    """
    entries: list[Entry] = []
    _descend(root, "", entries, most)
    # A directory sorts before what is in it, so the reverse order can remove trees.
    return sorted(entries, key=lambda entry: entry.path)


def _descend(fd: int, prefix: str, entries: list[Entry], most: int) -> None:
    """Appends the entries in `fd` and below it. Raises as `list_tree`."""
    begin = len(entries)
    with os.scandir(fd) as names:
        for name in names:
            # Before the entry is made: a directory may hold millions of names.
            if len(entries) == most:
                raise TooMuch(f"more than {most} files and directories")
            # Renamed or removed since it was listed: left out, since ENOENT would mean that the tree is gone.
            with suppress(FileNotFoundError):
                entries.append(Entry(path=prefix + name.name, info=name.stat(follow_symlinks=False)))
    for entry in entries[begin:]:
        # The limit bounds the recursion and the open descriptors, one for each level.
        if entry.kind == "directory" and entry.path.count("/") < MAX_DEPTH:
            with (
                suppress(FileNotFoundError),
                open_directory(entry.path.rsplit("/", 1)[-1], below=fd) as below,
            ):
                _descend(below, entry.path + "/", entries, most)
