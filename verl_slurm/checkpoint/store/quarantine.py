"""Sets a damaged checkpoint aside: moves it, never removes it, and stores the reason beside it.

A good one is set aside for one reason: another of its name takes its place (`commit`). Two renames are not atomic, so
the record then names the staging directory of the other one. While that directory exists, the first may be put back.
"""

import os
import re
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from verl_slurm.base.bounded import RECORD, decode_json, read_regular
from verl_slurm.base.errors import UNREADABLE
from verl_slurm.base.files import fsync_path, private_dir, rename, write_file
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.checkpoint.format.specification import STAGING_NAME

__all__ = ["is_set_aside", "move_to_quarantine", "put_back", "put_back_unfinished"]

_RECORD = ".reason.json"
_MAX_NAME = 255


def move_to_quarantine(directory: Path, reasons: Sequence[str], *, until_gone: str = "") -> Path | None:
    """Moves `directory` to `quarantine/` beside it; returns its new place, or None if it was gone already.

    The reason is written first, so that no entry lies in quarantine without one.

    Args:
        until_gone: a name beside `directory`: while it exists, the next start puts this one back.

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
    } | ({"until_gone": until_gone} if until_gone else {})
    text = msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
    note = quarantine / f"{target.name}{_RECORD}"
    write_file(note, text)
    try:
        rename(directory, target)
    except FileNotFoundError:
        # It vanished since it was examined: nothing is left to keep.
        note.unlink(missing_ok=True)
        return None
    return target


def is_set_aside(path: Path) -> bool:
    """Returns whether `move_to_quarantine` can have put it there: a name that it makes, and the record beside it."""
    name, _, nonce = path.name.rpartition(".")
    ours = checkpoint_order(name) is not None and re.fullmatch(r"[0-9a-f]{8}", nonce) is not None
    return ours and path.with_name(path.name + _RECORD).is_file()


def put_back(aside: Path, directory: Path) -> bool:
    """Renames what was set aside to its old name, durably; returns False if the name is taken, or `aside` is gone."""
    if os.path.lexists(directory):
        return False
    try:
        rename(aside, directory, durable=False)
    except OSError:  # the save has failed with its own error; the next start tries again
        return False
    fsync_path(directory.parent)
    fsync_path(aside.parent)
    aside.with_name(aside.name + _RECORD).unlink(missing_ok=True)
    return True


def put_back_unfinished(checkpoints: Path) -> list[Path]:
    """Puts back what was set aside for a save that died before it took the place; returns the restored names."""
    done = []
    for note in sorted((checkpoints / "quarantine").glob(f"*{_RECORD}")):
        try:
            record = decode_json(read_regular(note, RECORD), _Record, RECORD, doubles=False)
        except (OSError, *UNREADABLE):
            continue  # not made by us
        plain = checkpoint_order(record.name) is not None and STAGING_NAME.fullmatch(record.until_gone)
        if len(record.until_gone) > _MAX_NAME:
            continue  # no file system has such a name, and looking it up is an error
        aside = note.with_name(note.name.removesuffix(_RECORD))
        unfinished = plain and (checkpoints / record.until_gone).is_dir() and aside.is_dir()
        if unfinished and put_back(aside, checkpoints / record.name):
            done.append(checkpoints / record.name)
    return done


class _Record(msgspec.Struct, frozen=True):
    """The used part of a reason's record."""

    name: str
    until_gone: str = ""
