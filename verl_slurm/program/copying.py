"""Reads a tree of code, copies it into the run, and reads the copy back. `record.py` specifies the result."""

import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from verl_slurm.base.bounded import TooMuch, open_regular
from verl_slurm.base.digest import num_threads
from verl_slurm.base.errors import ConfigError, DataError, Fenced
from verl_slurm.base.files import fsync_path, private_dir, rename, write_file, write_new
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.tree import list_tree, open_directory
from verl_slurm.dataset.fingerprint.entries import Drift, FileDigest, Fingerprint, Kind, render, sealed
from verl_slurm.dataset.fingerprint.file_hashing import hash_files
from verl_slurm.program.code_record import files_of

_BLOCK = 1 << 20
_IMPORTED = (".py", ".pyc", ".so", ".pth")
"""Ends of names that Python may import."""


def read_tree(root: Path, names: Sequence[str]) -> Fingerprint:
    """Reads and hashes these files.

    Raises:
        ConfigError: one cannot be read.
    """
    try:
        files = _read(root, names, _link_text)
        unread = next((name for name in names if name not in files), None)
        if unread is not None:
            raise FileNotFoundError(0, "it is gone, or no file any more", str(root / unread))
    except OSError as error:
        raise ConfigError(
            "a file of the code cannot be read",
            where=error.filename,
            found=error.strerror,
            remedy="make it readable, or name it in code.exclude",
        ) from None
    return sealed(files)


def _read(root: Path, names: Iterable[str], text_of: Callable[[Path, Path], str]) -> dict[str, FileDigest]:
    """Reads these files; those that are gone or no files any more are left out.

    Args:
        text_of: the text of the link of that path in `root`.
    """
    # Links by themselves: what they lead to is no part of the tree, or is one already.
    plain, files = [], {}
    for name in names:
        if (root / name).is_symlink():
            text = os.fsencode(text_of(root, root / name))
            files[name] = FileDigest(kind="link", size=len(text), sha256=hashlib.sha256(text).hexdigest())
        else:
            plain.append(name)
    for name, found in hash_files(root, plain, follow=False).items():
        kind: Kind = "program" if found.mode & stat.S_IXUSR else "file"
        files[name] = FileDigest(kind=kind, size=found.size, sha256=found.sha256)
    return files


def _link_text(root: Path, path: Path) -> str:
    """Returns the text of the link's copy: within the tree it stays there, out of it it leads to the same place."""
    text = os.readlink(path)
    target = Path(os.path.normpath(path.parent / text))
    if target.is_relative_to(root):
        return os.path.relpath(target, path.parent)
    return str(target)


def copy_tree(paths: RunPaths, root: Path, tree: Fingerprint) -> str:
    """Copies these files into the run, and returns the digest. A copy that is there already stays if it is whole,
    and is set aside if it is not.

    Args:
        tree: from `read_tree`.

    Raises:
        Fenced: a file has changed since it was read.
        OSError: no room, or no permission.
    """
    digest = tree.digest
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
        for name in tree.files:
            folders |= {folder for folder in (staging / name).parents if folder.is_relative_to(staging)}
        for folder in sorted(folders):
            folder.mkdir(mode=0o700, exist_ok=True)
        # Threads: each file is synced by itself, which is a round trip to a file server.
        with ThreadPoolExecutor(num_threads()) as pool:
            copied = pool.map(lambda name: _copy(root, staging, name, tree.files[name]), tree.files)
            for name, is_same in zip(tree.files, copied, strict=True):
                if not is_same:
                    what = "the code has changed while it was copied"
                    raise Fenced(what, where=root / name, remedy="submit again")
        # Bottom up: a directory is synced after everything in it.
        for folder in sorted(folders, reverse=True):
            fsync_path(folder)
        # Before the rename, so that no copy stands without what it is judged by.
        write_file(paths.code_files(digest), render(tree))
        rename(staging, final)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return digest


def _copy(root: Path, staging: Path, name: str, file: FileDigest) -> bool:
    """Returns whether the file is what was read before."""
    source, target = root / name, staging / name
    digest = hashlib.sha256()

    def blocks() -> Iterator[bytes]:
        fd = open_regular(source)
        with os.fdopen(fd, "rb", buffering=0) as opened:
            while block := opened.read(_BLOCK):
                digest.update(block)
                yield block

    if source.is_symlink() != (file.kind == "link"):
        return False
    try:
        if file.kind == "link":
            text = _link_text(root, source)
            digest.update(os.fsencode(text))
            os.symlink(text, target)
        else:
            write_new(target, blocks())
            # Read-only: a program that writes into its own source fails at once, and not at the next start.
            target.chmod(0o500 if file.kind == "program" else 0o400)
    except (FileNotFoundError, TooMuch):  # removed, or something else by now
        return False
    return digest.hexdigest() == file.sha256


def check_copy(paths: RunPaths, digest: str) -> list[str]:
    """Reads a copy back, every byte, and removes Python's caches in it: they could stand for other sources.

    Returns:
        Further files in it that Python could import in the place of a submitted one.

    Raises:
        DataError: a file is missing or not what was submitted.
        OSError: storage does not answer.
    """
    files, root = files_of(paths, digest), paths.code_tree(digest)
    difference = Drift.between(files, _read(root, files, lambda root, path: os.readlink(path)))
    if difference:
        raise DataError(
            "the run's copy of the code is not what was submitted",
            where=root,
            found=difference.one_line(),
            remedy="verl-slurm submit RUN --code new copies the code again",
        )
    return _further(root, files)


def _further(root: Path, known: Collection[str]) -> list[str]:
    found = []
    with open_directory(root) as top:
        entries = list_tree(top)
    for entry in entries:
        *_, folder, name = ["", *entry.path.split("/")]
        if entry.path in known or entry.kind == "directory" or not name.endswith((*_IMPORTED, "__pycache__")):
            continue
        # Python may take a module from a cache whatever its source says. It makes a cache anew.
        if folder == "__pycache__":
            os.unlink(root / entry.path)
        else:
            found.append(entry.path)
    return found
