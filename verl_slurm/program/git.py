"""Asks git about a work tree. git runs no program that the tree or its repository names.

Two commands read the repository's own configuration, `rev-parse` and `config`: they start nothing, and git refuses a
repository of another user there (`safe.directory`). All others run with the repository's index and objects, and with a
configuration of ours. Each program that git may start is named by configuration: filters, monitors, hooks, remotes,
drivers of diff and merge. That of the user and of the machine is left out, too: an attribute of the tree may choose a
filter of theirs.
"""

import os
import re
import selectors
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from verl_slurm.base.bounded import TooMuch, open_regular
from verl_slurm.base.errors import ConfigError
from verl_slurm.base.processes import stat_fields
from verl_slurm.dataset.fingerprint.file_hashing import hash_files

_TIMEOUT_S = 120.0
STILL_S = 10.0
"""Without processor time for so long, git waits for something that does not come. On slow storage it uses some."""
MOST_DIFF = 16 << 20
_MOST_ANSWER = 64 << 20
"""Of names: of 20,000 files, the most that are copied, they take a few MB."""
_MOST_ERRORS = 64 << 10
_HUGE = 64 << 20
_MOST_LOOKED_AT = 50_000
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
# What the files of a checkout look like. No value of these is a program.
_TAKEN_OVER = r"^core\.(filemode|symlinks|ignorecase|precomposeunicode|autocrlf|eol|excludesfile)$"
_OPTIONS = ("--no-pager", "--literal-pathspecs", "-c", "diff.autoRefreshIndex=false")
_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--relative")
# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
_POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/v1\n(?:.*\n)*?oid sha256:([0-9a-f]{64})\n")
_LONGEST_POINTER = 1024


class Commit(NamedTuple):
    """Names what a work tree was checked out from."""

    commit: str = ""
    branch: str = ""
    dirty: bool = False


class WorkTree(NamedTuple):
    """Where a directory belongs to."""

    top: Path | None
    """Without links; None: no work tree."""
    note: str = ""
    """Names a `.git` on the way that was not asked; empty: there is none."""


def work_tree(place: Path) -> WorkTree:
    """Looks for the work tree that holds the directory `place`.

    Raises:
        ConfigError: there is one of this user's, and git is not here or does not open it.
    """
    note = ""
    for folder in (place, *place.parents):
        mark = folder / ".git"
        if not os.path.lexists(mark):
            continue
        try:
            top = Path(os.fsdecode(_git(folder, "rev-parse", "--show-toplevel").rstrip(b"\n"))).resolve()
            if top != folder.resolve():
                raise _refusal(folder, f"a repository whose work tree is {top}")
        except ConfigError as error:
            if not _may_pass(mark):
                raise
            note = note or f"{mark} was passed over, and files are listed without it: {error.found}"
            continue
        return WorkTree(top, note)
    return WorkTree(None, note)


def _may_pass(mark: Path) -> bool:
    """Returns whether a `.git` that git does not open is another user's, or empty: anybody may put one above."""
    try:
        return mark.lstat().st_uid != os.geteuid() or (mark.is_dir() and not any(mark.iterdir()))
    except OSError:
        return True


