"""Lists, chooses and opens the data files of a root, and checks their digests.

A rank trains on the files of the fingerprint and on their bytes: a file is read into memory once, hashed there, and
parsed from there.
"""

import hashlib
import io
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from verl_slurm.base.bounded import Limit, TooMuch, open_regular, read_regular
from verl_slurm.base.errors import DataError, DatasetDrift
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.base.tree import Entry, list_tree, open_directory
from verl_slurm.config.schema import DataConfig
from verl_slurm.dataset.prompts.choice import choose, is_entered
from verl_slurm.dataset.prompts.rows import Prompt, prompts_of

Content = tuple[int, str]
"""Bytes and SHA-256 of a file as it was fingerprinted."""

_SMALL_BYTES = 1 << 20


def data_files(root: Path, config: DataConfig, *, key: str = "data.root") -> list[str]:
    """Lists the data files below `root`, relative, in reading order. Raises DataError, as `choice.choose`."""
    remedy = f"set {key} to a directory with prompts"
    if not root.is_dir():
        found = "a file" if root.exists() else "nothing"
        if root.is_file():
            files_key = key.replace("root", "files")
            words = f"{shell_word(f'{key}={root.parent}')} and {shell_word(f'{files_key}={root.name}')}"
            remedy += f"; one file of a directory: {words}"
        raise DataError("no such data directory", where=root, found=found, remedy=remedy)
    pattern = _pattern(config, key)
    try:
        # All names, before any choice: the message for a wrong directory says what is there.
        names = names_below(root, pattern)
    except OSError as error:
        where = root / os.fsdecode(error.filename or "")
        raise DataError(
            "the data cannot be read",
            where=where,
            found=error.strerror,
            remedy="chmod u+rx, or name the files: data.files",
        ) from error
    return choose(names, pattern, lambda name: _small(root / name), root=root, key=key)


def prompts_below(
    root: Path, config: DataConfig, recorded: Mapping[str, Content] | None = None, *, key: str = "data.root"
) -> Iterator[tuple[str, Prompt, str]]:
    """Yields (place, prompt, answer) of every row below `root`.

    Args:
        recorded: path below the root → content, of every file that the fingerprint has: these files alone are read, and
            with that content alone. None: the present files.
        key: `data.root`, to whose rows `data.limit` applies, or `data.eval_root`.

    Raises:
        DatasetDrift: a file is not what was recorded.
        DataError: no rows, or a bad one.
    """

    def read(name: str) -> bytes:
        return _read(root / name, None if recorded is None else recorded.get(name, (0, "")))

    if recorded is None:
        names = data_files(root, config, key=key)
    else:
        # From the fingerprint's names, not from the directory: a file that came later is no part of the run.
        names = choose(list(recorded), _pattern(config, key), read, root=root, key=key)
    # What is held out stays whole: it decides which prompts never train.
    limit = config.limit if key == "data.root" else None
    rows = 0
    for name in names:
        # Before the next file is opened: it may be large.
        if rows == limit:
            break
        # From memory: the bytes that were hashed are the bytes that are parsed.
        for place in prompts_of(io.BytesIO(read(name)), root / name, config):
            rows += 1
            yield place
            # Before the next row is read: rows behind the limit never train, so nothing is asked of them.
            if rows == limit:
                break
    if not rows:
        raise no_rows(root, len(names), key)


def no_rows(root: Path, num_files: int, key: str) -> DataError:
    """Builds the error for a directory whose files are all empty."""
    return DataError(
        "the data root holds no prompts",
        where=root,
        found=f"{counted(num_files, 'file')} without a row",
        expected="at least one row",
        remedy=f"set {key}",
    )


def refuse_empty_side(root: Path, config: DataConfig, train: int, held_out: int) -> None:
    """Raises DataError if no prompt is left to train on, or none is held out."""
    if train and held_out:
        return
    remedy = "set data.eval_fraction or data.eval_root"
    if config.eval_root is not None:
        remedy = "set data.eval_files or data.eval_root to prompts that need not train"
    raise DataError(
        "the split leaves one side empty",
        where=root,
        found=f"{counted(train, 'prompt')} to train on, {held_out} held out",
        expected="at least one on both sides",
        remedy=remedy,
    )


def _pattern(config: DataConfig, key: str) -> str | None:
    return config.files if key == "data.root" else config.eval_files


def names_below(root: Path, pattern: str | None = None) -> list[str]:
    """Returns the files below `root`, sorted; follows links as the fingerprint does. Folders in which `pattern` takes
    nothing are not entered.
    """

    def keep(entry: Entry) -> bool:
        return entry.kind != "directory" or is_entered(entry.path, pattern)

    with open_directory(root, follow=True) as fd:
        found = list_tree(fd, follow=True, numbers=False, keep=keep)
    return [entry.path for entry in found if entry.kind != "directory"]


def _small(path: Path) -> bytes:
    try:
        with os.fdopen(open_regular(path, follow=True), "rb") as file:
            # Bounded: its name is all that is known of it.
            return file.read(_SMALL_BYTES)
    except (OSError, TooMuch) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError | TooMuch) -> DataError:
    found = error.strerror if isinstance(error, OSError) else error
    return DataError(
        "a data file cannot be read", where=path, found=found, remedy=f"chmod u+r {shell_word(path)}"
    )


def _read(path: Path, recorded: Content | None) -> bytes:
    size, digest = (sys.maxsize, "") if recorded is None else recorded
    try:
        # With the recorded size as the limit: a file that replaced it may be larger than any memory.
        data = read_regular(path, Limit(num_bytes=size), follow=True)
    except OSError as error:
        raise _unreadable(path, error) from error
    except TooMuch as error:
        if recorded is None:
            raise _unreadable(path, error) from None
        found = str(error)
    else:
        # Hashed here, on every rank: a node may see another state of the storage than rank 0 did.
        if recorded is None or (there := hashlib.sha256(data).hexdigest()) == digest:
            return data
        found = f"SHA-256 {there[:16]}"
    raise DatasetDrift(
        "a data file is not the one that was fingerprinted",
        where=path,
        found=found,
        expected=f"{size} bytes, SHA-256 {digest[:16]}" if digest else "a file of the fingerprint",
        remedy="restore the data, and see who else may write there",
    )
