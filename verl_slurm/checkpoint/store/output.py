"""Makes a directory of output appear whole or not at all, and never among checkpoints.

The directory is made under a hidden name beside its place, filled, fsynced and renamed. Any failure before the rename
removes it, an interrupt and SIGTERM included; SIGKILL leaves it under its hidden name, never its own.
"""

import os
import secrets
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from verl_slurm.base.errors import NotFound, PermissionRefused
from verl_slurm.base.files import fsync_path, rename

__all__ = ["make_durable", "require_free", "staged"]


def require_free(out: Path, checkpoint: Path) -> None:
    """Refuses a place that holds something, or that lies in a checkpoint or among those of a run.

    Raises:
        PermissionRefused: it is such a place.
        NotFound: its parent directory does not exist.
    """
    home = checkpoint.resolve()
    places = {home} | ({home.parent} if home.parent.name == "checkpoints" else set())
    if places & {out, *out.parents}:
        raise PermissionRefused(
            "an export has no place among checkpoints", where=out, remedy="choose --out outside the run"
        )
    if not out.parent.is_dir():
        raise NotFound(
            "the directory to export into is not there", where=out.parent, remedy=f"mkdir -p {out.parent}"
        )
    if os.path.lexists(out) and (out.is_symlink() or not out.is_dir() or any(out.iterdir())):
        raise PermissionRefused(
            "something is in the way of the export",
            where=out,
            expected="nothing, or an empty directory",
            remedy="choose another --out, or remove it",
        )


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Yields a directory that becomes `out` when the body succeeds, and is removed when it fails. Runs in the main
    thread.

    Raises:
        PermissionRefused: an OSError of the body or of the rename, as one line.
    """

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    staging = out.parent / f".{out.name}.{secrets.token_hex(4)}.export.tmp"
    # SIGTERM (a batch job's end) would end Python without running `finally`.
    former = signal.signal(signal.SIGTERM, stop)
    try:
        staging.mkdir(mode=0o700)
        yield staging
        rename(staging, out)
    except OSError as error:
        raise PermissionRefused(
            "the export could not be written",
            where=error.filename or out,
            found=error.strerror or error,
            remedy="make room, or choose another --out",
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        signal.signal(signal.SIGTERM, former)


def make_durable(staging: Path) -> tuple[int, int]:
    """Sets the modes of all of it and fsyncs it; returns the number of files and their bytes."""
    num_files = num_bytes = 0
    for path in sorted(staging.rglob("*"), reverse=True):
        path.chmod(0o700 if path.is_dir() else 0o600)
        fsync_path(path)
        if path.is_file():
            num_files, num_bytes = num_files + 1, num_bytes + path.stat().st_size
    fsync_path(staging)
    return num_files, num_bytes
