"""Stores models that do not train (reference, reward) once by content, and checks them: `RUN/frozen/<digest>/`.

Every checkpoint names them by digest and holds no copy. The first start makes the copy from what it has just read and
hashed. The copy is complete once it has its name: written aside, fsynced, hashed again, renamed. So a run can always be
restored, even if its original model directory is gone. Every start reads the copy back from the medium, every byte. A
damaged copy moves to RUN/frozen/quarantine, and a new one is made while the model is still unchanged.

The name is the digest of the model's tree as it was read, links told from files. A copy has no links, so a record
beside it describes the original tree (`<digest>.json`, a `Fingerprint` that has that digest: it proves itself). A copy
older than these records is judged by what the caller has just seen of the source, or by its own tree, which is the same
if the source had no links. Otherwise it cannot be judged, and the verdict says so.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from verl_slurm.base import bounded
from verl_slurm.base.errors import DataError
from verl_slurm.base.files import fsync_path, private_dir, rename, write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.tree import list_tree, names_in, open_below, open_directory
from verl_slurm.checkpoint.format.info import Problem, Verdict
from verl_slurm.checkpoint.store.quarantine import move_to_quarantine
from verl_slurm.dataset.fingerprint.data_record import FileDigest, Fingerprint, fingerprint
from verl_slurm.dataset.fingerprint.entries import parse, render, sealed

_DIGEST = re.compile(r"[0-9a-f]{64}")
_BLOCK = 4 << 20
_Contents = dict[str, tuple[int, str]]
"""Path → size and SHA-256; an empty directory's is empty."""


def frozen_digests(paths: RunPaths) -> list[str]:
    """Lists the names of the stored copies, sorted."""
    names = names_in(paths.run, paths.frozen)
    return sorted(n for n in names if _DIGEST.fullmatch(n) and (paths.frozen / n).is_dir())


def record_frozen(paths: RunPaths, seen: Fingerprint) -> None:
    """Records the expected content of the copy of that digest, durably; does nothing if the record exists."""
    # Written once: the record proves itself by its digest, and the source may have changed since.
    if recorded_model(paths, seen.digest) is None:
        write_file(_record_path(paths, seen.digest), render(seen))


def check_frozen(
    paths: RunPaths, digest: str, *, seen: Fingerprint | None = None, bytes_per_s: float | None = None
) -> Verdict:
    """Reads one copy back. Runs at every start.

    Args:
        digest: its name.
        seen: the present fingerprint of the source; counts if it has that digest.
        bytes_per_s: read no faster; None: no limit.

    Returns:
        The verdict; `damaged` if bytes differ beyond doubt. Never raises for what it finds.
    """
    began = time.monotonic()
    problems: list[Problem] = []
    found: _Contents = {}
    try:
        # All faults are collected, so that one verdict names them all.
        for path, size, sha256 in _read(paths.frozen / digest, problems, bytes_per_s):
            found[path] = (size, sha256)
    except OSError as error:
        problems.append(_unreadable(".", error))
    expected = _expected(paths, digest, seen)
    if expected is not None:
        # A file that could not be read is reported as that. Calling it missing as well would make the copy look
        # damaged, and it would be set aside.
        unread = {problem.path for problem in problems}
        problems += _differences(expected, found, unread)
    elif not problems and _digest_of(found) != digest:
        # Kind `version`, not `damaged`: an old copy of a model with links may be whole, and must not be moved.
        what = "not its own tree's digest, and nothing says which of its files were links: not to be judged"
        problems.append(Problem(path=".", what=what, kind="version"))
    return Verdict(
        name=f"frozen/{digest}",
        ok=not problems,
        problems=tuple(sorted(problems, key=lambda problem: problem.path)),
        manifest=None,
        num_bytes=sum(size for size, _ in found.values()),
        seconds=time.monotonic() - began,
    )


def _read(root: Path, problems: list[Problem], bytes_per_s: float | None) -> Iterator[tuple[str, int, str]]:
    """Yields (path, size, SHA-256) of every file, and of every empty directory; follows no link."""
    began, total = time.monotonic(), 0
    with open_directory(root) as top:
        entries = list_tree(top)
        # Empty directories belong to the tree that the digest describes.
        parents = {entry.path.rpartition("/")[0] for entry in entries}
        for entry in entries:
            if entry.kind == "directory":
                if entry.path not in parents:
                    yield entry.path, 0, ""
                continue
            digest, size = hashlib.sha256(), 0
            try:
                # A copy has no links, so one is reported.
                with open_below(top, entry.path) as fd, open(fd, "rb", buffering=0, closefd=False) as file:
                    # Cached pages say nothing about the medium.
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    while block := file.read(_BLOCK):
                        digest.update(block)
                        size, total = size + len(block), total + len(block)
                        if bytes_per_s:  # only elapsed time can show a speed limit
                            time.sleep(max(0.0, began + total / bytes_per_s - time.monotonic()))
            except OSError as error:
                problems.append(_unreadable(entry.path, error))
                continue
            yield entry.path, size, digest.hexdigest()


def _unreadable(path: str, error: OSError) -> Problem:
    # A link is damage beyond doubt; any other error may pass with the storage.
    if error.errno == errno.ELOOP:
        return Problem(path=path, what="a link where a plain file belongs")
    return Problem(path=path, what=f"cannot be read: {error.strerror or error}", kind="unreadable")


def _differences(expected: _Contents, found: _Contents, unread: set[str]) -> list[Problem]:
    problems = [Problem(path=p, what="missing") for p in expected.keys() - found.keys() - unread]
    problems += [Problem(path=p, what="extra: not in the model") for p in found.keys() - expected.keys()]
    for path in expected.keys() & found.keys():
        if expected[path] != found[path]:
            (size, sha256), (here, other) = expected[path], found[path]
            what = f"size {here}, expected {size}" if here != size else f"sha256 {other}, expected {sha256}"
            problems.append(Problem(path=path, what=what))
    return problems


