"""Reads a tree of code, copies it into the run, and reads the copy back. `record.py` specifies the result."""

import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from verl_slurm.base.bounded import TooMuch, open_regular
from verl_slurm.base.digest import hash_fd, num_threads
from verl_slurm.base.errors import ConfigError, DataError, Fenced
from verl_slurm.base.files import fsync_path, private_dir, rename, write_file, write_new
from verl_slurm.base.one_line import counted
from verl_slurm.base.paths import RunPaths
from verl_slurm.program.record import CodeFile, files_of, tree_digest

_BLOCK = 1 << 20
_IMPORTED = (".py", ".pyc", ".so", ".pth")
"""Ends of names that Python may import."""


def read_tree(root: Path, names: Sequence[str]) -> list[CodeFile]:
    """Reads and hashes these files.

    Raises:
        ConfigError: one cannot be read.
    """

    def one(name: str) -> CodeFile:
        try:
            return _read(root, name)
        except (OSError, TooMuch) as error:
            raise ConfigError(
                "a file of the code cannot be read",
                where=root / name,
                found=getattr(error, "strerror", None) or error,
                remedy="make it readable, or name it in code.exclude",
            ) from None

    with ThreadPoolExecutor(num_threads()) as pool:
        return sorted(pool.map(one, names), key=lambda file: file.path)


def _read(root: Path, name: str) -> CodeFile:
    path = root / name
    if path.is_symlink():
        return CodeFile(path=name, kind="link", content=_link_text(root, path))
    fd = open_regular(path)
    try:
        executable = os.fstat(fd).st_mode & stat.S_IXUSR
        size, digest = hash_fd(fd)
    finally:
        os.close(fd)
    return CodeFile(path=name, kind="program" if executable else "file", content=digest, size=size)


def _link_text(root: Path, path: Path) -> str:
    """Returns the text of the link's copy: within the tree it stays there, out of it it leads to the same place."""
    text = os.readlink(path)
    target = Path(os.path.normpath(path.parent / text))
    if target.is_relative_to(root):
        return os.path.relpath(target, path.parent)
    return str(target)


def copy_tree(paths: RunPaths, root: Path, files: Sequence[CodeFile]) -> str:
    """Copies these files into the run, and returns the digest. A copy that is there already stays if it is whole,
    and is set aside if it is not.

    Args:
        files: from `read_tree`.

    Raises:
        Fenced: a file has changed since it was read.
        OSError: no room, or no permission.
    """
    digest = tree_digest(files)
    private_dir(paths.code)
    final = paths.code_tree(digest)
    if final.is_dir():
        try:
            check_copy(paths, digest)
            return digest
        except DataError:
            # Kept: it may tell what has happened to it. No name of a copy has a dot.
            rename(final, paths.code / f"{digest}.damaged.{secrets.token_hex(4)}")
    # Left by a submission that died. The run's lock is held: no other process writes here.
    for left in paths.code.glob(".*.tmp"):
        shutil.rmtree(left)
    staging = private_dir(paths.code / f".{digest}.{secrets.token_hex(4)}.tmp")
    try:
        folders = {staging}
        for file in files:
            folders |= {folder for folder in (staging / file.path).parents if folder.is_relative_to(staging)}
        for folder in sorted(folders):
            folder.mkdir(mode=0o700, exist_ok=True)
        # Threads: each file is synced by itself, which is a round trip to a file server.
        with ThreadPoolExecutor(num_threads()) as pool:
            for changed in pool.map(lambda file: _copy(root, staging, file), files):
                if changed:
                    raise Fenced(
                        "the code has changed while it was copied",
                        where=root / changed,
                        remedy="submit again",
                    )
        # Bottom up: a directory is synced after everything in it.
        for folder in sorted(folders, reverse=True):
            fsync_path(folder)
        # Before the rename, so that no copy stands without what it is judged by.
        write_file(
            paths.code_files(digest), msgspec.json.encode(sorted(files, key=lambda file: file.path)) + b"\n"
        )
        rename(staging, final)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return digest


def _copy(root: Path, staging: Path, file: CodeFile) -> str:
    """Returns the name of the file if it is not what was read before."""
    source, target = root / file.path, staging / file.path
    if file.kind == "link":
        os.symlink(file.content, target)
        return ""
    digest = hashlib.sha256()

    def blocks() -> Iterator[bytes]:
        fd = open_regular(source)
        with os.fdopen(fd, "rb", buffering=0) as opened:
            while block := opened.read(_BLOCK):
                digest.update(block)
                yield block

    try:
        write_new(target, blocks())
    except (FileNotFoundError, TooMuch):  # removed, or something else by now
        return file.path
    # Read-only: a program that writes into its own source fails at once, and not at the next start.
    target.chmod(0o500 if file.kind == "program" else 0o400)
    return "" if digest.hexdigest() == file.content else file.path


def check_copy(paths: RunPaths, digest: str) -> list[str]:
    """Reads a copy back, every byte, and removes Python's caches in it: they could stand for other sources.

    Returns:
        Further files in it that Python could import in the place of a submitted one.

    Raises:
        DataError: a file is missing or not what was submitted.
        OSError: storage does not answer.
    """
    files, root = files_of(paths, digest), paths.code_tree(digest)

    def one(file: CodeFile) -> str:
        try:
            found = _read_back(root, file)
        except (FileNotFoundError, NotADirectoryError):
            return f"{file.path} is missing"
        except TooMuch as error:
            return f"{file.path}: {error}"
        return "" if (found.kind, found.content) == (file.kind, file.content) else f"{file.path} was changed"

    with ThreadPoolExecutor(num_threads()) as pool:
        wrong = [problem for problem in pool.map(one, files) if problem]
    if wrong:
        raise DataError(
            "the run's copy of the code is not what was submitted",
            where=root,
            found=f"{counted(len(wrong), 'file')}: {'; '.join(wrong[:3])}",
            remedy="verl-slurm submit RUN --code new copies the code again",
        )
    return _further(root, {file.path for file in files})


def _read_back(root: Path, file: CodeFile) -> CodeFile:
    path = root / file.path
    if path.is_symlink():
        return CodeFile(path=file.path, kind="link", content=os.readlink(path))
    return _read(root, file.path)


def _further(root: Path, known: set[str]) -> list[str]:
    found = []
    for folder, folders, names in os.walk(root):
        is_cache = os.path.basename(folder) == "__pycache__"
        links = [name for name in folders if name == "__pycache__" and os.path.islink(f"{folder}/{name}")]
        for name in [*names, *links]:
            path = os.path.relpath(os.path.join(folder, name), root)
            if path in known or not name.endswith((*_IMPORTED, "__pycache__")):
                continue
            # Python may take a module from a cache whatever its source says. It makes a cache anew.
            if is_cache:
                os.unlink(root / path)
            else:
                found.append(path)
    return sorted(found)
