"""Walks a data set with stat: one line of text for each entry of the tree.

```
f DEVICE INODE SIZE MTIME CTIME PATH    a file; the times as SECONDS.NNNNNNNNN0, as find(1) prints them
l DEVICE INODE SIZE MTIME CTIME PATH    a link to a file; the numbers are those of the file
d PATH                                  a directory, the root left out
```

The hash cache knows a file by its line: the same line, the same content. Lines are text, not tuples, because a whole
tree is then compared at the speed of comparing strings: `find` walks a tree of 20,000 files in 28 ms (CPU), Python in
53 ms, and each microsecond per file adds 20 ms.
"""

import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from verl_slurm.base.digest import num_threads
from verl_slurm.base.errors import DataError
from verl_slurm.dataset.fingerprint.entries import Kind

T = TypeVar("T")

_KINDS: dict[str, Kind] = {"f": "file", "l": "link", "d": "directory"}
# An absolute path: the first find in a user's PATH need not be GNU's.
_FIND = "/usr/bin/find"
# Each gets a share of the root's entries. More of them than this wait for the same disk.
_MOST_FINDS = 4
# As many names as surely fit into its arguments: 256 bytes each.
_MOST_NAMES = 1000
# First letters of a name that find would take for an option or an operator.
_NO_NAME = tuple("-!(),")


class Line(NamedTuple):
    """A parsed line. `size` in bytes, times in ns since 1970; all 0 for a directory."""

    kind: Kind
    path: str
    device: int = 0
    inode: int = 0
    size: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0


def line_of(kind: str, info: os.stat_result, path: str) -> str:
    """Returns the line of a file or a link; pure."""
    m_s, m_ns = divmod(info.st_mtime_ns, 1_000_000_000)
    c_s, c_ns = divmod(info.st_ctime_ns, 1_000_000_000)
    numbers = f"{info.st_dev} {info.st_ino} {info.st_size}"
    # The last 0 is find's: it prints ten digits, and lines of both origins are compared as text.
    return f"{kind} {numbers} {m_s}.{m_ns:09d}0 {c_s}.{c_ns:09d}0 {path}"


def parse_line(line: str) -> Line:
    """Parses a line. Pure.

    Raises:
        ValueError: it is no line.
    """
    if line.startswith("d "):
        return Line("directory", line[2:])
    # The path comes last, as it may have blanks.
    letter, device, inode, size, mtime, ctime, path = line.split(" ", 6)
    if letter not in ("f", "l") or not path:
        raise ValueError("neither a file nor a link")
    return Line(_KINDS[letter], path, int(device), int(inode), int(size), _time_ns(mtime), _time_ns(ctime))


def walk(root: Path) -> list[str]:
    """Returns the lines of the whole tree, in no order.

    Raises:
        DataError: it is missing, no directory, unreadable, holds a broken link, a loop of links, a device, socket or
            pipe, or a name that is not UTF-8.
    """
    lines: list[str] = []
    try:
        _descend(str(root), "", lines, frozenset())
    except OSError as error:
        raise data_error(
            "the data set cannot be read", error.filename or root, error.strerror, "a directory of files"
        ) from error
    except RecursionError:
        raise data_error("the data set is nested too deeply", root, None, "a few folders") from None
    return lines


def glance(root: Path, meanwhile: Callable[[], T]) -> tuple[bytes | None, T]:
    """Lists the whole tree by find(1), which is faster than Python, while `meanwhile` runs here.

    Returns:
        Its lines, each with a NUL after it (of links those of the links themselves: see `lines_of`), or None if find is
            missing or failed. And the result of `meanwhile`.
    """
    # find does not follow a link that it is given to start from.
    real = os.path.realpath(root)
    with ExitStack() as stack:
        try:
            # All of them before `meanwhile`: they walk while this process works.
            finds = [stack.enter_context(_find(real, starts)) for starts in _starts(real)]
        except OSError:
            return None, meanwhile()
        result = meanwhile()
        said = [find() for find in finds]
    # One that failed may have left out a part, so the others' lines count for nothing.
    return None if None in said else b"".join(part for part in said if part), result


def lines_of_files(files: tuple[str, ...]) -> list[str]:
    """Returns the lines of files, and of those below directories, by absolute path, relative to `/`. Links to files are
    followed: training reads the target.

    Raises:
        OSError: one is not there, or storage does not answer.
    """
    named = [file for file in files if not os.path.isdir(file)]
    for folder in set(files) - set(named):
        named += [os.path.join(place, name) for place, _, names in os.walk(folder) for name in sorted(names)]
    return [line_of("l" if os.path.islink(file) else "f", os.stat(file), file.lstrip("/")) for file in named]


def place_of(root: Path | str | tuple[str, ...]) -> str:
    """Returns the words for where a data set is."""
    return ", ".join(root) if isinstance(root, tuple) else str(root)


