"""Sets a damaged checkpoint aside, and fills another copy of the same save from it; moves strays out of a good one.

It is moved, never removed, and the reason is stored beside it. A good one is set aside for one reason: another of its
name takes its place (`commit`). Two renames are not atomic, so the record then names the staging directory of the other
one. While that directory exists, the first may be put back.

Two damaged copies are often whole together. `fill` takes a file if its bytes have the digest in the manifest, which
both copies must share byte for byte. The result is verified as a whole before it counts.
"""

import os
import re
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from verl_slurm.base.bounded import RECORD, decode_json, read_regular
from verl_slurm.base.errors import UNREADABLE, CheckpointCorrupt, TierError
from verl_slurm.base.files import fsync_path, private_dir, rename, write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.tree import is_missing, open_below, open_directory
from verl_slurm.checkpoint.format.info import Verdict
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.checkpoint.format.specification import MANIFEST, STAGING_NAME, FileEntry
from verl_slurm.checkpoint.store.copies import DirectoryPlace, copy_file
from verl_slurm.checkpoint.store.verify import named_paths

_RECORD = ".reason.json"
# No checkpoint's name: nothing takes what was moved out of one for a copy of it.
_STRAYS = "strays."
_MAX_NAME = 255


def move_to_quarantine(directory: Path, reasons: Sequence[str], *, until_gone: str = "") -> Path | None:
    """Moves `directory` to `quarantine/` beside it; returns its new place, or None if it was gone already.

    `until_gone`: a name beside it; while it exists, the next start puts this one back. OSError: not moved.
    """
    if is_missing(directory):
        return None
    # Beside the checkpoints, on the same file system: the move is a rename, and no copy can fail half way.
    quarantine = private_dir(directory.parent / "quarantine", inside=directory.parent)
    # A random suffix: the same name may be set aside more than once.
    target = quarantine / f"{directory.name}.{secrets.token_hex(4)}"
    note = _note(target, directory.name, reasons, {"until_gone": until_gone} if until_gone else {})
    try:
        rename(directory, target)
    except FileNotFoundError:
        # It vanished since it was examined: nothing is left to keep.
        note.unlink(missing_ok=True)
        return None
    return target


def _note(target: Path, name: str, reasons: Sequence[str], more: dict[str, str]) -> Path:
    record = {
        "name": name,
        "set_aside_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "reasons": list(reasons),
    } | more
    text = msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
    note = target.with_name(f"{target.name}{_RECORD}")
    # First, and durable: a crash before the rename leaves a note without an entry, which is harmless.
    write_file(note, text)
    return note


def move_strays(directory: Path, verdict: Verdict) -> Path:
    """Moves what its manifest does not name out of a checkpoint (`Verdict.has_strays`), which verifies afterwards.

    Returns the place in `quarantine/` beside it. Names are renamed as they are: nothing is opened, no link is followed.
    OSError: one could not be moved.
    """
    files, folders = named_paths(verdict.manifest)
    named = files | folders
    quarantine = private_dir(directory.parent / "quarantine", inside=directory.parent)
    target = quarantine / f"{_STRAYS}{directory.name}.{secrets.token_hex(4)}"
    _note(target, directory.name, [str(problem) for problem in verdict.problems], {})
    with open_directory(directory) as root:
        for folder in ("", *sorted(folders)):
            prefix = f"{folder}/" if folder else ""
            with open_below(root, folder or ".") as source:
                # Listed anew: the verdict holds some thousand names, and more may have come.
                names = {name for name in os.listdir(source) if prefix + name not in named}
                place = private_dir(target / folder, inside=quarantine) if names or not folder else target
                for name in names:
                    # Not durable: what a power cut brings back is moved again.
                    with suppress(FileNotFoundError):  # its owner has removed it
                        os.rename(name, place / name, src_dir_fd=source)  # noqa: TID251 - by descriptor
    return target


