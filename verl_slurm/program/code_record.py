"""Specifies what a run keeps of the user's code, and reads it.

```
RUN/code.json            what the attempts run: a `CodeRecord`; replaced by `submit` alone
RUN/code/<digest>/       a copy of a tree: directories 0700, files 0400, programs 0500
RUN/code/<digest>.json   its files: a `Fingerprint` of this digest (`dataset/fingerprint/entries.py`)
RUN/code/<sha256>.diff   the difference from the commit, 0600
```

So a list of files proves itself by its digest, and a copy by its list.

A copy may get further files: the program's working directory can lie in it. They are no part of it.
"""

import os
from pathlib import Path
from typing import Annotated

import msgspec

from verl_slurm.base import bounded
from verl_slurm.base.errors import DataError
from verl_slurm.base.files import require_own
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.tree import names_in
from verl_slurm.dataset.fingerprint.entries import FileDigest, recorded_tree
from verl_slurm.journal.events import Notice
from verl_slurm.journal.files import read_events

FORMAT = 1
TOPIC, COPIED = "code", "copied into the run from "
"""Of the journal's notice that a tree was copied: its topic, and how its text begins."""
# They become names of directories.
_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
_DigestOrNone = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]


class CodeTree(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One copied tree, and where it is from."""

    root: str
    """Where it lay: absolute, without links."""
    digest: _Digest
    num_files: int
    num_bytes: int
    commit: str = ""
    """Of git; empty: no work tree, or one without a commit."""
    branch: str = ""
    dirty: bool = False
    """The tree differs from the commit, or has untracked files."""
    diff: _DigestOrNone = ""
    """SHA-256 of the diff, by which the file is named; empty: there is none."""


class CodeRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the attempts of a run run."""

    format: int = FORMAT
    submitted_utc: str = ""
    trees: tuple[CodeTree, ...] = ()
    programs: dict[str, str] = {}
    """The programs of the configuration: path there → path relative to RUN/code."""
    directory: str = ""
    """Where the program was first submitted to work: absolute, without links. Empty: an older record does not say."""
    search: tuple[str, ...] = ()
    """Directories of these trees in which the ranks' Python looks for modules by itself (an editable install)."""
    python: str = ""
    """Version of the ranks' Python; empty: it could not be asked, as in a container."""
    packages: dict[str, str] = {}
    """What is installed in it: name → version."""

    def lines(self) -> list[str]:
        """Describes each tree in a line: `/me/repo, commit 1a2b3c4d5e6f (changed since), 12 files, 85 KB`."""
        found = []
        for tree in self.trees:
            commit = f", commit {tree.commit[:12]}" if tree.commit else ""
            changed = " (changed since)" if tree.commit and tree.dirty else ""
            size = (
                f"{tree.num_bytes / 1e6:.1f} MB"
                if tree.num_bytes >= 1e6
                else f"{-(-tree.num_bytes // 1000)} KB"
            )
            found.append(f"{tree.root}{commit}{changed}, {counted(tree.num_files, 'file')}, {size}")
        return found


def package_drift(old: CodeRecord, new: CodeRecord) -> list[str]:
    """Lists the packages that differ, e.g. `torch 2.13.0 -> 2.14.0`; empty if one of the two is unknown."""
    if not old.python or not new.python:
        return []
    before, now = ({"Python": record.python, **record.packages} for record in (old, new))
    return [
        f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def read_record(paths: RunPaths, *, to_look: bool = False) -> CodeRecord | None:
    """Returns the record; None: the run has none, because it was not submitted (`sbatch` by hand).

    Where it is gone, what a submission copied tells so: RUN/code, and the journal, which is read for that.

    Args:
        to_look: nothing will be run by it; so the run may be another user's.

    Raises:
        PermissionRefused: others could have written it.
        DataError: it is gone, cannot be read, or another version wrote it.
        OSError: storage does not answer.
    """
    try:
        fd = bounded.open_regular(paths.code_record)
    except FileNotFoundError:
        if not _was_copied(paths):
            return None
        # Without it the ranks would run what lies outside of the run, edited or not.
        raise DataError(
            "the record of the run's code is gone, so its copy cannot be run",
            where=paths.code_record,
            found="no such file, and code was copied into the run",
            remedy=f"bring it back (a backup); or `verl-slurm submit {shell_word(paths.root)} --code new` takes the "
            "code as it is now",
        ) from None
    except bounded.TooMuch as error:
        raise _damaged("the record of the run's code cannot be read", paths.code_record, error) from None
    try:
        if not to_look:
            require_own(os.fstat(fd), paths.code_record, within=paths.root)
        data = bounded.read_fd(fd, bounded.RECORD)
        record = bounded.decode_json(data, CodeRecord, bounded.RECORD)
    except (ValueError, RecursionError) as error:
        raise _damaged("the record of the run's code cannot be read", paths.code_record, error) from None
    finally:
        os.close(fd)
    if record.format != FORMAT:
        raise _damaged("the record of the run's code is of another version", paths.code_record, record.format)
    digests = {tree.digest for tree in record.trees}
    for place in record.programs.values():
        first, *rest = place.split("/")
        if first not in digests or ".." in rest:
            raise _damaged(
                "the record of the run's code names a program that is not in it", paths.code_record, place
            )
    return record


def files_of(paths: RunPaths, digest: str) -> dict[str, FileDigest]:
    """Returns the files of a copy by relative path. Raises DataError if their list is gone or was changed."""
    found = recorded_tree(paths.code, digest)
    if found is None:
        path = paths.code_files(digest)
        what = "changed" if os.path.lexists(path) else "gone"
        raise _damaged("the list of the run's code is gone, or was changed", path, what)
    return found.files


def _was_copied(paths: RunPaths) -> bool:
    """Returns whether a submission copied code into the run."""
    if names_in(paths.run, paths.code):
        return True
    # RUN/code may be gone, too. A rank's notice of that topic has other words.
    return any(
        isinstance(event, Notice) and event.topic == TOPIC and event.text.startswith(COPIED)
        for event in read_events(paths)
    )


def _damaged(what: str, where: Path, found: object) -> DataError:
    return DataError(
        what, where=where, found=found, remedy="verl-slurm submit RUN --code new copies the code again"
    )
