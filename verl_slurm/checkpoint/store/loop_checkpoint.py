"""Makes a checkpoint of a directory that a guest wrote (`checkpoint.format.specification`, section 1). No torch.

A guest writes into the work directory of its attempt, on the run's own file system: `RunPaths.work`. Whole files are
renamed into a staging directory, made private and durable, hashed, and committed by `checkpoint.store.commit`. So no
reader sees half a checkpoint, a fenced attempt does no harm, and nothing is copied.
"""

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from verl_slurm.base.bounded import CONFIG, read_regular
from verl_slurm.base.errors import CheckpointCorrupt, ConfigError
from verl_slurm.base.fence import require_attempt
from verl_slurm.base.files import private_dir, rename, write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import run_id
from verl_slurm.base.tree import list_tree, names_in, open_directory
from verl_slurm.checkpoint.decide.best import metrics_of
from verl_slurm.checkpoint.format.specification import (
    GUEST_FILES,
    FileEntry,
    Guest,
    Manifest,
    Topology,
    guest_directory,
    path_problem,
)
from verl_slurm.checkpoint.format.state_schema import current_schema, render_schema
from verl_slurm.checkpoint.store import commit as door
from verl_slurm.checkpoint.store.commit import SavedCheckpoint
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.dataset.fingerprint import data_record as fingerprint


@dataclass(frozen=True, kw_only=True)
class LoopSave:
    """Input of one save of a loop that is not ours, besides its files.

    Attributes:
        step: whole steps done.
        parent: name of the checkpoint that this attempt resumed from; None: it began from nothing.
        metrics: of the step that it ends; numbers that are not finite are left out.
        metadata: for people, e.g. the versions of the guest's libraries.
        config: YAML, for a run that has lost its own; empty: as run.yaml has it.
        began: `time.monotonic` when the save began; None: now.
    """

    guest: Guest
    step: int
    attempt: int
    world_size: int
    parent: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, object] = field(default_factory=dict)
    config: bytes = b""
    began: float | None = None


def commit_tree(
    paths: RunPaths,
    save: LoopSave,
    parts: Mapping[str, Path],
    *,
    texts: Mapping[str, bytes] | None = None,
    sealed: Sequence[FileEntry] = (),
    attempt_check: Callable[[], None] | None = None,
) -> SavedCheckpoint:
    """Makes `parts` a verified checkpoint of the run, `save.step` whole steps on. Durable when it returns.

    Args:
        parts: name in the checkpoint → the directory or file to move there, on the run's file system. One of
            them is `specification.guest_directory`. Empty directories are left out.
        texts: further small files, by their name in the checkpoint.
        sealed: entries of files that their ranks have sealed (`commit.seal`); all others are sealed here.
        attempt_check: default: `fence.require_attempt`.

    Returns:
        `seconds` since `save.began`. One of this step that was there already, and verifies, is named instead.

    Raises:
        Fenced: a newer attempt owns the run.
        CheckpointCorrupt: a link, a special file, a forbidden name, or a missing part.
        OSError: the storage refused. On any error nothing is left of the save but parts that were not moved.
    """
    began = time.monotonic() if save.began is None else save.began
    check = attempt_check or (lambda: require_attempt(paths, save.attempt))
    # Before anything is moved: the parts of a fenced attempt stay where its loop wrote them.
    check()
    # Safe point 0: these loops save at the end of a step.
    staging = door.begin(paths, save.step, 0)
    try:
        # Renamed, not copied: the work directory lies on the same file system, and a copy would double the save's time.
        for name, source in parts.items():
            _move(source, staging.directory / name)
        for name, data in (small_files(paths, save) | dict(texts or {})).items():
            write_file(staging.directory / name, data)
        # Each rank has sealed its own files side by side; one rank alone would hash the whole checkpoint.
        known = {entry.path: entry for entry in sealed}
        # Judged after the move: from here on the loop cannot change names any more.
        files = _files(staging.directory)
        entries = door.seal(staging.directory, [name for name in files if name not in known])
        manifest = _manifest(paths, save, staging.final.name, (*entries, *known.values()), began)
        # Unsigned: a loop's files are not encrypted by us.
        final = door.commit(staging, manifest, attempt_check=check)
    except BaseException:
        # Parts that were moved go too: half a save is of no use, and its loop writes whole ones.
        shutil.rmtree(staging.directory, ignore_errors=True)
        raise
    return SavedCheckpoint(
        name=final.name,
        seconds=time.monotonic() - began,
        num_bytes=manifest.num_bytes,
        num_files=len(manifest.files),
    )


def require_guest(
    directory: Path,
    guest: Guest,
    *,
    world_size: int | None = None,
    needed: str = "",
    whose: str = "",
) -> Manifest:
    """Returns the manifest of a checkpoint that a guest of this kind wrote, before anything of it is loaded.

    Args:
        world_size: required number of ranks; None: any number.
        needed: a file that the guest's directory must contain to be of the framework `whose`.

    Raises:
        ConfigError: another loop wrote it, or another number of ranks.
        CheckpointCorrupt, SchemaMismatch, OSError: `checkpoint.store.verify.read_manifest`.
    """
    manifest = read_manifest(directory)
    # The field was added with loops; manifests without it are the native trainer's.
    kind = "native" if isinstance(manifest.guest, msgspec.UnsetType) else manifest.guest
    if kind != guest:
        raise ConfigError(
            "the checkpoint is of another kind of loop",
            where=directory,
            found=kind,
            expected=guest,
            remedy="go on with the trainer.backend that wrote it, or start with checkpoint.resume_from=null",
        )
    if world_size is not None and manifest.world_size != world_size:
        raise ConfigError(
            "the checkpoint is of another number of ranks",
            where=directory,
            found=manifest.world_size,
            expected=world_size,
            remedy=f"go on with distributed.dp_size={manifest.world_size}, or see verl_slurm.run(any_ranks=True)",
        )
    own = directory / guest_directory(guest, manifest.step)
    # The manifest tells loops from verl, not one framework from the other; the file that each writes does.
    if needed and not (own / needed).exists():
        raise ConfigError(
            f"the checkpoint is not one of {whose}",
            where=own,
            found=", ".join(sorted(path.name for path in own.iterdir())[:5]),
            expected=needed,
            remedy="go on with the loop that wrote it, or start with checkpoint.resume_from=null",
        )
    return manifest


