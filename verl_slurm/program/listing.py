"""Decides which files of a tree are the code: what git lists, or all below a directory, without what is none.

Left out everywhere: directories of runs, virtual environments, Python's caches, logs, files that hold secrets by their
name or by the configuration, and what the user excludes. Links are kept as links, and not followed. Pipes, sockets and
devices are no code.
"""

import errno
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.one_line import counted
from verl_slurm.base.tree import DEEPEST, Entry, list_tree, open_directory
from verl_slurm.program.git import WorkTree, files_in, work_tree

MOST_FILES = 20_000
_CACHES = frozenset(
    {
        "__pycache__",
        ".git",
        ".hg",
        ".svn",
        ".mypy_cache",
        ".ruff_cache",
        ".pytest_cache",
        ".ipynb_checkpoints",
    }
)
_SECRET = (
    *(".env", ".env.*", ".netrc", ".pypirc", ".git-credentials", "*.pem", "*.key", "*.p12", "*.kdbx"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "credentials.json", "token", "*.token"),
)
"""Names of files that hold keys and tokens."""
_LOGS = ("*.log", "nohup.out", "slurm-*.out", "slurm-*.err")
"""Names of files that grow while the code is copied, and differ at the next submission."""
_SOURCE = (".py", ".pyi", ".pyx", ".pth", ".so", ".sh", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".jinja")
"""A program that has not changed may come to run or read a new file with one of these suffixes."""
_SHOWN = 3


class Listing(NamedTuple):
    """The files of one tree."""

    root: Path
    """Without links."""
    names: list[str]
    """Relative, sorted."""
    notes: list[str]
    of_git: bool

    def has(self, program: Path) -> bool:
        place = program.resolve()
        return place.is_relative_to(self.root) and place.relative_to(self.root).as_posix() in self.names


def list_code(
    root: Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    left_out: Collection[Path] = (),
    max_mb: int,
    ask_git: bool = True,
    former: Collection[str] | None = None,
) -> Listing:
    """Lists the files of `root`, a path without links, that are copied.

    Args:
        left_out: files and directories that are none of the code, without links.
        ask_git: False: all files, whether or not git ignores them; hidden ones are left out then.
        former: the files of the run that goes on with this tree. New ones that are no source are left out.

    Raises:
        ConfigError: it is a home directory or the like, has too many files, is too large, has a name that is not
            UTF-8, or git does not answer.
    """
    if holds_other_things(root):
        raise ConfigError(
            "the code is not copied from a directory that holds other things as well",
            where=root,
            found="a home directory, one above it, or one for temporary files",
            expected="a directory of the program's own, or a git work tree",
            remedy="move the program into one, or set code.tree=DIR, or code.tree=null to copy nothing",
        )
    above = work_tree(root) if ask_git else WorkTree(None)
    of_git, closed = above.top is not None, list[str]()
    rule = _Rule(root, exclude, left_out)
    names = list(rule.kept(files_in(root, closed))) if of_git else rule.walked()
    for pattern in include:
        names += included(root, pattern, left_out)
    outputs: list[str] = []
    if former is not None:
        # Written by a program that has not changed, beside itself.
        outputs = sorted(name for name in {*names} if name not in former and not name.endswith(_SOURCE))
    sizes: dict[str, int] = {}
    special, outside = [], []
    for name in sorted({*names} - {*outputs}):
        try:
            info = os.lstat(root / name)
        except FileNotFoundError:  # removed since it was listed
            continue
        if stat.S_ISLNK(info.st_mode):
            sizes[name] = 0
            if not Path(os.path.realpath(root / name)).is_relative_to(root):
                outside.append(name)
        elif stat.S_ISREG(info.st_mode):
            sizes[name] = info.st_size
        else:
            special.append(name)
    _refuse_large(root, sizes, max_mb)
    notes = [above.note] if above.note else []
    for what, found in (
        (
            "left out of the copy of the code, since git does not open this repository of another user's",
            closed,
        ),
        ("left out of the copy of the code, since its name is of a secret", rule.secrets),
        ("left out of the copy of the code, since its name is of a log (code.include takes it)", rule.logs),
        ("left out of the copy of the code, since it is no file", special),
        ("no part of the run's code, since new and no source (--code new takes it)", outputs),
        ("not in the copy of the code: it is behind a link that leads out of the tree", outside),
    ):
        if found:
            notes.append(f"{what}: {_some(found)}")
    return Listing(root, sorted(sizes), notes, of_git)


def holds_other_things(root: Path) -> bool:
    """Returns whether a directory, without links, is one that holds far more than a program: a home, and the like."""
    home = Path.home().resolve()
    return root in (home, *home.parents, Path("/tmp"), Path("/var/tmp"))  # noqa: S108 - refused, not used


