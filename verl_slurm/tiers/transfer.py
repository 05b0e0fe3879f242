"""Copies one checkpoint into a tier, and verifies that it is whole there (`layout.py`, section 2).

Memory: a block of 4 MiB, or the parts in flight of an upload; never a whole file.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from verl_slurm.base.errors import CheckpointCorrupt, TierError
from verl_slurm.base.keys import Keyring
from verl_slurm.base.tree import open_below, open_directory
from verl_slurm.checkpoint.format.manifest import parse
from verl_slurm.checkpoint.format.signature import authenticate, signature_problem
from verl_slurm.checkpoint.format.specification import MANIFEST, MAX_MANIFEST_BYTES, FileEntry, Manifest
from verl_slurm.tiers.backend import Backend, Source
from verl_slurm.tiers.tier_digest import ContentCheck
from verl_slurm.tiers.tier_layout import checkpoint_prefix, manifest_key, object_key

_BLOCK = 4 << 20


class Origin(Protocol):
    """The place that a checkpoint is copied from."""

    def manifest(self) -> bytes:
        """Returns the bytes of its manifest.json, not yet parsed."""
        ...

    def open(self, path: str) -> AbstractContextManager[Source]:
        """Opens one of its files."""
        ...


class DirectoryOrigin:
    """A checkpoint directory of the run itself."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def manifest(self) -> bytes:
        with self.open(MANIFEST) as source:
            # One byte beyond the limit, so that `parse` refuses it.
            return source.read(0, min(source.size, MAX_MANIFEST_BYTES + 1))

    @contextmanager
    def open(self, path: str) -> Iterator[Source]:
        try:
            with open_directory(self._directory) as root, open_below(root, path) as fd:
                yield _FileSource(fd, self._directory / path)
        except OSError as error:
            raise _unreadable(self._directory / path, error) from error


class _FileSource:
    def __init__(self, fd: int, where: Path) -> None:
        self._fd, self._where, self.size = fd, where, os.fstat(fd).st_size

    def read(self, offset: int, size: int) -> bytes:
        parts = []
        try:
            # One pread gives 2 GiB at most, and less if a signal comes.
            while size and (block := os.pread(self._fd, size, offset)):
                parts.append(block)
                offset, size = offset + len(block), size - len(block)
        except OSError as error:
            raise _unreadable(self._where, error) from error
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _unreadable(where: Path, error: OSError) -> TierError:
    # Not `CheckpointCorrupt`: a file that cannot be read now may be whole, or was pruned while we read.
    return TierError(
        "the checkpoint cannot be read",
        where=where,
        found=error.strerror or error,
        remedy="the next pass looks again",
    )


class TierOrigin:
    """A checkpoint in a tier."""

    def __init__(self, backend: Backend, run: str, name: str) -> None:
        self._backend, self._run, self._name = backend, run, name

    def manifest(self) -> bytes:
        key = manifest_key(self._run, self._name)
        info = self._backend.stat(key)
        if info is None:
            raise TierError("the checkpoint is no longer there", where=key)
        return self._backend.read(key, 0, min(info.size, MAX_MANIFEST_BYTES + 1))

    @contextmanager
    def open(self, path: str) -> Iterator[Source]:
        key = object_key(self._run, self._name, path)
        info = self._backend.stat(key)
        if info is None:
            # Here it is damage: the manifest was read from the same tier and names it. The mover then takes another
            # source.
            raise CheckpointCorrupt("an object of the checkpoint is missing", where=key)
        yield _ObjectSource(self._backend, key, info.size)


class _ObjectSource:
    def __init__(self, backend: Backend, key: str, size: int) -> None:
        self._backend, self._key, self.size = backend, key, size

    def read(self, offset: int, size: int) -> bytes:
        return self._backend.read(self._key, offset, size) if size else b""


@dataclass(frozen=True, kw_only=True)
class Transferred:
    """Result of a copy.

    Attributes:
        num_bytes: of the checkpoint.
        sent: of these, in this attempt; the others were there already.
    """

    manifest: Manifest
    num_bytes: int
    sent: int