def files_in(root: Path, closed: list[str], depth: int = 0) -> list[str]:
    """Lists the files below `root` that git tracks, and those that it neither tracks nor ignores; in submodules, too.
    Raises ConfigError if git does not answer.

    Args:
        closed: gets the directories of repositories inside this one that are other users', and that git does not open.
    """
    with _reader(root) as ask:
        answer = ask("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = sorted({os.fsdecode(name).rstrip("/") for name in answer.split(b"\0") if name})
    found = []
    for name in names:
        path = root / name
        if path.is_symlink() or not path.is_dir():
            # A tracked file that was removed stands in the index still.
            found += [name] if os.path.lexists(path) else []
        # A submodule, or a repository inside this one. One that was not checked out is an empty directory.
        elif depth < _DEEPEST and os.path.lexists(path / ".git"):
            inside: list[str] = []
            try:
                found += [f"{name}/{inner}" for inner in files_in(path, inside, depth + 1)]
            except ConfigError:
                if not _may_pass(path / ".git"):
                    raise
                closed.append(name)
            closed += [f"{name}/{inner}" for inner in inside]
    return found


def commit_of(root: Path, depth: int = 0) -> Commit:
    """Returns the commit below `root`; empty where there is none yet."""
    head = _git(root, "rev-parse", "--verify", "-q", "HEAD", may_fail=True).decode().strip()
    branch = os.fsdecode(_git(root, "symbolic-ref", "--short", "-q", "HEAD", may_fail=True)).strip()
    if not head:
        return Commit("", branch, dirty=True)
    with _reader(root) as ask:
        if _changed(ask, root, head) or ask("ls-files", "-z", "--others", "--exclude-standard"):
            return Commit(head, branch, dirty=True)
        staged = ask("ls-files", "-z", "--stage")
    inner = [os.fsdecode(line.partition(b"\t")[2]) for line in staged.split(b"\0") if line[:6] == b"160000"]
    checked_out = [root / name for name in inner if os.path.lexists(root / name / ".git")]
    return Commit(head, branch, dirty=any(_is_dirty(path, depth + 1) for path in checked_out))


def _is_dirty(submodule: Path, depth: int) -> bool:
    try:
        return depth > _DEEPEST or commit_of(submodule, depth).dirty
    except ConfigError:  # one that git does not open is not said to be as committed
        return True


def diff_of(root: Path, names: Sequence[str]) -> bytes | None:
    """Returns the difference of these tracked files, those that are copied, from the commit. Of a file that was removed
    it says so, without what was in it. None: it is longer than 16 MiB, or git cannot make it.
    """
    head = _git(root, "rev-parse", "--verify", "-q", "HEAD").decode().strip()
    copied = set(names)
    data, size = [], 0
    with _reader(root) as ask:
        # Also what was removed; what is there and left out of the copy may hold secrets.
        wanted = [
            name for name in _changed(ask, root, head) if name in copied or not os.path.lexists(root / name)
        ]
        # In parts: a list of arguments has a limit.
        for first in range(0, len(wanted), 500):
            # A removed file may be one that held secrets.
            quiet = ("--irreversible-delete", "--ignore-submodules=all")
            try:
                part = ask(*_DIFF, *quiet, head, "--", *wanted[first : first + 500], most=MOST_DIFF - size)
            except ConfigError:
                # As in a partial clone: nothing is fetched.
                return None
            data.append(part)
            size += len(part)
    return b"".join(data)


def _changed(ask: Callable[..., bytes], root: Path, head: str) -> list[str]:
    """Lists the tracked files that are not what the commit has; of submodules, those at another commit."""
    # "dirty": git would start a git in each submodule, with the configuration of that one.
    answer = ask(*_DIFF, "--ignore-submodules=dirty", "--name-only", "-z", head, "--", ".")
    names = [os.fsdecode(name) for name in answer.split(b"\0") if name]
    same = set()
    for first in range(0, len(names), 500):
        listed = ask("ls-tree", "-z", "-l", head, "--", *names[first : first + 500])
        for line in listed.split(b"\0")[:-1]:
            about, _, raw = line.partition(b"\t")
            _, kind, blob, size = about.split()
            # A partial clone lacks objects, and their sizes.
            if kind != b"blob" or not size.isdigit() or int(size) > _LONGEST_POINTER:
                continue
            # The filter of git LFS is not run. In its commits a file's digest stands in the place of the file.
            pointer = _POINTER.match(ask("cat-file", "blob", blob.decode()))
            if pointer and _holds(root, os.fsdecode(raw), pointer[1].decode()):
                same.add(os.fsdecode(raw))
    return [name for name in names if name not in same]


def is_lfs_pointer(path: Path) -> bool:
    """Returns whether a file stands for content that Git LFS did not bring; False if it cannot be read."""
    try:
        fd = open_regular(path, follow=True)
        try:
            return (
                os.fstat(fd).st_size <= _LONGEST_POINTER
                and _POINTER.match(os.read(fd, _LONGEST_POINTER)) is not None
            )
        finally:
            os.close(fd)
    except (OSError, TooMuch):
        return False


def _holds(root: Path, name: str, digest: str) -> bool:
    try:
        found = hash_files(root, [name], follow=False).get(name)
    except OSError:
        return False
    return found is not None and found.sha256 == digest


@contextmanager
def _reader(root: Path) -> Iterator[Callable[..., bytes]]:
    """Gives a function that asks git in `root`, with a configuration of ours. Raises ConfigError."""
    paths = ("--git-path", "index", "--git-path", "objects", "--git-path", "info")
    lines = _git(root, "rev-parse", "--show-toplevel", *paths, "--show-object-format").split(b"\n")
    if len(lines) != 6:
        raise _refusal(root, "a repository whose path has a line break")
    top, index, objects, info = (os.path.join(root, os.fsdecode(line)) for line in lines[:4])
    if not root.resolve().is_relative_to(Path(top).resolve()):
        raise _refusal(root, f"a repository whose work tree is {top}")
    options: list[str] = []
    for pair in _git(root, "config", "-z", "--get-regexp", _TAKEN_OVER, may_fail=True).split(b"\0"):
        key, _, value = os.fsdecode(pair).partition("\n")
        options += ["-c", f"{key}={value}"] if key else []
    if lines[4] == b"sha256":
        options += ["-c", "core.repositoryFormatVersion=1", "-c", "extensions.objectFormat=sha256"]
    try:
        made = TemporaryDirectory(prefix="verl-slurm-")
        ours = Path(made.name)
        (ours / "HEAD").write_text("ref: refs/heads/none\n")
        for name in ("objects", "refs"):
            (ours / name).mkdir()
        (ours / "info").symlink_to(info)  # what is ignored, and attributes
        for shared in Path(index).parent.glob("sharedindex.*"):
            (ours / shared.name).symlink_to(shared)
    except OSError as error:
        raise _refusal(root, error) from None
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ |= {"GIT_DIR": made.name, "GIT_WORK_TREE": top, "GIT_INDEX_FILE": index}
    environ |= {"GIT_OBJECT_DIRECTORY": objects, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}

    with made:
        yield lambda *words, **limits: _run(root, environ, [*options, *words], **limits)


def _git(place: Path, *words: str, may_fail: bool = False) -> bytes:
    """Runs a command that reads the repository's own configuration, and must start no program that it names."""
    environ = {name: value for name, value in os.environ.items() if name not in _OF_HOOKS}
    return _run(place, environ, words, may_fail=may_fail)


def _run(
    place: Path,
    environ: dict[str, str],
    words: Sequence[str],
    *,
    may_fail: bool = False,
    most: int = _MOST_ANSWER,
) -> bytes:
    program = shutil.which("git")
    if program is None:
        raise _refusal(place, "no program git here")
    said = f"git {next(word for word in words if not word.startswith('-') and '=' not in word)}"
    try:
        git = subprocess.Popen(
            [program, "-C", str(place), *_OPTIONS, *words],
            # Locks: a submission must not write into the user's index.
            env=environ | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        raise _refusal(place, error) from None
    try:
        answer, errors = _read(git, most)
    except TimeoutError as error:
        raise _refusal(place, f"{said} {error}{_odd_files(place)}", "remove what it waited for") from None
    except TooMuch as error:
        raise _refusal(place, f"{said} answers with {error}") from None
    finally:
        git.kill()
        # One that hangs in dead storage does not end by it.
        with suppress(subprocess.TimeoutExpired):
            git.wait(1)
        for pipe in (git.stdout, git.stderr):
            assert pipe is not None
            pipe.close()
    if git.returncode < 0:
        number = -git.returncode
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        raise _refusal(place, f"{said} was ended by {name}{_odd_files(place)}", "remove what ended it")
    if git.returncode and not may_fail:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise _refusal(place, lines[0] if lines else f"exit code {git.returncode} of {said}")
    return answer if not git.returncode else b""


def _read(git: "subprocess.Popen[bytes]", most: int) -> tuple[bytes, bytes]:
    """Reads what git writes until it ends. Raises TooMuch; TimeoutError if it does nothing, or takes too long."""
    assert git.stdout is not None
    assert git.stderr is not None
    answer, errors = bytearray(), bytearray()
    used, moved = [""], time.monotonic()
    end = moved + _TIMEOUT_S
    with selectors.DefaultSelector() as pipes:
        pipes.register(git.stdout, selectors.EVENT_READ, (answer, most))
        pipes.register(git.stderr, selectors.EVENT_READ, (errors, _MOST_ERRORS))
        while pipes.get_map():
            for key, _ in pipes.select(min(1.0, STILL_S)):
                data = os.read(key.fd, 1 << 16)
                kept, limit = key.data
                kept += data[: limit - len(kept) + 1]
                if not data:
                    pipes.unregister(key.fileobj)
            if len(answer) > most:
                raise TooMuch(f"more than {most >> 20} MiB")
            now = time.monotonic()
            if (times := stat_fields(git.pid)[11:13]) != used:
                used, moved = times, now
            elif now - moved > STILL_S:
                raise TimeoutError(f"has waited for {STILL_S:g} s and done nothing")
            if now > end:
                raise TimeoutError(f"has not ended for {_TIMEOUT_S:g} s")
    try:
        git.wait(STILL_S)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"has not ended for {STILL_S:g} s") from None
    return bytes(answer), bytes(errors)


def _odd_files(place: Path) -> str:
    """Names files that git may have waited for, or that are too much for it: it opens what has one of its own names."""
    found, seen = list[str](), 0
    top = next((folder for folder in (place, *place.parents) if os.path.lexists(folder / ".git")), place)
    for folder, _, names in os.walk(top):
        for name in names:
            path, seen = Path(folder, name), seen + 1
            if not name.startswith(".git") and ".git" not in path.relative_to(top).parts:
                continue
            with suppress(OSError):
                info = path.stat()
                if not stat.S_ISREG(info.st_mode):
                    found.append(f"{path} is no regular file")
                elif name.startswith(".git") and info.st_size > _HUGE:
                    found.append(f"{path} has {info.st_size >> 20} MiB")
        if seen > _MOST_LOOKED_AT:
            break
    return (
        f": {', '.join(found[:3])}"
        if found
        else "; maybe a file that .git/config names is no regular file, or storage does not answer"
    )


def _refusal(place: Path, found: object, first: str = "see `git status` there") -> ConfigError:
    return ConfigError(
        "git does not tell which files the code has",
        where=place,
        found=found,
        remedy=f"{first}, or set code.tree to the directory that is copied as it is, or to null",
    )