def lines_of(root: Path, seen: bytes | None) -> list[str] | None:
    """Returns the lines of the whole tree, from the result of `glance`; None if `walk` must decide.

    `walk` decides if find met anything but plain files, directories and links to files.
    """
    try:
        lines = (seen or b"").decode("utf-8").split("\0")
    except UnicodeDecodeError:
        return None
    # Behind the last NUL is nothing.
    lines.pop()
    for index, line in enumerate(lines):
        if line[:2] in ("f ", "d "):
            continue
        try:
            path = parse_line(line).path
            # find printed the link's own numbers; training reads its target, which may change while the link does not.
            info = os.stat(root / path)
        except (ValueError, OSError):
            return None
        if not stat.S_ISREG(info.st_mode):
            return None
        lines[index] = line_of("l", info, path)
    return None if seen is None else lines


def data_error(what: str, where: object, found: object, expected: str) -> DataError:
    """Builds the error of a data set, with its one remedy."""
    return DataError(
        what, where=where, found=found, expected=expected, remedy="set data.root to a directory of data files"
    )


def _starts(root: str) -> list[list[str]]:
    """Returns the names in `root` that each find starts from, one group per core if there are enough folders; or no
    names.

    Raises:
        OSError: it cannot be read.
    """
    names: list[str] = []
    num_folders = 0
    with os.scandir(root) as entries:
        for entry in entries:
            # One find for all: names on its command line are limited in number, and some would be options.
            if len(names) == _MOST_NAMES or entry.name.startswith(_NO_NAME):
                return [[]]
            names.append(entry.name)
            num_folders += entry.is_dir(follow_symlinks=False)
    count = min(num_threads(), num_folders, _MOST_FINDS)
    return [names[at::count] for at in range(count)] if count > 1 else [[]]


@contextmanager
def _find(root: str, starts: list[str]) -> Iterator[Callable[[], bytes | None]]:
    """Starts a find; the returned function waits for its output, None: it failed. Killed if it runs on.

    Args:
        root: absolute.
        starts: names in it to start from; none: all.
    """
    numbers = "%D %i %s %T@ %C@ "
    path = r"%p\0" if starts else r"%P\0"
    argv = [
        # `%P` leaves the starting point out, which is `.`; names below the root are a part of the path.
        *(_FIND, *(starts or (".", "-mindepth", "1"))),
        *("-type", "d", "-printf", f"d {path}"),
        # Files apart from the rest, because `%y` takes a tenth of the time.
        *("-o", "-type", "f", "-printf", f"f {numbers}{path}"),
        *("-o", "-printf", f"%y {numbers}{path}"),
    ]
    # Not a pipe: find would wait for us as soon as 64 KiB are in it.
    output = os.memfd_create("verl-slurm-walk", os.MFD_CLOEXEC)
    try:
        null = subprocess.DEVNULL
        process = subprocess.Popen(
            argv, cwd=root, stdin=null, stdout=output, stderr=null, env={"LC_ALL": "C"}
        )
        try:
            # find ends with 1 if it could not read one directory: `walk` then names it.
            yield lambda: None if process.wait() else _content(output)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    finally:
        os.close(output)


def _content(fd: int) -> bytes:
    with open(fd, "rb", buffering=0, closefd=False) as file:
        file.seek(0)
        return file.read()


def _descend(folder: str, prefix: str, lines: list[str], above: frozenset[tuple[int, int]]) -> None:
    info = os.stat(folder)
    here = (info.st_dev, info.st_ino)
    # By device and inode, not by path: a loop of links has a new path in each round.
    if here in above:
        raise data_error(
            "the data set has a loop of links", folder, "a link to a directory above it", "a tree"
        )
    below = above | {here}
    with os.scandir(folder) as entries:
        for entry in entries:
            path = prefix + entry.name
            try:
                path.encode()
            except UnicodeEncodeError:
                raise data_error(
                    "a data file's name is no UTF-8", ascii(path), None, "a UTF-8 name"
                ) from None
            info = entry.stat()  # of a link's target; a broken one is an OSError
            if stat.S_ISREG(info.st_mode):
                lines.append(line_of("l" if entry.is_symlink() else "f", info, path))
            elif stat.S_ISDIR(info.st_mode):
                lines.append(f"d {path}")
                _descend(f"{folder}/{entry.name}", path + "/", lines, below)
            else:
                raise data_error(
                    "the data set holds a special file", path, f"mode {info.st_mode:o}", "files and folders"
                )


def _time_ns(text: str) -> int:
    seconds, _, fraction = text.partition(".")
    if len(fraction) != 10 or not fraction.isdecimal():
        raise ValueError("no time")
    return int(seconds) * 1_000_000_000 + int(fraction[:9])
