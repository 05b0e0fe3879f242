"""Turns a staging directory into a committed checkpoint (`specification.py`, section 4).

A name may be taken. One that verifies is kept, and ours is dropped: two saves at the same safe point hold the
same state. A damaged one is first moved to quarantine. Nothing is ever removed to make room.

The exception is a checkpoint of another number of ranks, or of other parts. Then ours takes the name, and the
other one waits in quarantine, bound to our staging directory. If that directory still exists at the next
start, we died in between, and `sweep` puts the other one back.
"""

import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from verl_slurm.base.errors import CheckpointCorrupt, VerlSlurmError
from verl_slurm.base.files import fsync_path, num_threads, private_dir, write_file
from verl_slurm.base.keys import Keyring
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.tree import list_tree, names_in, open_below, open_directory
from verl_slurm.checkpoint.format.manifest import checkpoint_order, parse, render, sealed
from verl_slurm.checkpoint.format.signature import sign
from verl_slurm.checkpoint.format.specification import (
    MANIFEST,
    STAGING_NAME,
    FileEntry,
    Manifest,
    missing_parts,
    path_problem,
)
from verl_slurm.checkpoint.store.chunks import hash_file
from verl_slurm.checkpoint.store.quarantine import (
    move_strays,
    move_to_quarantine,
    put_back,
    put_back_unfinished,
)
from verl_slurm.checkpoint.store.verify import read_manifest, verify


class SavedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a save: a committed checkpoint. Rank 0 of a loop broadcasts it."""

    name: str
    seconds: float
    """From the begin of the save to the rename."""
    num_bytes: int
    """Over all ranks."""
    num_files: int = 0
    """Of a loop's checkpoint; 0: not counted."""
    on_shared: bool = True
    """Whether shared storage has it. If not, the nodes' own disks do, read back."""
    problem: str = ""
    """Which medium does not have it, and why."""


@dataclass(frozen=True, kw_only=True)
class StagingDirectory:
    """A checkpoint that is being written in `directory`, by every rank; the commit renames it to `final`."""

    directory: Path
    final: Path
    step: int
    safe_point: int


def begin(paths: RunPaths, step: int, safe_point: int) -> StagingDirectory:
    """Makes an empty staging directory, 0700, with a name nobody can guess. Runs on rank 0."""
    # Durable before anything lies in it: a power cut otherwise takes the directory's own name, and with it the run's
    # first checkpoint.
    private_dir(paths.checkpoints, inside=paths.run)
    # 64 random bits in the name: another user cannot make it first, and a retry does not meet the leftovers of a dead
    # save.
    staging = name_staging(paths, step, safe_point)
    staging.directory.mkdir(mode=0o700)
    return staging


def name_staging(paths: RunPaths, step: int, safe_point: int) -> StagingDirectory:
    """Names a staging directory and makes nothing: no storage is asked, and none can hold us up."""
    final = paths.checkpoint(step, safe_point)
    directory = paths.staging(final, secrets.token_hex(8))
    return StagingDirectory(directory=directory, final=final, step=step, safe_point=safe_point)


def seal(staging_dir: Path, files: Iterable[str]) -> list[FileEntry]:
    """Makes `files` below a directory durable; returns their entries. Runs on every rank, for its own files.

    Raises:
        OSError: a file is missing, a link, or could not be made durable. The save is then lost.
        ValueError: a path that no manifest may hold.
    """
    names = list(files)
    for name in names:
        problem = path_problem(name)
        if problem is not None:
            raise ValueError(f"{problem}: {name!r}")
    # Every name is opened below this descriptor, without following links: a directory exchanged meanwhile leads nowhere
    # else.
    with open_directory(staging_dir) as root:
        with ThreadPoolExecutor(max_workers=num_threads(), thread_name_prefix="seal") as pool:
            entries = list(pool.map(lambda name: _seal_file(root, name), names))
        folders = {folder for name in names for folder in _folders(name)}
        # Files first, then their directories from the deepest up: an entry is durable once its directory is synced, and
        # a synced name must not point to bytes that are not.
        for folder in sorted(folders, reverse=True):
            with open_below(root, folder) as fd:
                os.fchmod(fd, 0o700)
                os.fsync(fd)  # noqa: TID251 - by descriptor
        os.fsync(root)  # noqa: TID251 - by descriptor
    return entries