def _expected(paths: RunPaths, digest: str, seen: Fingerprint | None) -> _Contents | None:
    # What was hashed just now outweighs a file that lies beside the copy.
    known = seen if seen is not None and seen.digest == digest else recorded_model(paths, digest)
    if known is None:
        return None
    return {path: (entry.size, entry.sha256) for path, entry in known.files.items()}


def recorded_model(paths: RunPaths, digest: str) -> Fingerprint | None:
    """Returns the record; None if it is missing or does not have the digest."""
    try:
        data = bounded.read_regular(_record_path(paths, digest), bounded.FINGERPRINT)
        record = parse(data, bounded.FINGERPRINT)
        return record if record.digest == digest else None
    # No record is no fault: the copy itself is checked.
    except (OSError, ValueError, RecursionError):
        return None


def lacking_file(paths: RunPaths, digest: str, tree: Path) -> str:
    """Returns a file of the recorded model that `tree` has not; empty: it has all, or there is no record."""
    record = recorded_model(paths, digest)
    names = record.files if record is not None else ()
    return next((str(tree / name) for name in names if not os.path.lexists(tree / name)), "")


def _digest_of(found: _Contents) -> str:
    return sealed(
        {
            path: FileDigest(size=size, sha256=sha256, kind="file" if sha256 else "directory")
            for path, (size, sha256) in found.items()
        }
    ).digest


def _record_path(paths: RunPaths, digest: str) -> Path:
    return paths.frozen / f"{digest}.json"


def store_frozen(
    paths: RunPaths, source: Path, seen: Fingerprint, *, notice: Callable[[str], None] = lambda text: None
) -> Path:
    """Ensures a whole copy of the model directory `source` under its digest; returns its place. Runs on rank 0.

    An existing copy is read back, every byte. A copy that cannot be read now stays: it may be readable at the next
    start.

    Args:
        seen: `fingerprint(source)`, taken just before.
        notice: called with one line about a copy that does not match its name.

    Raises:
        DataError: the copy does not hash to it: the model is being changed, or a disk returns wrong bytes.
        OSError: no room, or no permission.
    """
    private_dir(paths.frozen)  # before anything in it is examined: it is no link, and ours
    final = paths.frozen / seen.digest
    if final.is_dir() and not _set_aside_damaged(paths, seen.digest, seen, notice, "it is stored anew"):
        # Before the rename, so that no copy stands without what it is judged by.
        record_frozen(paths, seen)  # older copies have none
        return final
    for left in paths.frozen.glob(".*.tmp"):  # left by a start that died; no other process may write here
        # Before the copy: frozen models are large, and leftovers of several deaths would fill the disk.
        shutil.rmtree(left)
    # Under a name that no reader takes for a copy until it is whole.
    staging = paths.frozen / f".{seen.digest}.{secrets.token_hex(8)}.tmp"
    try:
        # Links are followed: Hugging Face's cache consists of them, and their targets are the content.
        shutil.copytree(source, staging, copy_function=shutil.copyfile)
        # Bottom up: a directory is synced after everything in it.
        for folder, _, files in os.walk(staging, topdown=False):
            for name in files:
                path = Path(folder, name)
                path.chmod(0o600)
                fsync_path(path)
            Path(folder).chmod(0o700)
            fsync_path(Path(folder))
        # Not the tree's digest: that also tells links from files, and the copy has no links.
        copied = fingerprint(staging).files
        different = [name for name, entry in seen.files.items() if _sha256(copied, name) != entry.sha256]
        if different or len(copied) != len(seen.files):
            raise DataError(
                "the copy of a model that does not train is not what was read",
                where=source,
                found=f"{len(copied)} files, of which {len(different)} differ: {', '.join(different[:3])}",
                expected=f"the {len(seen.files)} files of {seen.digest}",
                remedy="start again when nobody writes to the model's directory",
            )
        record_frozen(paths, seen)
        rename(staging, final)
    except BaseException:
        # The error that led here is the one to report.
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return final


def read_back_others(paths: RunPaths, seen: Collection[str], *, notice: Callable[[str], None]) -> None:
    """Reads back the copies of models that the run does not start with now: they may be the last copies. Runs on rank
    0.

    Args:
        seen: digests of the models that it starts with; `store_frozen` checks these.
        notice: as in `store_frozen`.
    """
    for digest in frozen_digests(paths):
        # A checkpoint of before a change of model still names the other one, whose directory may be gone.
        if digest not in seen:
            _set_aside_damaged(
                paths, digest, None, notice, "the model it was made of is not what the run starts with now"
            )


def _set_aside_damaged(
    paths: RunPaths, digest: str, seen: Fingerprint | None, notice: Callable[[str], None], then: str
) -> bool:
    """Returns whether the copy was damaged, and is in quarantine now."""
    verdict = check_frozen(paths, digest, seen=seen)
    if verdict.ok:
        return False
    # Left in place: the storage may give it at the next start, and it may be the last copy.
    if not verdict.damaged:
        notice(f"a frozen model could not be read back: {verdict.one_line()}")
        return False
    target = move_to_quarantine(paths.frozen / digest, [str(problem) for problem in verdict.problems])
    notice(
        f"a frozen model is not what its name says, and is set aside: {verdict.one_line()}; {then}; {target}"
    )
    return True


def _sha256(files: Mapping[str, FileDigest], name: str) -> str:
    entry = files.get(name)
    return "" if entry is None else entry.sha256