def is_set_aside(path: Path) -> bool:
    """Returns whether one of the two above can have put it there: a name that it makes, and the record beside it."""
    name, _, nonce = path.name.removeprefix(_STRAYS).rpartition(".")
    # `prune` removes by this: a directory that a user put here by hand has no record and stays.
    ours = checkpoint_order(name) is not None and re.fullmatch(r"[0-9a-f]{8}", nonce) is not None
    return ours and path.with_name(path.name + _RECORD).is_file()


def put_back(aside: Path, directory: Path) -> bool:
    """Renames what was set aside to its old name, durably; returns False if the name is taken, or `aside` is gone."""
    # The name is taken: a save has succeeded meanwhile, and what it has is newer.
    if os.path.lexists(directory):
        return False
    try:
        # Both parents are synced below, in this order: the entry under its own name first.
        rename(aside, directory, durable=False)
    except OSError:  # the save has failed with its own error; the next start tries again
        return False
    fsync_path(directory.parent)
    fsync_path(aside.parent)
    # Last: until the move is durable the note says what to do with the entry.
    aside.with_name(aside.name + _RECORD).unlink(missing_ok=True)
    return True


def put_back_unfinished(checkpoints: Path) -> list[Path]:
    """Puts back what was set aside for a save that died before it took the place; returns the restored names."""
    done = []
    for note in sorted((checkpoints / "quarantine").glob(f"*{_RECORD}")):
        try:
            # Notes may come from a run that was handed over, so they are bounded and typed.
            record = decode_json(read_regular(note, RECORD), _Record, RECORD, doubles=False)
        except (OSError, *UNREADABLE):
            continue  # not made by us
        # Both names are joined to paths below: they must be names that this package makes, without `/` or `..`.
        plain = checkpoint_order(record.name) is not None and STAGING_NAME.fullmatch(record.until_gone)
        if len(record.until_gone) > _MAX_NAME:
            continue  # no file system has such a name, and looking it up is an error
        aside = note.with_name(note.name.removesuffix(_RECORD))
        # The staging directory still exists, so the save that wanted the name never got it.
        unfinished = plain and (checkpoints / record.until_gone).is_dir() and aside.is_dir()
        if unfinished and put_back(aside, checkpoints / record.name):
            done.append(checkpoints / record.name)
    return done


class _Record(msgspec.Struct, frozen=True):
    """The used part of a reason's record."""

    name: str
    until_gone: str = ""


def set_aside_copies(paths: RunPaths, name: str, manifest: bytes) -> list[Path]:
    """Lists the copies of checkpoint `name` in the run's quarantine that have exactly this manifest."""
    found = []
    for path in sorted(paths.quarantine.glob(f"{name}.*")):
        try:
            with open_directory(path) as root, open_below(root, MANIFEST) as fd:
                info = os.fstat(fd)
                # Byte for byte: the same name with another manifest is another save, whose files must not be mixed in.
                if info.st_size == len(manifest) and os.pread(fd, info.st_size + 1, 0) == manifest:
                    found.append(path)
        except OSError:
            continue  # a reason's record, or a copy that cannot be read
    return found


def fill(directory: Path, wanted: Iterable[FileEntry], copies: Sequence[Path]) -> list[str]:
    """Replaces files of `directory` by those of `copies`, durably; returns the paths that were replaced."""
    places = [DirectoryPlace(copy, "the quarantine") for copy in copies]
    target, filled = DirectoryPlace(directory, "the run"), []
    for entry in wanted:
        for place in places:
            # A copy in quarantine may be damaged in any way, or not be readable: then the next one may have the file.
            # Every byte is checked on its way, and read back.
            # After a crash a name that no manifest has may stay: the directory does not verify then, and is swept.
            with suppress(CheckpointCorrupt, TierError):
                copy_file([(place, entry.path)], (target, entry.path), entry)
                filled.append(entry.path)
                break
    with suppress(TierError):
        target.forget("")  # half a file of a copy that broke off
    return filled