def commit(
    staging: StagingDirectory,
    manifest: Manifest,
    *,
    attempt_check: Callable[[], None],
    keys: Keyring | None = None,
) -> Path:
    """Makes a sealed staging directory a checkpoint. Durable when it returns. Runs on rank 0.

    Args:
        manifest: with all ranks' entries in `files`; its digest is filled in here.
        attempt_check: raises `Fenced` when this attempt no longer owns the run. Called directly before the rename.
        keys: if given, the manifest is signed with the current one, which its files are encrypted with.

    Returns:
        The final directory: ours, or the verified one with the same state that had the name already.

    Raises:
        CheckpointCorrupt: the tree is not exactly what was sealed.
        Fenced: by `attempt_check`.
        OSError: the storage refused. On any error the staging directory is left for `abort`.
    """
    # The digest is computed first, and the signature covers it: neither may change any more from here on.
    manifest = sealed(manifest)
    if keys is not None:
        manifest = sign(manifest, keys.current)
    data = render(manifest)
    parse(data, where=staging.directory / MANIFEST)  # never write what every reader would refuse
    # Before the manifest is written: a file beside the sealed ones would be committed without any fsync.
    _check_sealed(staging, manifest)
    # Asked here too, and not just before the rename: a fenced attempt then ends before it touches the name below.
    attempt_check()
    write_file(staging.directory / MANIFEST, data)
    replaced: Path | None = None
    if os.path.lexists(staging.final):
        is_same, replaced = _judge_taken_name(staging, manifest, attempt_check, keys)
        # The one that is there stays: to exchange it would mean a moment with neither.
        if is_same:
            fsync_path(staging.final.parent)  # its writer may have died between rename and fsync
            abort(staging)
            _point_latest(staging)
            return staging.final
    try:
        # The owner is asked once more right before the rename: reading a taken name back may have lasted minutes, long
        # enough for another attempt to start.
        attempt_check()
        _rename(staging, manifest)
    except BaseException:
        if replaced is not None:
            put_back(replaced, staging.final)  # otherwise neither would have the name
        raise
    # The rename is visible at once and durable now. The save is reported after this, since a report is a promise.
    fsync_path(staging.final.parent)
    _point_latest(staging)
    return staging.final


def _judge_taken_name(
    staging: StagingDirectory,
    manifest: Manifest,
    attempt_check: Callable[[], None],
    keys: Keyring | None,
) -> tuple[bool, Path | None]:
    """(whether the same state has the final name already, where a good one with another state was moved to).

    Raises:
        CheckpointCorrupt: it cannot be judged now.
    """
    # Every byte is read, since whoever wrote it may have died at any point of its commit.
    verdict = verify(staging.final, keys=keys)
    if verdict.has_strays:
        attempt_check()
        move_strays(staging.final, verdict)
    other = verdict.manifest if verdict.is_whole else None
    if other is not None and (why := _difference(other, manifest)):
        attempt_check()
        # Two renames cannot be one. The record in quarantine names our staging directory, so that `sweep` can tell
        # a replacement that died half way from one that is done.
        return False, move_to_quarantine(staging.final, [why], until_gone=staging.directory.name)
    if verdict.is_whole:
        return True, None
    # An unreadable directory may be whole: storage that does not answer now must not cost a good checkpoint.
    if not verdict.damaged:
        raise CheckpointCorrupt(
            "the name is taken by a checkpoint that cannot be judged",
            where=staging.final,
            found=verdict.one_line(),
            expected="one that verifies, or none",
            remedy="the save is given up; "
            + (
                f"if it is yours: chmod -R go-w {shell_word(staging.final)}"
                if verdict.is_open
                else "look at its owner and its storage"
            ),
        )
    attempt_check()
    move_to_quarantine(staging.final, [str(p) for p in verdict.problems])
    return False, None


def _difference(other: Manifest, ours: Manifest) -> str:
    """Returns why the state in `other`, of the same name, is not ours; empty if it is."""
    # Safe points are counted on each rank: the sixth of four ranks is further on than the sixth of two, and numbers at
    # the same place differ by rounding.
    for what in ("world_size", "topology", "components"):
        theirs, mine = getattr(other, what), getattr(ours, what)
        if theirs != mine:
            return f"replaced by a save of this name with another {what}: {theirs} here, {mine} there"
    return ""


