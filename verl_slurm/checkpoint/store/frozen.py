"""Stores models that do not train (reference, reward) once by content: `RUN/frozen/<digest>/`.

Every checkpoint names them by digest and holds no copy. The first start makes the copy from what it has just read and
hashed. The copy is complete once it has its name: written aside, fsynced, hashed again, renamed. So a run can always be
restored, even if its original model directory is gone. Every start reads the copy back. A damaged copy moves to
RUN/frozen/quarantine, and a new one is made while the model is still unchanged.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from verl_slurm.base.errors import DataError
from verl_slurm.base.files import fsync_path, private_dir, rename
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.frozen_check import check_frozen, frozen_digests, record_frozen
from verl_slurm.checkpoint.store.quarantine import move_to_quarantine
from verl_slurm.dataset.fingerprint.record import FileDigest, Fingerprint, fingerprint

__all__ = ["read_back_others", "store_frozen"]


def store_frozen(
    paths: RunPaths, source: Path, seen: Fingerprint, *, notice: Callable[[str], None] = lambda text: None
) -> Path:
    """Ensures a whole copy of the model directory `source` under its digest; returns its place. Runs on rank 0.

    An existing copy is read back, every byte. A copy that cannot be read now stays: it may be readable at the next
    start.

    Args:
        seen: `fingerprint(source)`, taken just before.
        notice: called with one line about a copy that does not match its name.

    Raises:
        DataError: the copy does not hash to it: the model is being changed, or a disk returns wrong bytes.
        OSError: no room, or no permission.
    """
    private_dir(paths.frozen)  # before anything in it is examined: it is no link, and ours
    final = paths.frozen / seen.digest
    if final.is_dir() and not _set_aside_damaged(paths, seen.digest, seen, notice, "it is stored anew"):
        record_frozen(paths, seen)  # older copies have none
        return final
    for left in paths.frozen.glob(".*.tmp"):  # left by a start that died; no other process may write here
        shutil.rmtree(left)
    staging = paths.frozen / f".{seen.digest}.{secrets.token_hex(8)}.tmp"
    try:
        # Links are followed: Hugging Face's cache consists of them, and their targets are the content.
        shutil.copytree(source, staging, copy_function=shutil.copyfile)
        for folder, _, files in os.walk(staging, topdown=False):
            for name in files:
                path = Path(folder, name)
                path.chmod(0o600)
                fsync_path(path)
            Path(folder).chmod(0o700)
            fsync_path(Path(folder))
        # Not the tree's digest: that also tells links from files, and the copy has no links.
        copied = fingerprint(staging).files
        different = [name for name, entry in seen.files.items() if _sha256(copied, name) != entry.sha256]
        if different or len(copied) != len(seen.files):
            raise DataError(
                "the copy of a model that does not train is not what was read",
                where=source,
                found=f"{len(copied)} files, of which {len(different)} differ: {', '.join(different[:3])}",
                expected=f"the {len(seen.files)} files of {seen.digest}",
                remedy="start again when nobody writes to the model's directory",
            )
        record_frozen(paths, seen)
        rename(staging, final)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return final


def read_back_others(paths: RunPaths, seen: Collection[str], *, notice: Callable[[str], None]) -> None:
    """Reads back the copies of models that the run does not start with now: they may be the last copies. Runs on rank
    0.

    Args:
        seen: digests of the models that it starts with; `store_frozen` checks these.
        notice: as in `store_frozen`.
    """
    for digest in frozen_digests(paths):
        if digest not in seen:
            _set_aside_damaged(
                paths, digest, None, notice, "the model it was made of is not what the run starts with now"
            )


def _set_aside_damaged(
    paths: RunPaths, digest: str, seen: Fingerprint | None, notice: Callable[[str], None], then: str
) -> bool:
    """Returns whether the copy was damaged, and is in quarantine now."""
    verdict = check_frozen(paths, digest, seen=seen)
    if verdict.ok:
        return False
    if not verdict.damaged:
        notice(f"a frozen model could not be read back: {verdict.one_line()}")
        return False
    target = move_to_quarantine(paths.frozen / digest, [str(problem) for problem in verdict.problems])
    notice(
        f"a frozen model is not what its name says, and is set aside: {verdict.one_line()}; {then}; {target}"
    )
    return True


def _sha256(files: Mapping[str, FileDigest], name: str) -> str:
    entry = files.get(name)
    return "" if entry is None else entry.sha256
