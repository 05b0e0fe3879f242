"""Asks git about a work tree. No program that the repository names is run: no hook, monitor, diff or textconv.

git itself refuses a repository of another user (`safe.directory`), whose configuration could name programs.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from verl_slurm.base.errors import ConfigError

__all__ = ["Commit", "commit_of", "diff_of", "files_in", "work_tree"]

_TIMEOUT_S = 120.0
_MOST_DIFF = 16 << 20
_DEEPEST = 8
"""Submodules in each other."""
# Set by a hook that submits, these would lead to another repository.
_OF_HOOKS = {
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_PREFIX",
    "GIT_OBJECT_DIRECTORY",
    "GIT_COMMON_DIR",
}
_OPTIONS = (
    "--no-pager",
    "--literal-pathspecs",
    "-c",
    "core.fsmonitor=false",
    "-c",
    "core.hooksPath=/dev/null",
)


class Commit(NamedTuple):
    """Names what a work tree was checked out from."""

    commit: str = ""
    branch: str = ""
    dirty: bool = False


def work_tree(place: Path) -> Path | None:
    """Returns the top of the work tree that holds the directory `place`, without links; None: it is in none.

    Raises:
        ConfigError: there is one, and git is not here or does not open it.
    """
    if not any(os.path.lexists(folder / ".git") for folder in (place, *place.parents)):
        return None
    top = Path(os.fsdecode(_git(place, "rev-parse", "--show-toplevel").rstrip(b"\n")))
    return top.resolve()


def files_in(root: Path, depth: int = 0) -> list[str]:
    """Lists the files below `root` that git tracks, and those that it neither tracks nor ignores; in submodules, too.

    Raises:
        ConfigError: git does not answer.
    """
    answer = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = sorted({os.fsdecode(name).rstrip("/") for name in answer.split(b"\0") if name})
    found = []
    for name in names:
        path = root / name
        if path.is_symlink() or not path.is_dir():
            # A tracked file that was removed stands in the index still.
            found += [name] if os.path.lexists(path) else []
        # A submodule, or a repository inside this one. One that was not checked out is an empty directory.
        elif depth < _DEEPEST and os.path.lexists(path / ".git"):
            found += [f"{name}/{inner}" for inner in files_in(path, depth + 1)]
    return found


def commit_of(root: Path) -> Commit:
    """Returns the commit below `root`; empty where there is none yet."""
    head = _git(root, "rev-parse", "--verify", "-q", "HEAD", may_fail=True).decode().strip()
    branch = os.fsdecode(_git(root, "symbolic-ref", "--short", "-q", "HEAD", may_fail=True)).strip()
    dirty = _git(root, "status", "--porcelain", "-z", "--untracked-files=normal", "--", ".")
    return Commit(head, branch, dirty=bool(dirty))


def diff_of(root: Path, names: Sequence[str]) -> bytes | None:
    """Returns the difference of these tracked files from the commit; None: it is longer than 16 MiB.

    Args:
        names: the files that are copied. Of any other, nothing is recorded.
    """
    quiet = ("--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=all", "--no-renames")
    changed = _git(root, "diff", *quiet, "--relative", "--name-only", "-z", "HEAD", "--", ".", may_fail=True)
    # Also what was removed; what is there and left out of the copy may hold secrets.
    copied = set(names)
    names_changed = [os.fsdecode(raw) for raw in changed.split(b"\0") if raw]
    wanted = [name for name in names_changed if name in copied or not os.path.lexists(root / name)]
    data, size = [], 0
    # In parts: a list of arguments has a limit.
    for first in range(0, len(wanted), 500):
        part = _git(root, "diff", *quiet, "--relative", "HEAD", "--", *wanted[first : first + 500])
        data.append(part)
        size += len(part)
        if size > _MOST_DIFF:
            return None
    return b"".join(data)


def _git(place: Path, *words: str, may_fail: bool = False) -> bytes:
    program = shutil.which("git")
    if program is None:
        raise _refusal(place, "no program git here")
    environ = {name: value for name, value in os.environ.items() if name not in _OF_HOOKS}
    try:
        done = subprocess.run(
            [program, "-C", str(place), *_OPTIONS, *words],
            # Locks: a submission must not write into the user's index.
            env=environ | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _refusal(place, error) from None
    if done.returncode and not may_fail:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise _refusal(place, lines[0] if lines else f"exit code {done.returncode}")
    return done.stdout if not done.returncode else b""


def _refusal(place: Path, found: object) -> ConfigError:
    return ConfigError(
        "git does not tell which files the code has",
        where=place,
        found=found,
        remedy="see `git status` there, or set code.tree to the directory that is copied as it is, or to null",
    )
