"""Takes the data set's fingerprint, records it for a run, and compares it with the present tree.

`entries` defines it. A look is full (every byte is read) or cached (a file with the same path, inode, size,
mtime and ctime is assumed to hash as before; `cache` lists what that cannot see). The choice:

* A fingerprint that is recorded in RUN/.dataset_fingerprint was read in full just before: the first submission, a
  change that is accepted (`--force-resume`), a first start without a submission.
* A fingerprint that is only compared with the record is cached: a later submission and its dry run, the daemon before
  each start (nodes are waiting), `verl-slurm fingerprint` without `--full`.
"""

import errno
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from verl_slurm.base import bounded
from verl_slurm.base.errors import CheckpointCorrupt, DataError, DatasetDrift
from verl_slurm.base.files import write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.tree import DEEPEST, Entry, list_tree, open_directory
from verl_slurm.dataset.fingerprint import cache as hash_cache
from verl_slurm.dataset.fingerprint.entries import (
    Drift as Drift,
    FileDigest as FileDigest,
    Fingerprint as Fingerprint,
    Kind,
    drift as drift,
    parse,
    recorded_tree,
    render,
    sealed,
)
from verl_slurm.dataset.fingerprint.file_hashing import Hashed, ListedFile, hash_files, stamp_of
from verl_slurm.dataset.prompts.choice import data_names, is_never_data, matches, reaches


@dataclass(frozen=True)
class GlobPlace:
    """The files below `root` that `pattern` takes, as `data.files` has it."""

    root: Path
    pattern: str


DataPlace = Path | str | GlobPlace | tuple[str, ...]
"""Where a data set is: a directory; some files of it; or, as verl names them, files and directories, each by its
absolute path."""

_NO_STAMP = (0, 0, 0, 0)
# A tree that changes this often while it is read is being written to.
_ATTEMPTS = 3
_MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Result of a look at a tree, and how it was taken."""

    found: Fingerprint
    unnoticed: tuple[str, ...]
    """Full looks: files whose content differs from the cache's, although their stamp is the same."""
    notices: tuple[str, ...]
    place: DataPlace
    root: Path
    files: dict[str, ListedFile]
    hashed: dict[str, Hashed]
    """Of each file, and maybe of more."""
    read_now: set[str]
    """Files whose content was read now; the others come from the cache."""
    began_ns: int
    known: bool
    """The cache says all of it already."""

    @property
    def num_read(self) -> int:
        return len(self.read_now)

    def drift_from(self, recorded: Fingerprint) -> Drift:
        """Returns the differences from what was recorded of this place."""
        return drift(narrowed(recorded, self.place), self.found)


def data_place(root: Path | str, pattern: str | None) -> DataPlace:
    """Returns the place of data whose files a glob may choose: `data.root` and `data.files`, or those held out."""
    return Path(root) if pattern is None else GlobPlace(Path(root), pattern)


def fingerprint(root: DataPlace) -> Fingerprint:
    """Reads and hashes the whole tree below `root`, but for what is never data (`choice.data_names`).

    Raises:
        DataError: it is missing, no directory, without a file, unreadable, holds a broken link, a loop of links, a
            device, socket or pipe, a name that is not UTF-8, or keeps changing while it is read.
    """
    return survey(root).found


