"""Stores models that do not train (reference, reward) once by content, and checks them: `RUN/frozen/<digest>/`.

Every checkpoint names them by digest and holds no copy. The first start makes the copy from what it has just read and
hashed (`dataset/fingerprint/stored_tree.py`). So a run can always be restored, even if its original model directory is
gone. Every start reads the copy back from the medium, every byte. A damaged copy moves to RUN/frozen/quarantine, and a
new one is made while the model is still unchanged.

The name is the digest of the model's tree as it was read, links told from files. A copy has no links, so the record
beside it describes the original tree; without that record it cannot be judged, and the verdict says so.
"""

import errno
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.tree import list_tree, names_in, open_below, open_directory
from verl_slurm.checkpoint.format.info import Problem, Verdict
from verl_slurm.checkpoint.store.quarantine import move_to_quarantine
from verl_slurm.dataset.fingerprint.data_record import DataPlace, Fingerprint, narrowed, root_of
from verl_slurm.dataset.fingerprint.entries import recorded_tree
from verl_slurm.dataset.fingerprint.stored_tree import record_tree, store_tree

_DIGEST = re.compile(r"[0-9a-f]{64}")
_BLOCK = 4 << 20
# Bytes of copies that a start waits for: until they are made, and until they are read back.
_STORED_AT_ONCE, _READ_AT_ONCE = 1 << 30, 16 << 20
_Contents = dict[str, tuple[int, str]]
"""Path → size and SHA-256; an empty directory's is empty."""


def frozen_digests(paths: RunPaths) -> list[str]:
    """Lists the names of the stored copies, sorted."""
    names = names_in(paths.run, paths.frozen)
    return sorted(n for n in names if _DIGEST.fullmatch(n) and (paths.frozen / n).is_dir())


def check_frozen(paths: RunPaths, digest: str, *, bytes_per_s: float | None = None) -> Verdict:
    """Reads one copy back, no faster than `bytes_per_s`, at every start. Never raises for what it finds."""
    began = time.monotonic()
    problems: list[Problem] = []
    found: _Contents = {}
    try:
        # All faults are collected, so that one verdict names them all.
        for path, size, sha256 in _read(paths.frozen / digest, problems, bytes_per_s):
            found[path] = (size, sha256)
    except OSError as error:
        problems.append(_unreadable(".", error))
    record = recorded_tree(paths.frozen, digest)
    if record is None:
        # Kind `version`, not `damaged`: the copy may be whole, and must not be moved.
        what = "its record is gone or was changed: not to be judged"
        problems.append(Problem(path=".", what=what, kind="version"))
    else:
        # A file that could not be read is reported as that. Calling it missing as well would make the copy look
        # damaged, and it would be set aside.
        unread = {problem.path for problem in problems}
        expected = {path: (entry.size, entry.sha256) for path, entry in record.files.items()}
        problems += _differences(expected, found, unread)
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


def lacking_file(paths: RunPaths, digest: str, place: DataPlace) -> str:
    """Returns a file of the recorded tree that is not in `place`; empty: all are, or there is no record."""
    record, tree = recorded_tree(paths.frozen, digest), root_of(place)
    names = narrowed(record, place).files if record is not None else ()
    return next((str(tree / name) for name in names if not os.path.lexists(tree / name)), "")


def store_frozen(
    paths: RunPaths, source: Path, seen: Fingerprint, *, notice: Callable[[str], None] = lambda text: None
) -> Path:
    """Ensures a whole copy of the model directory `source` under its digest; returns its place. Runs on rank 0.

    Args:
        seen: `fingerprint(source)`, taken just before.
        notice: called with one line about a copy that does not match its name.

    Raises:
        Fenced, OSError: as `store_tree`.
    """
    private_dir(paths.frozen, inside=paths.run)  # before anything in it is examined: it is no link, and ours
    final = paths.frozen / seen.digest
    if final.is_dir():
        record_tree(paths.frozen, seen)  # a record that is lost
        if not _set_aside_damaged(paths, seen.digest, notice, "it is stored anew"):
            return final
    place = store_tree(paths.frozen, source, seen, "a model that does not train", links=False)
    # Read back: by the time of the next start the source may be gone.
    _set_aside_damaged(paths, seen.digest, notice, "the next start stores it anew")
    return place


def _set_aside_damaged(paths: RunPaths, digest: str, notice: Callable[[str], None], then: str) -> bool:
    """Returns whether the copy was damaged, and is in quarantine now."""
    verdict = check_frozen(paths, digest)
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


class FrozenCopies:
    """Stores the copies of one run, and reads them back, beside the training: rank 0's work.

    A failure is reported to `notice`, from any thread, and the next start tries again. What a start does not
    wait for begins with `begin`.
    """

    def __init__(self, paths: RunPaths, notice: Callable[[str], None]) -> None:
        self._paths, self._notice = paths, notice
        # One at a time: each cleans up RUN/frozen.
        self._alone = threading.Lock()
        # Until `begin` the disk and the cores are the start's.
        self._begun, self._waiting = False, list[Callable[[], None]]()

    def store(self, models: dict[Path, Fingerprint]) -> None:
        """Copies small models at once, and large ones while the training runs."""

        def work() -> None:
            for model, seen in models.items():
                try:
                    store_frozen(self._paths, model, seen, notice=self._notice)
                # A copy is a precaution. Storage that refuses it must not keep the run from training.
                except (OSError, VerlSlurmError) as error:
                    self._notice(f"no copy of {model} in {self._paths.frozen}: {error}")

        there = all((self._paths.frozen / seen.digest).is_dir() for seen in models.values())
        at_once = _READ_AT_ONCE if there else _STORED_AT_ONCE
        self._do(work, at_once=sum(seen.num_bytes for seen in models.values()) <= at_once)

    def read_back(self, used: set[str]) -> None:
        """Reads back the copies whose digests are not in `used`, which may be the last ones."""
        then = "the model it was made of is not what the run starts with now"

        def work() -> None:
            try:
                for digest in frozen_digests(self._paths):
                    # A checkpoint of before a change of model still names the other one, whose directory may be gone.
                    if digest not in used:
                        _set_aside_damaged(self._paths, digest, self._notice, then)
            except OSError as error:
                self._notice(f"{self._paths.frozen} could not be read back: {error}")

        try:
            size = sum(path.stat().st_size for path in self._paths.frozen.rglob("*") if path.is_file())
        except OSError:
            size = 0  # `work` says why it cannot be read
        self._do(work, at_once=size <= _READ_AT_ONCE)

    def begin(self) -> None:
        """Starts what has waited. Call it when the training begins."""
        self._begun = True
        for work in self._waiting:
            self._start(work)
        self._waiting.clear()

    def _do(self, work: Callable[[], None], *, at_once: bool) -> None:
        if at_once:
            with self._alone:
                work()
        elif self._begun:
            self._start(work)
        else:
            self._waiting.append(work)

    def _start(self, work: Callable[[], None]) -> None:
        def alone() -> None:
            with self._alone:
                work()

        # A daemon thread: the end of a run does not wait for a copy, and the next start makes it.
        threading.Thread(target=alone, name="frozen", daemon=True).start()
