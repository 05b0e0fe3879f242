"""Reads a tree of code, copies it into the run, and reads the copy back. `code_record.py` specifies the result."""

import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from verl_slurm.base.errors import ConfigError, DataError
from verl_slurm.base.files import rename
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.tree import list_tree, open_directory
from verl_slurm.dataset.fingerprint.entries import Drift, FileDigest, Fingerprint, Kind, sealed
from verl_slurm.dataset.fingerprint.file_hashing import hash_files
from verl_slurm.dataset.fingerprint.stored_tree import link_text, store_tree
from verl_slurm.program.code_record import files_of

_IMPORTED = (".py", ".pyc", ".so", ".pth")
"""Ends of names that Python may import."""


def read_tree(root: Path, names: Sequence[str]) -> Fingerprint:
    """Reads and hashes these files. Raises ConfigError if one cannot be read."""
    try:
        files = _read(root, names, link_text)
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
    """Reads these files but those that are gone, or no files any more. `text_of`: of a link in `root`."""
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


def copy_tree(paths: RunPaths, root: Path, tree: Fingerprint) -> str:
    """Copies these files into the run, and returns the digest. A copy that is there already stays if it is whole, and
    is set aside if it is not. The run's lock is held: no other process writes there.

    Raises:
        Fenced, OSError: as `store_tree`.
    """
    final = paths.code_tree(tree.digest)
    if final.is_dir():
        try:
            check_copy(paths, tree.digest)
            return tree.digest
        except DataError:
            # Kept: it may tell what has happened to it. No name of a copy has a dot.
            rename(final, paths.code / f"{tree.digest}.damaged.{secrets.token_hex(4)}")
    return store_tree(paths.code, root, tree, "the code", links=True).name


def check_copy(paths: RunPaths, digest: str) -> list[str]:
    """Reads a copy back, every byte, and removes Python's caches in it. Returns further files in it that Python could
    import in the place of a submitted one.

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
