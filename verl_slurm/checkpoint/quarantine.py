"""Setting a damaged checkpoint aside: moved, never removed, with the reason beside it."""

import os
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from verl_slurm.files import fsync_path, private_dir, write_file

__all__ = ["move_to_quarantine"]


def move_to_quarantine(directory: Path, reasons: Sequence[str]) -> Path | None:
    """Move `directory` to `quarantine/` beside it; returns where it lies now, None when it was gone already.

    The reason is written first, so that nothing lies in quarantine without one.

    Raises:
        OSError: it could not be moved.
    """
    if not os.path.lexists(directory):
        return None
    quarantine = private_dir(directory.parent / "quarantine")
    target = quarantine / f"{directory.name}.{secrets.token_hex(4)}"
    record = {
        "name": directory.name,
        "set_aside_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "reasons": list(reasons),
    }
    text = msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
    note = quarantine / f"{target.name}.reason.json"
    write_file(note, text)
    try:
        os.rename(directory, target)
    except FileNotFoundError:
        # Gone since it was looked at: nothing is left to keep.
        note.unlink(missing_ok=True)
        return None
    fsync_path(quarantine)
    fsync_path(directory.parent)
    return target