def survey(
    place: DataPlace,
    *,
    cache: Path | None = None,
    full: bool = False,
    clock_ns: Callable[[], int] = time.time_ns,
) -> Survey:
    """Looks at a tree, or at the files that `place` names. Writes nothing: `remember` does.

    Args:
        cache: of an earlier look; None: every file is read.
        full: read every file nevertheless, and report where the cache was wrong.

    Raises:
        DataError: as `fingerprint`.
        OSError: a file that `place` names is not there, or storage does not answer.
    """
    # Before anything is read: a file is old enough for the cache if it was old at this moment.
    began_ns = clock_ns()
    old, notice = hash_cache.load(cache) if cache else ({}, None)
    root = root_of(place)
    # A full look starts with no hashes: what the cache says is then compared with what was read.
    known = {} if full else dict(old)
    read_now: set[str] = set()
    # Hash, then walk again: only a tree that looks the same before and after was read as one state.
    for _ in range(_ATTEMPTS + 1):
        # Without hashes to compare with, the first walk needs the names alone.
        files, folders, left_out = _listed(place, numbers=bool(known))
        devices = hash_cache.devices_with_ctime(root, files) if old and not full else frozenset()
        # By stamp: a file that was written meanwhile has another one, and is read again.
        unknown = [
            path
            for path, file in files.items()
            if (one := known.get(path)) is None
            or one.stamp != file.stamp
            or not (path in read_now or file.device in devices)
        ]
        if not unknown:
            break
        try:
            hashed = hash_files(root, unknown)
        except OSError as error:
            where = error.filename
            raise _data_error(
                "a data file cannot be read", where, error.strerror, "a readable file"
            ) from error
        known |= hashed
        read_now |= hashed.keys()
    else:
        raise _data_error(
            "the data set changes while it is read", place_of(place), "files come and go", "files at rest"
        )
    # Their stamps agree, so a change went past the file system, or the cache was forged.
    wrong = [
        path
        for path, one in (old.items() if full else ())
        if path in files and one.stamp == known[path].stamp and one.sha256 != known[path].sha256
    ]
    return Survey(
        found=_assembled(place, files, folders, known),
        unnoticed=tuple(sorted(wrong)),
        notices=tuple(filter(None, (notice, _said(place, left_out)))),
        place=place,
        root=root,
        files=files,
        hashed=known,
        read_now=read_now,
        began_ns=began_ns,
        known=not read_now and len(files) == len(old),
    )


def remember(path: Path, seen: Survey) -> str | None:
    """Stores the result `seen` as the hash cache `path`; returns a failure in one line."""
    if seen.known:
        return None
    kept = hash_cache.settled(seen.root, seen.files, seen.hashed, seen.read_now, seen.began_ns)
    return hash_cache.save(path, kept)


def read(paths: RunPaths) -> Fingerprint | None:
    """Returns the fingerprint that the run started with; None: none is recorded. Raises CheckpointCorrupt."""
    try:
        return parse(bounded.read_regular(paths.fingerprint, bounded.FINGERPRINT), bounded.FINGERPRINT)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupt(
            "the recorded data set fingerprint cannot be read",
            where=paths.fingerprint,
            found=error,
            remedy="remove it and start again, if you know that the data did not change",
        ) from error


def write(paths: RunPaths, found: Fingerprint) -> None:
    """Records the fingerprint that the run starts with, durably."""
    write_file(paths.fingerprint, render(found))


def look(
    paths: RunPaths, place: DataPlace, recorded: Fingerprint | None, *, may_record: bool = False
) -> Survey:
    """Looks at the data of a run, in full if the result may be recorded. Writes nothing. Errors as `survey`.

    Args:
        recorded: the fingerprint to compare with; None: the result will be recorded.
        may_record: a difference may be accepted, and recorded then.
    """
    # What will be recorded is read in full: the record decides about all later starts.
    if recorded is None:
        return survey(place)
    seen = survey(place, cache=paths.hash_cache)
    # The cached look has shown a change. What is accepted instead is read in full before it is recorded.
    if may_record and seen.drift_from(recorded):
        return survey(place)
    return seen


def check_dataset(
    paths: RunPaths,
    place: DataPlace,
    *,
    trained_on: str = "",
    notice: Callable[[str], None] = lambda text: None,
) -> Fingerprint:
    """Compares the data at `place` with what the run started with; records it if there is no record yet. Runs at every
    start.

    Args:
        trained_on: the digest in the newest checkpoint, for a run that has lost its record; empty: not known.
        notice: called for a hash cache that cannot be read or stored, and for files that are never data.

    Returns the record.

    Raises:
        DatasetDrift: the data differs; `found` names the differing files. Its cause is a FileNotFoundError where files
            are missing, and nothing else differs.
        DataError: it cannot be hashed. Its cause is the OSError of a file or folder that does not answer.
    """
    recorded = read(paths)
    seen = look(paths, place, recorded)
    # Before the refusal: the next look at this tree is spared the reading, whatever it is compared with.
    for text in (*seen.notices, remember(paths.hash_cache, seen)):
        if text:
            notice(text)
    if recorded is None:
        require_trained_on(seen.found, trained_on, place)
        write(paths, seen.found)
    elif difference := seen.drift_from(recorded):
        raise DatasetDrift(
            "the data set is not the one the run started with",
            where=place_of(place),
            found=difference.one_line(),
            expected=f"the files of {paths.fingerprint}",
            remedy="restore the data, or accept the change with verl-slurm submit --force-resume",
        ) from _missing_alone(difference, seen)
    # The record, which may have names that are left out today: manifests bear its digest.
    return recorded or seen.found