class _Rule:
    """Tells what is code in one tree, and remembers what it left out by its name: secrets and logs."""

    def __init__(self, root: Path, exclude: Sequence[str], left_out: Collection[Path]) -> None:
        self._root, self._exclude, self._left_out = root, tuple(exclude), frozenset(left_out)
        self._folders: dict[str, bool] = {"": True}
        self.secrets, self.logs = list[str](), list[str]()

    def kept(self, names: Sequence[str]) -> Iterator[str]:
        for name in names:
            if self._has_code(os.path.dirname(name)) and self._is_code(name):
                yield name

    def walked(self) -> list[str]:
        """Lists what lies below the root, without hidden names."""
        found: list[str] = []

        def is_code(entry: Entry) -> bool:
            if os.path.basename(entry.path).startswith("."):
                return False
            if entry.kind == "directory":
                # Else what is in it would be missing on the nodes, without a word.
                if entry.is_too_deep:
                    raise OSError(errno.ELOOP, f"more than {DEEPEST} directories in each other", entry.path)
                return self._has_code(entry.path)
            if self._is_code(entry.path):
                found.append(entry.path)
            # While it walks: a directory that is no program may hold millions.
            if len(found) > MOST_FILES:
                raise _too_many(self._root, found)
            return False

        try:
            with open_directory(self._root) as top:
                list_tree(top, numbers=False, keep=is_code)
        except OSError as error:
            where = self._root / os.fsdecode(error.filename or "")
            raise ConfigError("the code cannot be read", where=where, found=error.strerror) from None
        return found

    def _has_code(self, folder: str) -> bool:
        """Returns whether a directory, with all above it, belongs to the code."""
        if folder not in self._folders:
            above, name, path = os.path.dirname(folder), os.path.basename(folder), self._root / folder
            self._folders[folder] = (
                self._has_code(above)
                and name not in _CACHES
                and path not in self._left_out
                and not self._excluded(folder)
                and not _is_environment(path)
                and not _is_run(path)
            )
        return self._folders[folder]

    def _is_code(self, name: str) -> bool:
        last = os.path.basename(name)
        if self._root / name in self._left_out or self._excluded(name) or last.endswith((".pyc", ".pyo")):
            return False
        for patterns, found in ((_SECRET, self.secrets), (_LOGS, self.logs)):
            if any(fnmatchcase(last, pattern) for pattern in patterns):
                found.append(name)
                return False
        return True

    def _excluded(self, name: str) -> bool:
        last = os.path.basename(name)
        return any(fnmatchcase(name, pattern) or fnmatchcase(last, pattern) for pattern in self._exclude)


def _is_environment(path: Path) -> bool:
    return (path / "pyvenv.cfg").is_file() or (path / "conda-meta").is_dir()


def _is_run(path: Path) -> bool:
    return (path / "run.yaml").is_file() and (path / "control").is_dir()


def included(root: Path, pattern: str, left_out: Collection[Path]) -> list[str]:
    if pattern.startswith("/") or ".." in pattern.split("/"):
        raise ConfigError(
            "a glob leads out of the code",
            where="code.include",
            found=pattern,
            expected="one relative to the root",
        )
    found = [
        path
        for path in root.glob(pattern)
        if (path.is_symlink() or not path.is_dir()) and not {path, *path.parents} & set(left_out)
    ]
    # A typing error would otherwise show as an import that fails, on the nodes.
    if not found:
        raise ConfigError(
            "a glob finds nothing", where="code.include", found=pattern, expected=f"code below {root}"
        )
    return [path.relative_to(root).as_posix() for path in found]


def _refuse_large(root: Path, sizes: dict[str, int], max_mb: int) -> None:
    if len(sizes) > MOST_FILES:
        raise _too_many(root, list(sizes))
    total = sum(sizes.values())
    if total > max_mb * 1_000_000:
        largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:_SHOWN]
        raise ConfigError(
            "the code is too large to be copied into the run",
            where=root,
            found=f"{total / 1e6:.0f} MB; the largest: "
            + ", ".join(f"{name} {sizes[name] / 1e6:.1f} MB" for name in largest),
            expected=f"at most {max_mb} MB (code.max_mb)",
            remedy="leave data out by .gitignore or code.exclude, raise code.max_mb, or set code.tree",
        )
    for name in sizes:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                "a file of the code has a name that is not UTF-8",
                where=root,
                found=os.fsencode(name),
                remedy="rename it",
            ) from None


def _too_many(root: Path, names: Sequence[str]) -> ConfigError:
    counts: dict[str, int] = {}
    for name in names:
        first = name.split("/")[0] if "/" in name else "."
        counts[first] = counts.get(first, 0) + 1
    most = max(counts, key=lambda name: counts[name])
    return ConfigError(
        "the code has too many files to be copied into the run",
        where=root,
        found=f"{len(names):,}, of which {counts[most]:,} in {most}",
        expected=f"at most {MOST_FILES:,}",
        remedy="leave data out by .gitignore or code.exclude, or set code.tree",
    )


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {counted(rest, 'more file')}" if rest > 0 else "")
