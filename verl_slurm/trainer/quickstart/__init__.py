"""The built-in tiny model and its data. Both appear whole or not at all."""

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from verl_slurm.base.errors import DataError
from verl_slurm.base.files import fsync_path, private_dir, rename

__all__ = ["build_once"]


def build_once(directory: Path, build: Callable[[Path], None], *, required: tuple[str, ...]) -> None:
    """Makes `directory` by `build(temporary directory)` and a rename, unless it exists.

    Several processes may call this at once: the first rename wins.

    Args:
        directory: the final place; its parent is made if missing.
        build: fills an empty 0700 directory.
        required: relative names of files that a complete directory has.

    Raises:
        DataError: `directory` exists and lacks one of `required`: not ours, so not touched.
    """
    if not directory.exists():
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Beside its place, on the same file system: a rename there is one step.
        temp = private_dir(directory.parent / f".{directory.name}.{secrets.token_hex(4)}.tmp")
        try:
            build(temp)
            for path in sorted(temp.rglob("*")):
                path.chmod(0o700 if path.is_dir() else 0o600)
                # All content before the rename: a node that is lost must not leave the name with empty files.
                fsync_path(path)
            fsync_path(temp)
            rename(temp, directory)
        except OSError:
            # Another process may have been first. Its directory has the same content, so ours is dropped.
            if not directory.exists():
                raise
        finally:
            shutil.rmtree(temp, ignore_errors=True)
    # Also of a directory that was there before: it may be another one of that name.
    for name in required:
        if not (directory / name).is_file():
            raise DataError(
                "a directory is in the way of a built-in one",
                where=directory,
                found=f"no {name}",
                expected=f"{', '.join(required)}",
                remedy=f"remove {directory}, or choose another place",
            )
