"""Walks and opens below a directory by descriptors (openat): data, code, models and checkpoints.

No link is followed (O_NOFOLLOW), unless a walk is told to.
"""

import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from verl_slurm.base.bounded import TooMuch, named
from verl_slurm.base.files import no_directory

DEEPEST = 100
"""Directories in each other that `list_tree` enters: it bounds the recursion, and the open descriptors."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLLOWED = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO in place of a file must not wait for a writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_A_FILE = os.stat_result((stat.S_IFREG, *[0] * 9))
_A_DIRECTORY = os.stat_result((stat.S_IFDIR, *[0] * 9))


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One name below a directory."""

    path: str
    """Relative, `/` between names."""
    info: os.stat_result
    """Of a link that was followed: that of its target."""
    followed: bool = False
    """It is a link, and a walk that follows links has found its target."""

    @property
    def kind(self) -> str:
        mode = self.info.st_mode
        if stat.S_ISREG(mode):
            return "file"
        if stat.S_ISDIR(mode):
            return "directory"
        return "link" if stat.S_ISLNK(mode) else "special file"

    @property
    def is_too_deep(self) -> bool:
        """Returns whether it is a directory that a walk does not enter."""
        return self.path.count("/") >= DEEPEST and self.kind == "directory"


def is_missing(path: Path) -> bool:
    """Returns whether there is no such entry. `os.path.lexists` takes each error of the storage for that."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


@contextmanager
def open_directory(path: Path | str, *, below: int | None = None, follow: bool = False) -> Iterator[int]:
    """Yields a descriptor of a directory that is no link, unless links are followed.

    Args:
        below: the descriptor of a directory that the path is relative to.
        follow: it may be a link, for paths that users type.

    Raises:
        OSError: it does not exist, is a link (ELOOP, ENOTDIR), or is not readable for us.
    """
    # O_NOFOLLOW: a link in the place of a checkpoint could lead anywhere, and be turned after a check.
    fd = os.open(path, _FOLLOWED if follow else _DIRECTORY, dir_fd=below)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def open_own(run: Path, folder: Path) -> Iterator[int]:
    """Yields a descriptor of a run's directory, below which entries are to be listed, moved or removed.

    Raises:
        PermissionRefused: a name between is a link.
        OSError: a name is missing, or not readable for us.
    """
    with ExitStack() as opened:
        # Links up to the run are the user's own.
        fd = opened.enter_context(open_directory(run, follow=True))
        way = run
        for name in folder.relative_to(run).parts:
            way /= name
            try:
                # Each name below the descriptor of the one before: what was opened cannot be exchanged any more.
                # No link is followed: in a run from elsewhere it can lead anywhere.
                fd = opened.enter_context(open_directory(name, below=fd))
            except OSError as error:
                raise no_directory(error, way) from error
        yield fd


def names_in(run: Path, folder: Path) -> list[str]:
    """Lists the names in a directory of a run; none if it is missing. Raises as `open_own`."""
    try:
        with named(folder), open_own(run, folder) as fd:
            return os.listdir(fd)
    except FileNotFoundError:
        return []


@contextmanager
def open_below(root: int, path: str) -> Iterator[int]:
    """Yields a read descriptor of `path` below the directory `root`. OSError: a name of it is missing or a link."""
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


def list_tree(
    root: int,
    most: int = sys.maxsize,
    *,
    follow: bool = False,
    numbers: bool = True,
    keep: Callable[[Entry], bool] | None = None,
) -> list[Entry]:
    """Lists everything below the directory `root`, links and special files as themselves; sorted by path.

    Directories in more than `DEEPEST` others are named and not entered. Entries removed during the walk are left out.

    Args:
        most: entries that are held in memory, each about 1 KB.
        follow: links are followed; those that lead nowhere are links still.
        numbers: False: plain files and directories are told by their names alone, in a quarter of the time, and their
            `info` has nothing but the kind.
        keep: tells of each entry whether it is listed and entered; None: all are.

    Raises:
        OSError: a directory cannot be read, or is entered from within itself (ELOOP); `filename` is relative.
        TooMuch: there are more than `most`; no more of them were read.
    """
    walk = _Walk(most, follow, numbers, keep)
    info = os.fstat(root)
    walk.descend(root, "", ((info.st_dev, info.st_ino),))
    # A directory sorts before what is in it, so the reverse order can remove trees.
    return sorted(walk.entries, key=_path)


class _Walk:
    def __init__(self, most: int, follow: bool, numbers: bool, keep: Callable[[Entry], bool] | None) -> None:
        self._most, self._follow, self._numbers, self._keep = most, follow, numbers, keep
        self.entries: list[Entry] = []

    def descend(self, fd: int, prefix: str, above: tuple[tuple[int, int], ...]) -> None:
        """Takes the entries of `fd` and below; `above`: device and inode of it and of all that contain it."""
        begin = len(self.entries)
        try:
            self._take(fd, prefix)
        except OSError as error:
            # Of the listing itself it is a number.
            error.filename = error.filename if isinstance(error.filename, str) else prefix
            raise
        # After all names of this directory: so one directory of each level is open, and no listing.
        for entry in self.entries[begin:]:
            if not stat.S_ISDIR(entry.info.st_mode) or entry.is_too_deep:
                continue
            try:
                flags = _FOLLOWED if entry.followed else _DIRECTORY
                below = os.open(entry.path[len(prefix) :], flags, dir_fd=fd)
            except FileNotFoundError:
                continue
            except OSError as error:
                error.filename = entry.path
                raise
            try:
                info = os.fstat(below)
                # By device and inode, not by path: a loop of links has a new path in each round.
                if self._follow and (info.st_dev, info.st_ino) in above:
                    raise OSError(errno.ELOOP, "a link to a directory above it", entry.path)
                self.descend(below, entry.path + "/", (*above, (info.st_dev, info.st_ino)))
            finally:
                os.close(below)

    def _take(self, fd: int, prefix: str) -> None:
        with os.scandir(fd) as names:
            for name in names:
                # Before the entry is made: a directory may hold millions of names.
                if len(self.entries) == self._most:
                    raise TooMuch(f"more than {self._most} files and directories")
                try:
                    entry = _entry(name, prefix, self._follow, self._numbers)
                except FileNotFoundError:
                    continue  # removed since: left out, since ENOENT would mean that the tree is gone
                except OSError as error:
                    error.filename = prefix + name.name
                    raise
                if self._keep is None or self._keep(entry):
                    self.entries.append(entry)


def files_below(root: Path, *, follow: bool = False) -> dict[str, os.stat_result]:
    """Returns the regular files below a directory by relative path, sorted. Raises as `list_tree`."""
    with open_directory(root, follow=follow) as fd:
        return {entry.path: entry.info for entry in list_tree(fd, follow=follow) if entry.kind == "file"}


def _entry(name: "os.DirEntry[str]", prefix: str, follow: bool, numbers: bool) -> Entry:
    link = follow and name.is_symlink()
    # By the type that comes with the name: no call to the kernel.
    if not numbers and not link:
        if name.is_file(follow_symlinks=False):
            return Entry(prefix + name.name, _A_FILE)
        if name.is_dir(follow_symlinks=False):
            return Entry(prefix + name.name, _A_DIRECTORY)
    if link:
        try:
            return Entry(prefix + name.name, name.stat(), True)
        except OSError:
            pass  # it leads nowhere, or round in a circle
    return Entry(prefix + name.name, name.stat(follow_symlinks=False))


def _path(entry: Entry) -> str:
    return entry.path
