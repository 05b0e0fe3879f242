"""Verifies that a directory is, byte for byte, the checkpoint that was committed. Reads every byte; fails closed.

It reports, each with its path: no manifest, one that does not parse or whose digest is wrong, a file that is missing,
extra, or of another size or content, a link or special file, an unnamed directory, a name that is not the manifest's, a
missing required part, in RUN/checkpoints a manifest of another run, and files that others own or may write. A fault is
reported, never repaired. Torch, msgpack and zstd see nothing of a checkpoint before this check has passed.
"""

import errno
import os
import stat
import time
from pathlib import Path

from verl_slurm.base import bounded
from verl_slurm.base.errors import CheckpointCorrupt, KeyRefused, SchemaMismatch
from verl_slurm.base.keys import Keyring
from verl_slurm.base.one_line import printable
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import other_run
from verl_slurm.base.tree import Entry, list_tree, open_below, open_directory
from verl_slurm.checkpoint.format.info import Problem, ProblemKind, Verdict
from verl_slurm.checkpoint.format.manifest import parse
from verl_slurm.checkpoint.format.signature import authenticate
from verl_slurm.checkpoint.format.specification import MANIFEST, Manifest, missing_parts
from verl_slurm.checkpoint.store.chunks import Reading, read_checked

# Names beyond those of the manifest that are held. Each takes about 1 KB of memory, and a line of the verdict.
_MOST_EXTRA = 4096

# These mean that the tree is not what was committed; any other error may be a passing fault of the storage.
# The distinction decides what is moved to quarantine: damage is, a storage that does not answer is not.
_TREE_ERRORS = {errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR}


def verify(
    directory: Path,
    *,
    name: str | None = None,
    keys: Keyring | None = None,
    threads: int | None = None,
    bytes_per_s: float | None = None,
) -> Verdict:
    """Checks one checkpoint directory in full. All of it must belong to us, and no other user may write it.

    Never raises for what it finds, not even for a missing directory.

    Args:
        directory: `.../step_000012`; its last name must not be a link.
        name: the checkpoint's, if the directory (still) has another one.
        keys: if given, the manifest must be signed with one of them.
        bytes_per_s: read no faster, with one thread; None: no limit.
    """
    started = time.monotonic()
    name = name or directory.name
    problems: list[Problem] = []
    manifest: Manifest | None = None
    num_bytes = 0
    try:
        with open_directory(directory) as root:
            parsed = _manifest(root, problems)
            manifest = _authentic(parsed, keys, problems)
            # By the manifest as it is: one signed with another key may be good, with all its files.
            entries, strays, num_strays = _listed(root, parsed)
            # The directory itself counts: who can write it can exchange every file in it.
            here = Entry(path=".", info=os.fstat(root))
            problems.extend(_untrusted([here, *entries]))
            # Without a manifest that proves something there is nothing to hold the files against.
            if manifest is not None:
                # A checkpoint that was renamed would be taken for another step.
                if manifest.name != name:
                    problems.append(Problem(path=".", what=f"the manifest is of {manifest.name}"))
                if other := _other_run(directory, manifest):
                    problems.append(Problem(path=MANIFEST, what=other))
                # Names first: what must not be there is known without reading gigabytes.
                problems.extend(_tree_problems(manifest, entries))
                problems.extend(_extra(strays, num_strays))
                num_bytes = _check_files(root, manifest, problems, threads, bytes_per_s)
    except OSError as error:
        problems.append(_os_problem(".", error))
    return Verdict(
        name=name,
        ok=not problems,
        # Sorted, so that two runs say the same.
        problems=tuple(sorted({_shown(p) for p in problems}, key=lambda p: (p.path, p.what))),
        manifest=manifest,
        num_bytes=num_bytes,
        seconds=time.monotonic() - started,
    )


def read_manifest(directory: Path, *, keys: Keyring | None = None) -> Manifest:
    """Returns the verified manifest of a checkpoint; does not look at the files that it names.

    Raises:
        KeyRefused: it is not signed with one of `keys`, if given.
        OSError: it cannot be read.
        SchemaMismatch: it is of another format version.
        CheckpointCorrupt: it does not verify.
    """
    with open_directory(directory) as root:
        manifest = _read_manifest(root, directory / MANIFEST)
    if keys is not None:
        authenticate(manifest, keys, where=directory / MANIFEST)
    return manifest


def _read_manifest(root: int, where: object) -> Manifest:
    with open_below(root, MANIFEST) as fd:
        try:
            # The size comes from whoever wrote the file; a hole of any size takes no disk.
            data = bounded.read_fd(fd, bounded.MANIFEST)
        except bounded.TooMuch as error:
            raise CheckpointCorrupt("the manifest does not verify", where=where, found=error) from None
    return parse(data, where=where)


def _manifest(root: int, problems: list[Problem]) -> Manifest | None:
    try:
        return _read_manifest(root, MANIFEST)
    except FileNotFoundError:
        problems.append(Problem(path=MANIFEST, what="missing: this was never committed"))
    # A kind of its own: a checkpoint of a newer version is good, and must be neither moved nor passed over.
    except SchemaMismatch as error:
        found = f"format version {error.found}, this code reads {error.expected}"
        problems.append(Problem(path=MANIFEST, what=found, kind="version"))
    # Bytes that are there and wrong: damage beyond doubt.
    except CheckpointCorrupt as error:
        problems.append(Problem(path=MANIFEST, what=str(error.found)))
    except OSError as error:
        problems.append(_os_problem(MANIFEST, error))
    return None


