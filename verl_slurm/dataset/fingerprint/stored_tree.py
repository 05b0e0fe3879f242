"""Keeps copies of trees in a run, each under its digest: the user's code, and models that do not train.

```
FOLDER/<digest>/       the copy: directories 0700
FOLDER/<digest>.json   its files: a `Fingerprint` of this digest, so it proves itself, and the copy by it
```

A copy is whole once it has its name: written aside, each file compared with its digest and fsynced, and renamed. It is
read back before it is used: `program.copying.check_copy`, `checkpoint.store.frozen.check_frozen`.
"""

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from verl_slurm.base import bounded
from verl_slurm.base.errors import Fenced
from verl_slurm.base.files import fsync_path, num_threads, private_dir, rename, write_file, write_new
from verl_slurm.dataset.fingerprint.entries import FileDigest, Fingerprint, recorded_tree, render

_BLOCK = 4 << 20


def store_tree(folder: Path, source: Path, tree: Fingerprint, what: str, *, links: bool) -> Path:
    """Copies a tree into `folder`; returns the place of the copy, which must be free. No other process may write there.

    Args:
        tree: the files of `source`, as they were just read; `what` they are, for the error.
        links: links are copied as links (`link_text`), and modes are kept read-only. False: the files that they lead to
            are, since the cache of Hugging Face consists of links, and modes are 0600.

    Raises:
        Fenced: a file has changed since it was read.
        OSError: no room, or no permission.
    """
    private_dir(folder, inside=folder.parent)
    final = folder / tree.digest
    # Left by a process that died. Large ones of several deaths would fill the disk.
    for path in folder.glob(".*.tmp"):
        shutil.rmtree(path)
    # Under a name that no reader takes for a copy until it is whole.
    staging = private_dir(folder / f".{tree.digest}.{secrets.token_hex(8)}.tmp", inside=folder)
    try:
        folders = {staging / name for name, entry in tree.files.items() if entry.kind == "directory"} | {
            staging
        }
        for name in tree.files:
            folders |= {parent for parent in (staging / name).parents if parent.is_relative_to(staging)}
        for path in sorted(folders):
            path.mkdir(mode=0o700, exist_ok=True)
        files = {name: entry for name, entry in tree.files.items() if entry.kind != "directory"}
        # Threads: each file is synced by itself, which is a round trip to a file server.
        with ThreadPoolExecutor(num_threads()) as pool:
            copied = pool.map(lambda name: _copy(source, staging, name, files[name], links=links), files)
            for name, is_same in zip(files, copied, strict=True):
                if not is_same:
                    changed = f"{what} has changed while it was copied"
                    remedy = "start again once it stays the same" + ", or name it in code.exclude" * links
                    raise Fenced(changed, where=source / name, remedy=remedy)
        # Bottom up: a directory is synced after everything in it.
        for path in sorted(folders, reverse=True):
            fsync_path(path)
        record_tree(folder, tree)
        rename(staging, final)
    except BaseException:
        # The error that led here is the one to report.
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return final


def _copy(source: Path, staging: Path, name: str, file: FileDigest, *, links: bool) -> bool:
    """Returns whether the file is what was read before."""
    path, target, digest = source / name, staging / name, hashlib.sha256()

    def blocks() -> Iterator[bytes]:
        fd = bounded.open_regular(path, follow=not links)
        # Here: an error of reading would else bear the name of what is written.
        with bounded.named(path), os.fdopen(fd, "rb", buffering=0) as opened:
            while block := opened.read(_BLOCK):
                digest.update(block)
                yield block

    if path.is_symlink() != (file.kind == "link"):
        return False
    try:
        if links and file.kind == "link":
            text = link_text(source, path)
            digest.update(os.fsencode(text))
            os.symlink(text, target)
        else:
            write_new(target, blocks())
            if links:
                # Read-only: a program that writes into its own source fails at once, and not at the next start.
                target.chmod(0o500 if file.kind == "program" else 0o400)
    except (FileNotFoundError, bounded.TooMuch):  # removed, or something else by now
        return False
    return digest.hexdigest() == file.sha256


def link_text(root: Path, path: Path) -> str:
    """Returns the text of the link's copy: within the tree it stays there, out of it it leads to the same place."""
    text = os.readlink(path)
    target = Path(os.path.normpath(path.parent / text))
    if target.is_relative_to(root):
        return os.path.relpath(target, path.parent)
    return str(target)


def record_tree(folder: Path, tree: Fingerprint) -> None:
    """Records the expected content of the copy of that digest, durably; does nothing if the record exists."""
    # Written once: the record proves itself by its digest. Before the copy has its name, so that none stands without
    # what it is judged by.
    if recorded_tree(folder, tree.digest) is None:
        write_file(folder / f"{tree.digest}.json", render(tree))
