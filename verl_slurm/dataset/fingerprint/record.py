"""Takes the data set's fingerprint, records it for a run, and compares it with the present tree.

`entries` defines it. A look is full (every byte is read) or cached (a file with the same path, device, inode, size,
mtime and ctime is assumed to hash as before; `cache` lists what that cannot see). The choice:

* A fingerprint that is recorded in RUN/.dataset_fingerprint was read in full just before: the first submission, a
  change that is accepted (`--force-resume`), a first start without a submission.
* A fingerprint that is only compared with the record is cached: a later submission and its dry run, the daemon before
  each start (nodes are waiting), `verl-slurm fingerprint` without `--full`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from verl_slurm.base import bounded
from verl_slurm.base.errors import CheckpointCorrupt, DatasetDrift
from verl_slurm.base.files import write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.dataset.fingerprint import cache as hash_cache
from verl_slurm.dataset.fingerprint.entries import (
    FORMAT,
    Drift as Drift,
    FileDigest as FileDigest,
    Fingerprint as Fingerprint,
    Kind,
    drift as drift,
    sealed,
    tree_digest,
)
from verl_slurm.dataset.fingerprint.hashing import Digests, hash_files
from verl_slurm.dataset.fingerprint.walk import (
    data_error,
    glance,
    lines_of,
    lines_of_files,
    parse_line,
    place_of as place_of,
    walk,
)

T = TypeVar("T")

# A tree that changes this often while it is read is being written to.
_ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Result of a look at a tree, and how it was taken."""

    root: Path
    found: Fingerprint
    num_read: int
    """Files whose content was read now; the others come from the cache."""
    unnoticed: tuple[str, ...] = ()
    """Full looks: files whose content differs from the cache's, although their stamp is the same."""
    notices: tuple[str, ...] = ()
    lines: tuple[str, ...] | None = None
    """None: the cache needs no change."""
    trusted: frozenset[str] = frozenset()
    began_ns: int = 0


def fingerprint(root: Path | str) -> Fingerprint:
    """Reads and hashes the whole tree below `root`.

    Raises:
        DataError: it is missing, no directory, without a file, unreadable, holds a broken link, a loop of links, a
            device, socket or pipe, a name that is not UTF-8, or keeps changing while it is read.
    """
    return survey(root).found


def survey(
    root: Path | str | tuple[str, ...],
    *,
    cache: Path | None = None,
    full: bool = False,
    clock_ns: Callable[[], int] = time.time_ns,
) -> Survey:
    """Looks at the tree below `root`, or at the files that it names. Writes nothing: `remember` does.

    Args:
        cache: of an earlier look; None: every file is read.
        full: read every file nevertheless, and report where the cache was wrong.
        clock_ns: the wall clock, ns since 1970.

    Raises:
        DataError: as `fingerprint`.
        OSError: a file that `root` names is not there, or storage does not answer.
    """
    # Before anything is read: a file is old enough for the cache if it was old at this moment.
    began_ns = clock_ns()
    # The cache is read and parsed while find walks.
    seen, (old, notice) = _list(root, lambda: hash_cache.load(cache) if cache else (None, None))
    root_dir, lines = Path("/" if isinstance(root, tuple) else root), None
    # An unchanged tree is known by comparing two byte strings, without a set of its lines.
    if not full and old is not None and old.whole and seen is not None:
        if seen == old.text:
            return Survey(root=root_dir, found=old.fingerprint, num_read=0)
        lines = lines_of(root_dir, seen)  # with links, or in another order
        if lines is not None and set(lines) == set(old.lines()):
            return Survey(root=root_dir, found=old.fingerprint, num_read=0)
    cached = old.known() if old is not None else {}
    # find is faster; `walk` decides where find is missing, failed, or met something out of the ordinary.
    lines = lines or _lines(root, seen)
    # A full look starts with no hashes: what the cache says is then compared with what was read.
    found, lines, num_read, known = _read_tree(root, lines, {} if full else dict(cached))
    wrong = [line for line in lines if full and line in cached and known[line] != cached[line]]
    return Survey(
        root=root_dir,
        found=found,
        num_read=num_read,
        unnoticed=tuple(sorted(parse_line(line).path for line in wrong)),
        notices=(notice,) if notice else (),
        lines=tuple(lines),
        trusted=frozenset() if full else frozenset(cached),
        began_ns=began_ns,
    )


def remember(path: Path, seen: Survey) -> str | None:
    """Stores the result `seen` as the hash cache `path`; returns a failure in one line."""
    if seen.lines is None:
        return None
    kept = hash_cache.settled(seen.root, seen.found, seen.lines, seen.trusted, began_ns=seen.began_ns)
    return hash_cache.save(path, kept)


def read(paths: RunPaths) -> Fingerprint | None:
    """Returns the fingerprint that the run started with, or None when none is recorded.

    Raises:
        CheckpointCorrupt: the record is not whole.
    """
    try:
        data = bounded.read_regular(paths.fingerprint, bounded.FINGERPRINT)
        found = bounded.decode_json(data, Fingerprint, bounded.FINGERPRINT)
        if found.format != FORMAT:
            raise ValueError(f"format {found.format}, expected {FORMAT}")
        # A record whose digest is not that of its entries stands for no tree.
        if found.digest != tree_digest(found.files):
            raise ValueError("its digest is not that of its entries")
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise CheckpointCorrupt(
            "the recorded data set fingerprint cannot be read",
            where=paths.fingerprint,
            found=error,
            remedy="remove it and start again, if you know that the data did not change",
        ) from error
    return found


