"""Makes a directory for other programs beside its place and renames it there: whole, or not at all.

An interrupt and SIGTERM remove it; SIGKILL leaves it under its hidden name.
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
from verl_slurm.base.files import rename
from verl_slurm.base.one_line import shell_word


def require_free(out: Path, checkpoint: Path, what: str) -> None:
    """Refuses, with PermissionRefused, a place that holds something, or lies in or among checkpoints.

    `what` is made there, with its article. NotFound: its parent directory does not exist.
    """
    home = checkpoint.resolve()
    # The parents as well: a file anywhere in a checkpoint makes it unverifiable.
    places = {home} | ({home.parent} if home.parent.name == "checkpoints" else set())
    if places & {out, *out.parents}:
        raise PermissionRefused(
            f"{what} has no place among checkpoints", where=out, remedy="choose --out outside the run"
        )
    if not out.parent.is_dir():
        raise NotFound(
            "the directory to write into is not there",
            where=out.parent,
            remedy=f"mkdir -p {shell_word(out.parent)}",
        )
    # A link to an empty directory is refused, too: the rename would replace the link.
    if os.path.lexists(out) and (out.is_symlink() or not out.is_dir() or any(out.iterdir())):
        raise PermissionRefused(
            f"something is in the way of {what}",
            where=out,
            expected="nothing, or an empty directory",
            remedy="choose another --out, or remove it",
        )


@contextmanager
def whole_output(out: Path, what: str) -> Iterator[Path]:
    """Yields a directory that becomes `out` when the body succeeds, and is removed when it fails. In the main
    thread.

    An OSError of the body or of the rename becomes PermissionRefused. `what` is made, with its article.
    """

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    # Beside `out`, not in /tmp: only within a file system is a rename one step.
    staging = out.parent / f".{out.name}.{secrets.token_hex(4)}.{what.split()[-1]}.tmp"
    # SIGTERM (a batch job's end) would end Python without running `finally`.
    former = signal.signal(signal.SIGTERM, stop)
    try:
        # Private: weights may be more than others are to see.
        staging.mkdir(mode=0o700)
        yield staging
        rename(staging, out)
    except OSError as error:
        raise PermissionRefused(
            f"{what} could not be written",
            where=error.filename or out,
            found=error.strerror or error,
            remedy="make room, or choose another --out",
        ) from error
    finally:
        # After the rename the name is gone, and nothing is removed.
        shutil.rmtree(staging, ignore_errors=True)
        signal.signal(signal.SIGTERM, former)
