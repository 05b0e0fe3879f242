"""`RUN/run_id`: 16 hex digits that tell a run from others of its name, in tiers that they share and in alerts."""

import os
import re
import secrets

from verl_slurm.bounded import SMALL, TooMuch, read_regular
from verl_slurm.errors import TierError
from verl_slurm.files import fsync_path
from verl_slurm.paths import RunPaths

__all__ = ["RUN_ID", "run_id"]

RUN_ID = re.compile(r"[0-9a-f]{16}")


def run_id(paths: RunPaths) -> str:
    """The 16 hex digits that tell this run from others of its name; made at the first call.

    To bring a lost run directory back from its tiers, write the id (a part of every key) into a new `RUN/run_id`.

    Raises:
        TierError: the file is no id.
    """
    if not paths.run_id.exists():
        temp = paths.root / f".{paths.run_id.name}.{secrets.token_hex(4)}.tmp"
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(secrets.token_hex(8).encode() + b"\n")
                file.flush()
                os.fsync(fd)
            try:
                os.link(temp, paths.run_id)  # one winner, and never half a file
            except FileExistsError:
                pass
            except OSError:
                os.rename(temp, paths.run_id)  # a file system without links
        finally:
            temp.unlink(missing_ok=True)
        fsync_path(paths.root)
    try:
        text = read_regular(paths.run_id, SMALL).decode("ascii", errors="replace").strip()
    except TooMuch as error:
        text = str(error)
    if not RUN_ID.fullmatch(text):
        raise TierError(
            "not a run's id",
            where=paths.run_id,
            found=text[:40],
            expected="16 hex digits",
            remedy="it is the end of PREFIX/NAME-ID in every tier of this run; write it there again",
        )
    return text