def write(paths: RunPaths, found: Fingerprint) -> None:
    """Records the fingerprint that the run starts with, durably.

    Raises:
        OSError: it cannot be written.
    """
    text = msgspec.json.encode(found, order="sorted")
    write_file(paths.fingerprint, msgspec.json.format(text, indent=1) + b"\n")


def look(
    paths: RunPaths,
    root: Path | str | tuple[str, ...],
    recorded: Fingerprint | None,
    *,
    may_record: bool = False,
) -> Survey:
    """Looks at the data of a run, in full if the result may be recorded. Writes nothing.

    Args:
        recorded: the fingerprint to compare with; None: the result will be recorded.
        may_record: a difference may be accepted, and recorded then.

    Raises:
        DataError: as `fingerprint`.
    """
    # What will be recorded is read in full: the record decides about all later starts.
    if recorded is None:
        return survey(root)
    seen = survey(root, cache=paths.hash_cache)
    # The cached look has shown a change. What is accepted instead is read in full before it is recorded.
    if may_record and drift(recorded, seen.found):
        return survey(root)
    return seen


def check_dataset(
    paths: RunPaths,
    root: Path | str | tuple[str, ...],
    *,
    trained_on: str = "",
    notice: Callable[[str], None] = lambda text: None,
) -> Fingerprint:
    """Compares the data at `root` with what the run started with; records it if there is no record yet. Runs at every
    start.

    Args:
        trained_on: the digest in the newest checkpoint, for a run that has lost its record; empty: not known.
        notice: called for a hash cache that cannot be read or stored.

    Raises:
        DatasetDrift: the data differs; `found` names the differing files.
        DataError: it cannot be hashed.
    """
    recorded = read(paths)
    seen = look(paths, root, recorded)
    # Before the refusal: the next look at this tree is spared the reading, whatever it is compared with.
    for text in (*seen.notices, remember(paths.hash_cache, seen)):
        if text:
            notice(text)
    if recorded is None:
        require_trained_on(seen.found, trained_on, root)
        write(paths, seen.found)
    elif difference := drift(recorded, seen.found):
        raise DatasetDrift(
            "the data set is not the one the run started with",
            where=place_of(root),
            found=difference.one_line(),
            expected=f"the files of {paths.fingerprint}",
            remedy="restore the data, or accept the change with verl-slurm submit --force-resume",
        )
    return seen.found


def require_trained_on(found: Fingerprint, trained_on: str, root: Path | str | tuple[str, ...]) -> None:
    """Compares data with the digest that a checkpoint holds, where no record names the files any more.

    Raises:
        DatasetDrift: it is other data.
    """
    if trained_on and found.digest != trained_on:
        raise DatasetDrift(
            "the data set is not the one that the newest checkpoint has been trained on",
            where=place_of(root),
            found=f"digest {found.digest[:16]}; RUN/.dataset_fingerprint, which names the files, is gone",
            expected=f"digest {trained_on[:16]}",
            remedy="restore the data and that file, or accept the change with verl-slurm submit --force-resume",
        )


def _list(root: Path | str | tuple[str, ...], meanwhile: Callable[[], T]) -> tuple[bytes | None, T]:
    if isinstance(root, tuple):
        return hash_cache.text_of(lines_of_files(root)), meanwhile()
    return glance(Path(root), meanwhile)


def _lines(root: Path | str | tuple[str, ...], seen: bytes | None) -> list[str]:
    if isinstance(root, tuple):
        return lines_of_files(root)
    return lines_of(Path(root), seen) or walk(Path(root))


def _read_tree(
    root: Path | str | tuple[str, ...], lines: list[str], known: Digests
) -> tuple[Fingerprint, list[str], int, Digests]:
    """Reads the unknown files, and walks again until a walk shows nothing new.

    Returns:
        The result, its lines, the number of files read, and `known` with these.
    """
    read_now: set[str] = set()
    root_dir = Path("/" if isinstance(root, tuple) else root)
    # Hash, then walk again: only a tree that looks the same before and after was read as one state.
    for _ in range(_ATTEMPTS + 1):
        # By line, so a file that was written meanwhile has another stamp, is unknown, and is read again.
        unknown = [line for line in lines if line not in known and not line.startswith("d ")]
        if not unknown and (found := _assemble(root_dir, lines, known)) is not None:
            return found, lines, len(read_now), known
        hashed = hash_files(root_dir, unknown)
        known.update(hashed)
        read_now.update(hashed)
        before = lines
        # Usually nothing changed meanwhile, so the result is assembled while find runs.
        seen, found = _list(root, partial(_assemble, root_dir, before, known))
        # The walk behind the hashing.
        lines = _lines(root, seen)
        if found is not None and (lines == before or set(lines) == set(before)):
            return found, lines, len(read_now), known
    raise data_error(
        "the data set changes while it is read", place_of(root), "files come and go", "files at rest"
    )


def _assemble(root: Path, lines: list[str], known: Digests) -> Fingerprint | None:
    """Returns None if a line is not known."""
    files = {}
    try:
        for line in lines:
            if not line.startswith("d "):
                letter, _, _, size, _, _, path = line.split(" ", 6)
                kind: Kind = "link" if letter == "l" else "file"
                files[path] = FileDigest(size=int(size), sha256=known[line], kind=kind)
    except KeyError:
        return None
    if not files:
        raise data_error("the data set is empty", root, "no file below it", "at least one file")
    # Directories count if nothing else shows that they are there.
    folders = [line[2:] for line in lines if line.startswith("d ")]
    parents = {path.rpartition("/")[0] for path in (*folders, *files)}
    empty = FileDigest(size=0, sha256="", kind="directory")
    return sealed(files | {path: empty for path in folders if path not in parents})
