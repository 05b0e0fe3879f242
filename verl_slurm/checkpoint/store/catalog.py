"""Lists a run's checkpoint directory from names and manifests alone: cheap, and no verdict."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from verl_slurm.base import bounded
from verl_slurm.base.errors import UNREADABLE, NotFound, VerlSlurmError
from verl_slurm.base.files import no_directory
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import other_run
from verl_slurm.base.tree import is_missing, names_in
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.checkpoint.format.specification import MANIFEST, STAGING_NAME
from verl_slurm.checkpoint.store.verify import read_manifest


class _File(msgspec.Struct):
    size: int


class _Outline(msgspec.Struct):
    """What a list shows of a manifest."""

    step: int
    safe_point: int
    created_utc: str
    files: list[_File]
    run_id: str
    digest: str
    attempt: int = 0
    components: list[str] = []


_OUTLINE = msgspec.json.Decoder(_Outline)
_RANKS = {"committed": 0, "torn": 1, "quarantined": 2, "foreign": 3}


def list_checkpoints(paths: RunPaths, *, partial: bool = False) -> list[CheckpointInfo]:
    """Lists every entry, committed ones first, each kind newest first. No directory: an empty list.

    `committed` says that the manifest is whole, not that its files are: use `verify` for that. With
    `partial`, for `RunPaths.partial`, partial checkpoints are the committed ones, and full ones are foreign.

    Raises:
        OSError: the checkpoint directory cannot be read.
        PermissionRefused: it, or the quarantine, is a link.
    """
    entries = [path for path in _children(paths, paths.checkpoints) if not _is_ours(paths, path)]
    infos = [info for path in entries if (info := _classify(paths, path, partial)) is not None]
    for path in _children(paths, paths.quarantine):
        # The reasons' records are files; links are not ours.
        if path.is_dir() and not path.is_symlink():
            # What follows the dot is the nonce of the move.
            step, safe_point = checkpoint_order(path.name.split(".", 1)[0]) or (-1, -1)
            infos.append(
                CheckpointInfo(
                    kind="quarantined",
                    name=path.name,
                    path=path,
                    step=step,
                    safe_point=safe_point,
                    detail=f"reason in {path.name}.reason.json",
                )
            )
    return sorted(infos, key=lambda i: (_RANKS[i.kind], -i.step, -i.safe_point, i.name))


def newest_checkpoint(run: Path) -> Path:
    """Returns the newest committed checkpoint of a run; NotFound: it has none."""
    committed = [info.path for info in list_checkpoints(RunPaths(run)) if info.kind == "committed"]
    if not committed:
        raise no_checkpoint(run)
    return committed[0].resolve()


def no_checkpoint(run: Path) -> NotFound:
    """Returns the error of a command that needs one; `status` says whether the run has lost those that it had."""
    return NotFound("the run has no checkpoint", where=run, remedy=f"verl-slurm status {shell_word(run)}")


def removed_meanwhile(checkpoint: Path) -> NotFound:
    """Returns the error of a command under which the checkpoint that it read went away."""
    return NotFound(
        "the checkpoint was removed while it was read",
        where=checkpoint,
        remedy="a run that lives removes those that its keep_last does not keep: take a newer one "
        "(`verl-slurm list RUN`), or first copy one elsewhere (`cp -a`)",
    )


@contextmanager
def unless_removed(*checkpoints: Path) -> Iterator[None]:
    """Raises `removed_meanwhile` for any error of the body if one of these, which were there, has gone since."""
    try:
        yield
    except (OSError, VerlSlurmError) as error:
        for checkpoint in filter(is_missing, checkpoints):
            raise removed_meanwhile(checkpoint) from error
        raise


def newest_listed(paths: RunPaths) -> CheckpointInfo | None:
    """Returns the newest checkpoint by its name and its manifest's own words, for tools that scan a thousand
    runs.

    This alone must not decide what is resumed, copied or dropped: digest and paths are not checked. OSError:
    the directory of checkpoints cannot be read.
    """
    try:
        names = os.listdir(paths.checkpoints)
    except FileNotFoundError:
        return None
    # By the numbers, since `step_9` and a name without a safe point sort wrongly as text.
    orders = {name: order for name in names if (order := checkpoint_order(name)) is not None}
    for name in sorted(orders, key=lambda name: orders[name], reverse=True):
        path = paths.checkpoints / name
        try:
            # A check of digest and paths would take 20 to 50 times as long.
            data = bounded.read_regular(path / MANIFEST, bounded.MANIFEST)
            # Before it is decoded: small JSON can become a multiple of its size in objects.
            bounded.check_json(data, bounded.MANIFEST)
            manifest = _OUTLINE.decode(data)
        except (OSError, *UNREADABLE):
            continue
        # A partial one that was copied here is no state to resume from, nor is another run's.
        if not manifest.components and not other_run(paths, manifest.run_id, manifest.digest):
            return CheckpointInfo(
                kind="committed",
                name=name,
                path=path,
                step=manifest.step,
                safe_point=manifest.safe_point,
                attempt=manifest.attempt,
                created_utc=manifest.created_utc,
                num_bytes=sum(file.size for file in manifest.files),
            )
    return None


def _children(paths: RunPaths, directory: Path) -> list[Path]:
    return [directory / name for name in names_in(paths.run, directory)]


def _is_ours(paths: RunPaths, path: Path) -> bool:
    """Returns whether it is the hint, one of its temporary files, or the quarantine."""
    return path in (paths.latest, paths.quarantine) or (
        path.name.startswith(f".{paths.latest.name}.") and path.name.endswith(".tmp")
    )


def _classify(paths: RunPaths, path: Path, partial: bool) -> CheckpointInfo | None:
    """Classifies `path`; None: a live run has renamed or removed it since it was listed."""
    order = checkpoint_order(path.name)
    staged = STAGING_NAME.fullmatch(path.name)
    try:
        is_directory = stat.S_ISDIR(path.lstat().st_mode)
    # A prune renames before it removes, and a commit renames its staging directory.
    except FileNotFoundError:
        return None
    # Listed, so that people see what lies there; no decision takes it.
    if staged is None and order is None:
        return CheckpointInfo(kind="foreign", name=path.name, path=path, detail="not a checkpoint's name")
    step, safe_point = order or (checkpoint_order(staged[1]) if staged else None) or (-1, -1)
    info = CheckpointInfo(kind="torn", name=path.name, path=path, step=step, safe_point=safe_point)
    if not is_directory:
        # As a checkpoint that was moved to another disk, with a link in its place.
        detail = str(no_directory(OSError(errno.ELOOP, ""), path))
        return replace(info, kind="foreign", detail=detail)
    if staged is not None:
        return replace(info, detail="staging directory: being written, or its writer died")
    try:
        manifest = read_manifest(path)
    # Either it has no manifest that verifies, or it was removed between the listing and this.
    except (OSError, VerlSlurmError) as error:
        return None if is_missing(path) else replace(info, detail=str(error))
    if other := other_run(paths, manifest.run_id, manifest.digest):
        return replace(info, kind="foreign", detail=other)
    if bool(manifest.components) != partial:
        # Somebody has put it here. A search for a state to resume from must ignore a partial one.
        detail = f"a partial checkpoint: {', '.join(manifest.components)} only"
        return replace(
            info, kind="foreign", detail="a full checkpoint among partial ones" if partial else detail
        )
    return replace(
        info,
        kind="committed",
        attempt=manifest.attempt,
        phase=manifest.phase,
        world_size=manifest.world_size,
        parent=manifest.parent,
        created_utc=manifest.created_utc,
        num_files=len(manifest.files),
        num_bytes=manifest.num_bytes,
        metrics={} if isinstance(manifest.metrics, msgspec.UnsetType) else manifest.metrics,
    )