def _rename(staging: StagingDirectory, manifest: Manifest) -> None:
    try:
        os.rename(staging.directory, staging.final)  # noqa: TID251 - its errors are judged apart from fsync's
    except OSError:
        # NFS may report ESTALE or ENOENT for a rename that was done and whose reply was lost.
        # Both must hold: our directory is gone, and what has the name carries our manifest's digest. Otherwise another
        # save may have taken it.
        if staging.directory.exists() or not _is_ours(staging.final, manifest):
            raise


def abort(staging: StagingDirectory) -> None:
    """Removes a staging directory that will not be committed; a missing one is no error. Runs on rank 0."""
    _remove(staging.directory)


def sweep(paths: RunPaths) -> list[Path]:
    """Puts back what a dead save had begun to replace; removes and returns what saves and prunes left."""
    removed = []
    names = sorted(names_in(paths.run, paths.checkpoints))
    # Before anything is removed: a checkpoint that was set aside for a save that died comes back first, while the
    # staging directory that tells so still exists.
    names_in(paths.run, paths.quarantine)  # refuses a link: its target is not ours to put back
    put_back_unfinished(paths.checkpoints)
    for name in names:
        path = paths.checkpoints / name
        # Only the two kinds of names that this package makes are removed; a user's own directory stays.
        if STAGING_NAME.fullmatch(name) and stat.S_ISDIR(path.lstat().st_mode):
            _remove(path)
        elif name.startswith(f".{paths.latest.name}.") and name.endswith(".tmp"):
            path.unlink(missing_ok=True)
        else:
            continue
        removed.append(path)
    return removed


def _folders(name: str) -> list[str]:
    return [name[:at] for at, char in enumerate(name) if char == "/"]


def _seal_file(root: int, name: str) -> FileEntry:
    with open_below(root, name) as fd:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{name} is not a regular file")
        # Frameworks write with the user's umask; a checkpoint holds weights and rollouts.
        os.fchmod(fd, 0o600)
        # Once: after a failure the kernel may have dropped the pages, and a second fsync would report a false success.
        os.fsync(fd)  # noqa: TID251 - by descriptor
        # Hashed after the fsync and from the same descriptor, so that digest and durable bytes are of one file.
        return hash_file(fd, name)


def _check_sealed(staging: StagingDirectory, manifest: Manifest) -> None:
    wanted = {entry.path: entry.size for entry in manifest.files}
    with open_directory(staging.directory) as root:
        # All else that is there was not made durable.
        # Sizes alone: every byte is read back by the lead's verification after the commit.
        there = {e.path: (e.kind, e.info.st_size) for e in list_tree(root) if e.kind != "directory"}
    wrong = [f"{path}: not sealed" for path in sorted(there.keys() - wanted.keys())]
    wrong += [f"{path}: sealed, but missing" for path in sorted(wanted.keys() - there.keys())]
    for path in sorted(there.keys() & wanted.keys()):
        if there[path] != ("file", wanted[path]):
            wrong.append(f"{path}: {there[path][0]} of {there[path][1]} bytes, sealed with {wanted[path]}")
    wrong += [f"{part}: required" for part in missing_parts(manifest)]
    # Every reader orders checkpoints by name, and the signature covers the manifest's name: the two must agree.
    if (manifest.name, checkpoint_order(manifest.name)) != (
        staging.final.name,
        (staging.step, staging.safe_point),
    ):
        wrong.append(f"manifest of {manifest.name} for {staging.final.name}")
    if wrong:
        raise CheckpointCorrupt(
            "the staged checkpoint is not what was sealed",
            where=staging.directory,
            found="; ".join(wrong[:5]),
            remedy="the save is given up; the checkpoint before it counts",
        )


def _is_ours(final: Path, manifest: Manifest) -> bool:
    try:
        return read_manifest(final).digest == manifest.digest
    except (OSError, VerlSlurmError):
        return False


def _point_latest(staging: StagingDirectory) -> None:
    hint = staging.final.parent / "latest"
    try:
        # For people and scripts: a resume verifies what is there and never reads this file.
        write_file(hint, staging.final.name.encode() + b"\n")
    except OSError:
        # The checkpoint is committed; a stale hint must not make that look like a failure.
        return


def _remove(path: Path) -> None:
    # A link is left alone: its target may be a directory of the user's, which no save of ours has made.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