def for_ranks(paths: RunPaths, name: str, world_size: int) -> Path:
    """Returns where a checkpoint is for so many ranks (`RunPaths.resharded`). Raises as `read_manifest`."""
    saved, divided = paths.checkpoints / name, paths.resharded.checkpoints / name
    # Of another number of ranks, a start has made a copy. Where there is none, `require_guest` refuses the checkpoint
    # itself, with both numbers.
    other = read_manifest(saved).world_size != world_size and divided.is_dir()
    return divided if other else saved


def clear_work(paths: RunPaths, attempt: int) -> Path:
    """Empties the work directory of an attempt, 0700. Runs in one rank, before the first save."""
    work = paths.work(attempt)
    # Before anything is removed.
    names_in(paths.run, work.parent)  # refuses a link: its target is not ours to remove
    # A restart within the attempt has the same number, and its loop must not find half a save of the one before.
    shutil.rmtree(work, ignore_errors=True)
    private_dir(work, inside=paths.run)
    return work


def sweep_work(paths: RunPaths) -> list[Path]:
    """Removes uncommitted work of guests; returns it. What cannot be removed is no error. Runs at a start.

    PermissionRefused: the directory is a link.
    """
    work = paths.root / "work"
    # A former attempt that still writes there finds its directory gone, and could not have committed anyway.
    found = [work / name for name in sorted(names_in(paths.run, work))]
    for path in found:
        # The link itself is removed below, and never what it leads to.
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
    # Asked afterwards, since what could not be removed is no error and must not be reported as gone.
    return [path for path in found if not os.path.lexists(path)]


def _move(source: Path, target: Path) -> None:
    try:
        # Durable with the commit, which syncs the tree.
        rename(source, target, durable=False)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot be moved into the checkpoint: {error.strerror}",
            str(source),
            None,
            str(target),
        ) from error


def data_digest(paths: RunPaths) -> str:
    """Returns the fingerprint of the data that the run started with; empty: none is recorded."""
    data = fingerprint.read(paths)
    return "" if data is None else data.digest


def small_files(paths: RunPaths, save: LoopSave) -> dict[str, bytes]:
    """Returns the files of `GUEST_FILES`. Reads the run's configuration, where that is left."""
    metadata = {
        **save.metadata,
        "step": save.step,
        "phase": "step_end",
        "index": 0,
        "guest": save.guest,
        "metrics": metrics_of(save.metrics),
    }
    # run.yaml configures the next start, and may have been edited since this one read it.
    is_there = paths.trained_with.exists()
    small = (
        read_regular(paths.trained_with, CONFIG)
        if is_there
        else save.config or read_regular(paths.run_yaml, CONFIG),
        msgspec.json.format(msgspec.json.encode(metadata), indent=1) + b"\n",
        render_schema(current_schema()),
    )
    # `GUEST_FILES` is part of the specification: a verification asks for each of them.
    return dict(zip(GUEST_FILES, small, strict=True))


def _files(staging: Path) -> list[str]:
    """Lists every file of the tree; refuses other entries, and removes directories without a file."""
    with open_directory(staging) as root:
        entries = list_tree(root)
    files = [entry.path for entry in entries if entry.kind == "file"]
    odd = (entry for entry in entries if entry.kind not in ("file", "directory"))
    wrong = [f"{entry.path}: a {entry.kind}" for entry in odd]
    wrong += [f"{path}: {problem}" for path in files if (problem := path_problem(path))]
    if wrong:
        raise CheckpointCorrupt(
            "what the training loop saved cannot be a checkpoint",
            where=staging,
            found="; ".join(wrong[:5]),
            expected="regular files, with names of letters, digits and _.=+@-",
            remedy="the save is given up; the checkpoint before it counts",
        )
    needed = {path[:at] for path in files for at, char in enumerate(path) if char == "/"}
    # Deepest first, since a directory of empty directories is empty only once those are gone.
    for entry in reversed(entries):
        if entry.kind == "directory" and entry.path not in needed:
            (staging / entry.path).rmdir()
    return files


def _manifest(
    paths: RunPaths, save: LoopSave, name: str, entries: Sequence[FileEntry], began: float
) -> Manifest:
    return Manifest(
        name=name,
        step=save.step,
        safe_point=0,
        phase="step_end",
        run_id=run_id(paths),
        attempt=save.attempt,
        parent=save.parent,
        schema_id=current_schema().schema_id,
        dataset_fingerprint=data_digest(paths),
        world_size=save.world_size,
        topology=Topology(dp=save.world_size),
        files=tuple(entries),
        guest=save.guest,
        created_utc=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        save_seconds=round(time.monotonic() - began, 3),
        metrics=metrics_of(save.metrics) or msgspec.UNSET,
    )