def _authentic(manifest: Manifest | None, keys: Keyring | None, problems: list[Problem]) -> Manifest | None:
    """Returns `manifest`, unless keys are set and it is not signed with one of them: then it proves nothing."""
    if manifest is None or keys is None:
        return manifest
    try:
        authenticate(manifest, keys, where=MANIFEST)
    except (KeyRefused, CheckpointCorrupt) as error:
        # Not "damaged": it may be a good checkpoint of another key, and must not be moved away.
        kind: ProblemKind = "key" if isinstance(error, KeyRefused) else "untrusted"
        problems.append(Problem(path=MANIFEST, what=error.one_line(), kind=kind))
        return None
    return manifest


def _untrusted(entries: list[Entry]) -> list[Problem]:
    problems = []
    for entry in entries:
        if entry.kind == "link":
            continue  # reported as a link; its own mode means nothing
        if what := why_untrusted(entry.info):
            problems.append(Problem(path=entry.path, what=what, kind="untrusted"))
    return problems


def why_untrusted(info: os.stat_result) -> str:
    """Returns why a file or directory may be exchanged by another user; empty: it may not."""
    if info.st_uid != os.geteuid():
        return f"belongs to uid {info.st_uid}, expected {os.geteuid()}"
    # Group and others: both could change the bytes after this check and before they are loaded.
    if stat.S_IMODE(info.st_mode) & 0o022:
        return f"may be written by others (mode {stat.S_IMODE(info.st_mode):04o})"
    return ""


def named_paths(manifest: Manifest | None) -> tuple[set[str], set[str]]:
    """Returns the files and the directories that the manifest gives a checkpoint."""
    files = {entry.path for entry in manifest.files} if manifest is not None else set()
    files.add(MANIFEST)
    return files, {path[:at] for path in files for at, char in enumerate(path) if char == "/"}


def _listed(root: int, manifest: Manifest | None) -> tuple[list[Entry], list[Entry], int]:
    """Returns what the manifest names and is there; the first that it does not name, not entered; their number."""
    files, folders = named_paths(manifest)
    strays: list[Entry] = []
    num_strays = 0

    def is_named(entry: Entry) -> bool:
        nonlocal num_strays
        if entry.path in files or entry.path in folders:
            return True
        num_strays += 1
        if num_strays <= _MOST_EXTRA:
            strays.append(entry)
        return False

    return list_tree(root, keep=is_named), strays, num_strays


def _extra(strays: list[Entry], count: int) -> list[Problem]:
    # Nothing is harmless here: a library may load whatever lies in a directory that it is given. Owner and mode mean
    # nothing, since it is moved away.
    problems = [
        Problem(
            path=entry.path,
            what=f"{'extra' if entry.kind == 'file' else f'extra {entry.kind}'}: not in the manifest",
            kind="extra",
        )
        for entry in strays
    ]
    if count > len(strays):
        what = f"{count - len(strays)} more that are not in the manifest"
        problems.append(Problem(path=".", what=what, kind="extra"))
    return problems


def _other_run(directory: Path, manifest: Manifest) -> str:
    # Known by its place: whatever is to be taken from a run's own directory must be the run's own.
    run = RunPaths(Path(os.path.abspath(directory)).parent.parent)
    return (
        other_run(run, manifest.run_id, manifest.digest)
        if directory.parent.name == run.checkpoints.name
        else ""
    )


def _tree_problems(manifest: Manifest, entries: list[Entry]) -> list[Problem]:
    files, folders = named_paths(manifest)
    problems = [
        Problem(path=p, what="a required part is not in the manifest") for p in missing_parts(manifest)
    ]
    for entry in entries:
        if entry.kind == "file":
            if entry.path not in files:
                problems.append(Problem(path=entry.path, what="is a file, expected a directory"))
        elif entry.kind == "directory":
            if entry.path not in folders:
                problems.append(Problem(path=entry.path, what="is a directory, expected a file"))
        else:
            problems.append(Problem(path=entry.path, what=f"is a {entry.kind}, expected a regular file"))
    return problems


def _check_files(
    root: int, manifest: Manifest, problems: list[Problem], threads: int | None, bytes_per_s: float | None
) -> int:
    """Reads and checks every file that the manifest names; returns the bytes read."""

    def found(path: str, what: str | OSError) -> None:
        problems.append(
            _os_problem(path, what) if isinstance(what, OSError) else Problem(path=path, what=what)
        )

    return read_checked(
        root,
        # Without openers: digests are of the bytes on the disk, so the check takes no key.
        [Reading(entry) for entry in manifest.files],
        threads=threads,
        on_problem=found,
        bytes_per_s=bytes_per_s,
    )


def _shown(problem: Problem) -> Problem:
    """Escapes text from the disk: a file's name may hold newlines, colours, or bytes that are not UTF-8."""
    return Problem(path=printable(problem.path), what=printable(problem.what), kind=problem.kind)


def _os_problem(path: str, error: OSError) -> Problem:
    # Damage, like all of `_TREE_ERRORS`: the tree answered, and it is not what was committed.
    if error.errno == errno.ENOENT:
        return Problem(path=path, what="missing")
    if error.errno in _TREE_ERRORS:
        return Problem(path=path, what="a link or another type of file where a plain one belongs")
    return Problem(path=path, what=f"cannot be read: {error.strerror or error}", kind="unreadable")
