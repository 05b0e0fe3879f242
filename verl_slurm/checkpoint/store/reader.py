"""Reads the files of a checkpoint decrypted, whether it is encrypted or not; checks every byte.

Tags vouch for encrypted bytes and bind each chunk to its file, place and checkpoint. The manifest's digests vouch for
the others. With keys, the manifest itself must be signed with one of them.

A file is read whole only if its kind may be that large (`_LIMITS`): the writer chooses the size, and a sparse file of
any size takes no disk.
"""

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from verl_slurm.base import bounded
from verl_slurm.base.bounded import Limit, TooMuch
from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.base.keys import Keyring
from verl_slurm.base.tree import open_directory
from verl_slurm.checkpoint.format.encryption import CheckpointCipher
from verl_slurm.checkpoint.format.specification import SCHEMA_VERSION, FileEntry
from verl_slurm.checkpoint.format.tensor_index import INDEX
from verl_slurm.checkpoint.store.chunks import Reading, Wanted, read_checked
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.runtime_state.format import MAX_CONTENT_BYTES

_LIMITS = {
    "config.yaml": bounded.CONFIG,
    "metadata.json": bounded.RECORD,
    "orchestration.json": bounded.DATA_FILES,
    "scheduler.json": bounded.SMALL,
    SCHEMA_VERSION: bounded.SMALL,
    INDEX: bounded.INDEX,
}
"""Limits by the last name of a path; any other file that is read whole is a runtime state."""
_RUNTIME_STATE = Limit(num_bytes=MAX_CONTENT_BYTES)
_WINDOW_BYTES = 16 << 20


class CheckpointReader:
    """Reads a checkpoint that `verify` found whole.

    Args:
        keys: if some are configured; None opens what is not encrypted.

    Attributes:
        directory: as given.
        manifest: authentic if keys are given.

    Raises:
        OSError, SchemaMismatch, CheckpointCorrupt: `read_manifest`.
        KeyRefused: it needs a key that is missing, or is not signed with one of ours.
    """

    def __init__(self, directory: Path, keys: Keyring | None = None) -> None:
        self.directory = directory
        self.manifest = read_manifest(directory, keys=keys)
        # Fails here, at the manifest, and not at the first file, if the key is missing.
        self._cipher = CheckpointCipher.of(self.manifest, keys, where=directory)
        self._entries = {entry.path: entry for entry in self.manifest.files}

    def read(self, path: str) -> bytes:
        """Returns a whole file decrypted. For small files: tensors are read by `reading`.

        Raises:
            OSError: the storage did not deliver it.
            CheckpointCorrupt: it is not what was committed, or larger than its kind may be.
        """
        entry = self._entries.get(path)
        try:
            if entry is None:
                raise ValueError("not in the manifest")
            return read_small(self.directory, entry, self._cipher)
        except ValueError as error:
            raise _not_committed(self.directory / path, error) from None

    def window(self, path: str) -> Callable[[int, int], memoryview]:
        """Returns a function that reads parts of a file decrypted, one after the other: offset and size → bytes.

        For a file that may be large it holds some MB, every chunk checked. The function raises CheckpointCorrupt and
        OSError.
        """
        entry = self._entries[path]
        start, held = 0, memoryview(b"")

        def read(at: int, size: int) -> memoryview:
            nonlocal start, held
            # Readers go forward, so the window moves on and each chunk is checked about once.
            if not start <= at <= at + size <= start + len(held):
                try:
                    data = read_range(self.directory, entry, self._cipher, at, max(size, _WINDOW_BYTES))
                except ValueError as error:
                    raise _not_committed(self.directory / path, error) from None
                start, held = at, memoryview(data)
            return held[at - start : at - start + size]

        return read

    def plain_size(self, path: str) -> int:
        """Returns the bytes of a file before encryption; -1 if there is no such file."""
        entry = self._entries.get(path)
        return -1 if entry is None else _plain_size(entry)

    def reading(self, path: str, wanted: Sequence[Wanted]) -> Reading:
        """Builds a request for `chunks.read_checked`: these ranges of an existing file."""
        entry = self._entries[path]
        # PLAIN_FILES of an encrypted checkpoint have no tags.
        sealed = self._cipher is not None and _is_sealed(entry)
        return Reading(entry, wanted, self._cipher.opener(entry) if sealed and self._cipher else None)


def read_small(directory: Path, entry: FileEntry, cipher: CheckpointCipher | None) -> bytes:
    """Returns a whole file decrypted, within the limit of its kind.

    Raises:
        OSError: the storage did not deliver it.
        ValueError: it is not what was committed, or larger than its kind may be.
    """
    limit = _LIMITS.get(entry.path.rsplit("/", 1)[-1], _RUNTIME_STATE)
    # By the manifest's size, before anything is opened.
    if _plain_size(entry) > limit.num_bytes:
        raise TooMuch(f"{entry.size} bytes, at most {limit.num_bytes}")
    return read_range(directory, entry, cipher, 0, _plain_size(entry))


def read_range(
    directory: Path, entry: FileEntry, cipher: CheckpointCipher | None, start: int, most: int
) -> bytes:
    """Returns at most `most` decrypted bytes from `start` on; checks the chunks that contain them.

    Raises:
        OSError: the storage did not deliver it.
        ValueError: it is not what was committed.
    """
    data = bytearray(max(0, min(most, _plain_size(entry) - start)))
    # `read_checked` copies to addresses, as tensors need; `data` must not be resized while it does.
    place = ctypes.addressof(ctypes.c_char.from_buffer(data)) if data else 0
    # Nothing wanted: then all chunks are checked by their digests, which takes no key.
    opener = cipher.opener(entry) if data and cipher is not None and _is_sealed(entry) else None
    wanted = [Wanted(start, len(data), place)] if data else None
    problems: list[str | OSError] = []
    with open_directory(directory) as root:
        read_checked(
            root,
            [Reading(entry, wanted, opener)],
            # A few chunks: starting threads costs more. Through the page cache, which serves the next window.
            threads=1,
            on_problem=lambda _, what: problems.append(what),
            from_medium=False,
        )
    for problem in problems:
        if isinstance(problem, OSError):
            raise problem
        raise ValueError(problem)
    return bytes(data)


def _not_committed(where: Path, found: object) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        "a file of the checkpoint is not the one that was committed",
        where=where,
        found=found,
        remedy="resume from an older checkpoint (verl-slurm list RUN)",
    )


def _plain_size(entry: FileEntry) -> int:
    return entry.size if isinstance(entry.plain_size, msgspec.UnsetType) else entry.plain_size


def _is_sealed(entry: FileEntry) -> bool:
    return not isinstance(entry.plain_size, msgspec.UnsetType)