def _missing_alone(difference: Drift, seen: Survey) -> FileNotFoundError | None:
    """Returns the error of the missing files; None: something is changed or new as well."""
    # A mount point without its file system is an empty directory, and those count.
    new = any(seen.found.files[path].kind != "directory" for path in difference.added)
    if new or difference.changed or not difference.removed:
        return None
    words = f"files that were there when the run started are missing: {difference.one_line()}"
    what = f"{words}; restore them, or accept the change with verl-slurm submit --force-resume"
    return FileNotFoundError(errno.ENOENT, what, str(seen.root / difference.removed[0]))


def require_trained_on(found: Fingerprint, trained_on: str, place: DataPlace) -> None:
    """Raises DatasetDrift for data of another digest than `trained_on`, a checkpoint's (empty: not known)."""
    # The record, which would name the files, is gone.
    if trained_on and found.digest != trained_on:
        raise DatasetDrift(
            "the data set is not the one that the newest checkpoint has been trained on",
            where=place_of(place),
            found=f"digest {found.digest[:16]}; RUN/.dataset_fingerprint, which names the files, is gone",
            expected=f"digest {trained_on[:16]}",
            remedy="restore the data and that file, or accept the change with verl-slurm submit --force-resume",
        )


def place_of(place: DataPlace) -> str:
    """Returns the words for where a data set is."""
    if isinstance(place, GlobPlace):
        return str(place.root / place.pattern)
    return ", ".join(place) if isinstance(place, tuple) else str(place)


def root_of(place: DataPlace) -> Path:
    """Returns the directory that the paths of its fingerprint are relative to."""
    if isinstance(place, GlobPlace):
        return place.root
    return Path("/" if isinstance(place, tuple) else place)


def narrowed(recorded: Fingerprint, place: DataPlace) -> Fingerprint:
    """Returns a record without the names that a look at `place` leaves out: it may be older than this rule, or than
    the glob's.
    """
    kept = set[str]()
    for _, prefix, pattern in _parts(place):
        inside = {
            name.removeprefix(prefix): one for name, one in recorded.files.items() if name.startswith(prefix)
        }
        empty = {name for name, one in inside.items() if one.kind == "directory"}
        kept |= {prefix + name for name in data_names(inside.keys() - empty, pattern)}
        kept |= {prefix + name for name in empty if pattern is None and not is_never_data(name)}
        kept.add(prefix[:-1])  # verl's file itself
    files = {name: entry for name, entry in recorded.files.items() if name in kept}
    return recorded if len(files) == len(recorded.files) else sealed(files)


def is_recorded(folder: Path, digest: str, found: str, place: DataPlace) -> bool:
    """Returns whether `found` is the recorded digest of a tree, or that of its record in `folder`, narrowed to `place`.
    Raises OSError if storage does not answer.
    """
    if found == digest:
        return True
    record = recorded_tree(folder, digest)
    return record is not None and narrowed(record, place).digest == found


class _Part(NamedTuple):
    folder: Path | str
    """A file, where verl names one."""
    prefix: str
    """Of its names in the fingerprint."""
    pattern: str | None


def _parts(place: DataPlace) -> list[_Part]:
    if isinstance(place, GlobPlace):
        return [_Part(place.root, "", place.pattern)]
    if isinstance(place, tuple):
        return [_Part(one, one.lstrip("/") + "/", None) for one in place]
    return [_Part(place, "", None)]


def _listed(place: DataPlace, *, numbers: bool) -> tuple[dict[str, ListedFile], list[str], list[str]]:
    """Returns the files by path, the paths of directories, and what is never data. Raises as `survey`."""
    listing = _Listing(place, numbers)
    if isinstance(place, tuple):
        for part in _parts(place):
            info = os.stat(part.folder)
            if stat.S_ISDIR(info.st_mode):
                listing.walk(part)
            else:
                listing.add(part.prefix[:-1], Entry("", info, os.path.islink(part.folder)))
        # Of directories that verl names, the files alone are data: pandas reads them as one table.
        return listing.files, [], listing.left_out
    try:
        listing.walk(*_parts(place))
    except OSError as error:
        where = root_of(place) / os.fsdecode(error.filename or "")
        error.filename = str(where)
        raise _data_error(
            "the data set cannot be read", where, error.strerror, "a directory of files"
        ) from error
    return listing.files, [] if isinstance(place, GlobPlace) else listing.folders, listing.left_out