def copy_checkpoint(
    origin: Origin,
    backend: Backend,
    run: str,
    name: str,
    *,
    keys: Keyring | None = None,
    on_file: Callable[[str], None] | None = None,
) -> Transferred:
    """Makes checkpoint `name` whole and verified in the tier of `backend`. May be killed and called again.

    Args:
        run: the tier's `layout.run_prefix`.
        keys: if given, the origin's manifest must be signed with one of them.
        on_file: called for every finished file.

    Raises:
        CheckpointCorrupt: the origin does not hold what its manifest says, or another writer made that manifest; the
            tier has no commit record then.
        KeyRefused: the origin's manifest is not signed with a key of ours.
        TierError: the tier failed, or returned other bytes twice.
    """
    data = origin.manifest()
    manifest = parse(data, where=f"{name}/{MANIFEST}")
    if manifest.name != name:
        raise CheckpointCorrupt("the manifest is another checkpoint's", where=name, found=manifest.name)
    if keys is not None:
        # Before any byte is sent: a copy of what nobody signed would justify the removal of others.
        authenticate(manifest, keys, where=f"{name}/{MANIFEST}")
    # Committed there already? Then it is whole, or mended as one that does not exist.
    record = manifest_key(run, name)
    there = backend.stat(record)
    if there is not None:
        problems = verify_copy(backend, run, name, expected=data)
        if not problems:
            return Transferred(manifest=manifest, num_bytes=manifest.num_bytes, sent=0)
        backend.delete(record)  # while it is being repaired it does not exist
    sent = 0
    for entry in manifest.files:
        sent += _copy_file(origin, backend, object_key(run, name, entry.path), entry)
        if on_file is not None:
            on_file(entry.path)
    # Before the commit: from then on the checkpoint is judged by what is listed below it.
    _remove_strangers(backend, run, manifest)
    # The manifest last: it vouches for everything that was read back above. The same bytes there are this copy's own,
    # or another mover's of it.
    if not backend.commit(record, data) and backend.read(record, 0, len(data) + 1) != data:
        # Another process committed another checkpoint of that name meanwhile: a former attempt that still runs.
        raise TierError(
            "another process wrote this checkpoint at the same time",
            where=record,
            remedy="the next pass looks again",
        )
    stored = backend.read(record, 0, len(data) + 1)
    if stored != data:
        backend.delete(record)
        raise TierError("the tier gives back another manifest than it was given", where=record)
    return Transferred(manifest=manifest, num_bytes=manifest.num_bytes, sent=sent)


def _copy_file(origin: Origin, backend: Backend, key: str, entry: FileEntry) -> int:
    """Puts one file and has it read back; repeats from the start when other bytes come back."""
    there = backend.stat(key)
    # Left by a pass that died: whole ones are kept, and only after they were read back.
    if there is not None and there.size == entry.size and not backend.holds(key, entry):
        return 0
    sent, problem = 0, ""
    with origin.open(entry.path) as source:
        # Before a byte is sent: this much of the damage costs no transfer.
        if source.size != entry.size:
            found = f"size {source.size}, expected {entry.size}"
            raise CheckpointCorrupt("the source is damaged", where=key, found=found)
        # Twice: what was damaged on the way once is sent again; a tier that damages it twice is at fault.
        for _ in range(2):
            sent += backend.put(key, source, entry)
            problem = backend.holds(key, entry)
            if not problem:
                return sent
            backend.delete(key)
            # Finds the side at fault. The source is read again only now: a healthy copy reads it once.
            wrong = _check_source(source, entry)
            if wrong:
                raise CheckpointCorrupt("the source is damaged", where=key, found=wrong)
    raise TierError(
        "the tier gives back other bytes than it was given",
        where=key,
        found=problem,
        remedy="the checkpoint does not exist there; look at that storage",
    )


def _check_source(source: Source, entry: FileEntry) -> str:
    check = ContentCheck(entry)
    for offset in range(0, source.size, _BLOCK):
        if problem := check.update(source.read(offset, min(_BLOCK, source.size - offset))):
            return problem
    return check.problem()


def _remove_strangers(backend: Backend, run: str, manifest: Manifest) -> None:
    """Removes objects that the manifest does not name."""
    # An earlier attempt with other files left them: a checkpoint is exactly what its manifest names.
    prefix = checkpoint_prefix(run, manifest.name)
    wanted = {prefix + entry.path for entry in manifest.files}
    # Listed whole before anything is removed: a removal would change what is still being listed.
    for info in list(backend.list(prefix)):
        if info.key not in wanted:
            backend.delete(info.key)


def verify_copy(
    backend: Backend, run: str, name: str, *, expected: bytes | None = None, keys: Keyring | None = None
) -> list[str]:
    """Reads back every object of checkpoint `name` in a tier and returns its fault; empty if there is none.

    Args:
        expected: the manifest it should have; None: whichever verifies by itself.
        keys: if given, it must be signed with one of them; if it is not, nothing more is read.

    Raises:
        TierError: the tier did not answer: that tells nothing about the checkpoint.
    """
    key = manifest_key(run, name)
    info = backend.stat(key)
    if info is None:
        return [f"{MANIFEST}: missing"]
    data = backend.read(key, 0, min(info.size, MAX_MANIFEST_BYTES + 1))
    if expected is not None and data != expected:
        return [f"{MANIFEST}: of another checkpoint"]
    try:
        manifest = parse(data, where=key)
    except CheckpointCorrupt as error:
        return [f"{MANIFEST}: {error.found}"]
    if manifest.name != name:
        return [f"{MANIFEST}: of {manifest.name}"]
    if refused := signature_problem(manifest, keys):
        return [f"{MANIFEST}: {refused}"]
    problems = []
    for entry in manifest.files:
        problem = backend.holds(object_key(run, name, entry.path), entry)
        if problem:
            problems.append(f"{entry.path}: {problem}")
    return problems