class _Listing:
    def __init__(self, place: DataPlace, numbers: bool) -> None:
        self._place, self._numbers = place, numbers
        self.files: dict[str, ListedFile] = {}
        self.folders: list[str] = []
        self.left_out: list[str] = []

    def walk(self, part: _Part) -> None:
        """Takes what may be data. OSError: the directory, or one below, cannot be read."""
        prefix, pattern, names = part.prefix, part.pattern, list[str]()

        def keep(entry: Entry) -> bool:
            name, is_folder = entry.path, stat.S_ISDIR(entry.info.st_mode)
            if not is_folder:
                names.append(name)
            # What the glob does not take may be anything, and change: logs, an environment, the run itself.
            if pattern is not None and not (reaches if is_folder else matches)(pattern, name):
                return False
            # Before its kind is asked: the lock of an editor may be a broken link.
            if is_never_data(name):
                self.left_out.append(prefix + name)
                return False
            return self.add(prefix + name, entry)

        # The way to it may have links, and it may be one.
        with open_directory(part.folder, follow=True) as fd:
            list_tree(fd, follow=True, numbers=self._numbers, keep=keep)
        # Now that it is known which directories `datasets` saved.
        kept = set(data_names(names))
        for name in names:
            if name not in kept and self.files.pop(prefix + name, None) is not None:
                self.left_out.append(prefix + name)

    def add(self, path: str, entry: Entry) -> bool:
        """Takes one entry; returns whether it is a directory."""
        info = entry.info
        if not path.isascii():
            try:
                path.encode()
            except UnicodeEncodeError:
                raise _data_error(
                    "a data file's name is no UTF-8", ascii(path), None, "a UTF-8 name"
                ) from None
        if stat.S_ISREG(info.st_mode):
            stamp = stamp_of(info) if self._numbers else _NO_STAMP
            self.files[path] = ListedFile(stamp, info.st_dev, entry.followed)
            return False
        if stat.S_ISDIR(info.st_mode) and not entry.is_too_deep:
            self.folders.append(path)
            return True
        # Broken links, pipes, devices, and what lies too deep: training may fail on it, and nothing here can hash it.
        found = "a broken link" if entry.kind == "link" else f"a {entry.kind}, mode {info.st_mode:o}"
        expected = f"files and links to files, in at most {DEEPEST} folders"
        # What a link leads to may lie on a file system that is away.
        where = str(root_of(self._place) / path)
        absent = FileNotFoundError(errno.ENOENT, found, where) if entry.kind == "link" else None
        raise _data_error(
            "the data set cannot be read", place_of(self._place), f"{path}: {found}", expected
        ) from absent


def _said(place: DataPlace, left_out: list[str]) -> str:
    if not left_out:
        return ""
    more = f" and {len(left_out) - _MOST_NAMED} more" if len(left_out) > _MOST_NAMED else ""
    names = ", ".join(sorted(left_out)[:_MOST_NAMED])
    return f"{place_of(place)}: left out of the fingerprint, as no trainer reads them: {names}{more}"


def _assembled(
    place: DataPlace, files: dict[str, ListedFile], folders: list[str], known: dict[str, Hashed]
) -> Fingerprint:
    if not files:
        where = place_of(place)
        what = "no such file" if isinstance(place, GlobPlace) else "no file below it"
        # A part of the directory may be a mount point without its file system.
        absent = FileNotFoundError(errno.ENOENT, what, where)
        raise _data_error("the data set is empty", where, what, "at least one file") from absent
    found = {}
    for path, file in files.items():
        kind: Kind = "link" if file.is_link else "file"
        hashed = known[path]
        found[path] = FileDigest(size=hashed.size, sha256=hashed.sha256, kind=kind)
    # Directories count if nothing else shows that they are there.
    parents = {path.rpartition("/")[0] for path in (*folders, *files)}
    empty = FileDigest(size=0, sha256="", kind="directory")
    return sealed(found | {path: empty for path in folders if path not in parents})


def _data_error(what: str, where: object, found: object, expected: str) -> DataError:
    """Builds the error of a data set, with its one remedy."""
    return DataError(
        what, where=where, found=found, expected=expected, remedy="set data.root to a directory of data files"
    )
