"""Reads the files of a checkpoint decrypted, whether it is encrypted or not; checks every byte.

Tags vouch for encrypted bytes and bind each chunk to its file, place and checkpoint. The manifest's digests vouch for
the others. With keys, the manifest itself must be signed with one of them.

A file is read whole only if its kind may be that large (`_LIMITS`): the writer chooses the size, and a sparse file of
any size takes no disk.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from verl_slurm.base import bounded
from verl_slurm.base.bounded import Limit
from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.base.keys import Keyring
from verl_slurm.base.tree import open_directory
from verl_slurm.checkpoint.format.encryption import CheckpointCipher
from verl_slurm.checkpoint.format.specification import CHAT_TEMPLATE, SCHEMA_VERSION, FileEntry
from verl_slurm.checkpoint.format.tensor_index import (
    DTYPE_BYTES,
    INDEX,
    TensorIndex,
    parse_index,
    tensor_file,
)
from verl_slurm.checkpoint.store.chunks import Reading, Wanted, read_checked
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.runtime_state.format import MAX_CONTENT_BYTES

# Limits by the last name of a path; any other file that is read whole is a runtime state.
_LIMITS = {
    "config.yaml": bounded.CONFIG,
    "metadata.json": bounded.RECORD,
    "orchestration.json": bounded.DATA_FILES,
    "scheduler.json": bounded.SMALL,
    SCHEMA_VERSION: bounded.SMALL,
    CHAT_TEMPLATE: bounded.TOKENIZER,  # it may come from tokenizer_config.json
    INDEX: bounded.INDEX,
}
_RUNTIME_STATE = Limit(num_bytes=MAX_CONTENT_BYTES)
_WINDOW_BYTES = 16 << 20


class CheckpointReader:
    """Reads a checkpoint. Of one that `verify` found whole, all that it reads was committed.

    Attributes:
        manifest: authentic if keys are given.
        entries: its files by path.

    Raises:
        OSError, SchemaMismatch, CheckpointCorrupt: `read_manifest`.
        KeyRefused: it needs a key that is missing, or is not signed with one of ours.
    """

    def __init__(self, directory: Path, keys: Keyring | None = None) -> None:
        self.directory = directory
        self.manifest = read_manifest(directory, keys=keys)
        # Fails here, at the manifest, and not at the first file, if the key is missing.
        self._cipher = CheckpointCipher.of(self.manifest, keys, where=directory)
        self.entries = {entry.path: entry for entry in self.manifest.files}

    def read(self, path: str, *, head: int | None = None) -> bytes:
        """Returns a file, or its first `head` bytes, decrypted. For small files: tensors are read by `fill`.

        Raises:
            OSError: the storage did not deliver it.
            CheckpointCorrupt: it is not what was committed, or larger than its kind may be.
        """
        entry = self.entries.get(path)
        if entry is None:
            raise _not_committed(self.directory / path, "not in the manifest")
        limit = limit_of(path).num_bytes
        # By the manifest's size, before anything is opened.
        if head is None and _plain_size(entry) > limit:
            raise _not_committed(self.directory / path, f"{entry.size} bytes, at most {limit}")
        return self._range(entry, 0, _plain_size(entry) if head is None else head)

    def window(self, path: str) -> Callable[[int, int], memoryview]:
        """Returns a function that reads parts of a file decrypted, one after the other: offset and size → bytes.

        It holds some MB, every chunk checked, and raises CheckpointCorrupt and OSError.
        """
        entry = self.entries[path]
        start, held = 0, memoryview(b"")

        def read(at: int, size: int) -> memoryview:
            nonlocal start, held
            # Readers go forward, so the window moves on and each chunk is checked about once.
            if not start <= at <= at + size <= start + len(held):
                start, held = at, memoryview(self._range(entry, at, max(size, _WINDOW_BYTES)))
            return held[at - start : at - start + size]

        return read

    def plain_size(self, path: str) -> int:
        """Returns the bytes of a file before encryption; -1 if there is no such file."""
        entry = self.entries.get(path)
        return -1 if entry is None else _plain_size(entry)

    def index(self, domain: str) -> TensorIndex:
        """Returns which tensors a domain holds and where. CheckpointCorrupt: they do not fit the files."""
        where = self.directory / domain / INDEX
        index = parse_index(self.read(f"{domain}/{INDEX}"), where=where)
        # Most runs lie in the same files, which are looked up once.
        runs: dict[tuple[str, range], int] = {}
        for entry in index.tensors.values():
            for piece in entry.pieces:
                place = (piece.file, piece.ranks if piece.count > 1 else range(1))
                runs[place] = runs.get(place, 0) + piece.numel * DTYPE_BYTES[entry.dtype]
        claimed: dict[str, int] = {}
        for (first, those), num_bytes in runs.items():
            for file in [first] if len(those) == 1 else map(tensor_file, those):
                claimed[file] = claimed.get(file, 0) + num_bytes
        for file, num_bytes in claimed.items():
            # Pieces that share their bytes would let a small file stand for any number of large tensors.
            if num_bytes > max(0, self.plain_size(f"{domain}/{file}")):
                raise _not_committed(
                    where, f"pieces of {num_bytes} bytes in {file}", "the file that they lie in"
                )
        return index

    def fill(self, wanted: Mapping[str, Sequence[Wanted]], near: Path | None = None) -> None:
        """Reads ranges of files to their places in memory, every chunk that they touch checked.

        Args:
            wanted: by path, in any order. The caller keeps their memory alive.
            near: where this node's own disk may have some of the files; they are read there first.

        Raises:
            CheckpointCorrupt: a file is not what was committed, or has no such bytes.
            OSError: the storage did not give it.
        """
        readings = []
        for path, ranges in wanted.items():
            ordered = sorted(ranges, key=lambda w: w.offset)
            # Before the read: the index is the writer's word, and the reader copies to raw addresses.
            if ordered[-1].offset + ordered[-1].length > self.plain_size(path):
                raise _not_committed(self.directory / path, "no such bytes", "the file that the index names")
            entry = self.entries[path]
            # PLAIN_FILES of an encrypted checkpoint have no tags.
            opener = self._cipher.opener(entry) if self._cipher is not None and _is_sealed(entry) else None
            readings.append(Reading(entry, ordered, opener))
        problems: list[tuple[str, str | OSError]] = []
        with ExitStack() as opened:
            places = [opened.enter_context(open_directory(self.directory))]
            if near is not None:
                with suppress(OSError, CheckpointCorrupt):  # this node has none of it
                    places.insert(0, opened.enter_context(open_directory(near)))
            for place in places:
                # Whatever is wrong with a nearer copy, the next place may have the right bytes.
                problems.clear()
                read_checked(place, readings, on_problem=lambda path, what: problems.append((path, what)))
                bad = {path for path, _ in problems}
                readings = [reading for reading in readings if reading.entry.path in bad]
        self._require_none(problems)

    def _range(self, entry: FileEntry, start: int, most: int) -> bytes:
        """Returns at most `most` decrypted bytes from `start` on; checks the chunks that contain them."""
        data = bytearray(max(0, min(most, _plain_size(entry) - start)))
        # `read_checked` copies to addresses, as tensors need; `data` must not be resized while it does.
        place = ctypes.addressof(ctypes.c_char.from_buffer(data)) if data else 0
        # Nothing wanted: then all chunks are checked by their digests, which takes no key.
        sealed = data and self._cipher is not None and _is_sealed(entry)
        wanted = [Wanted(start, len(data), place)] if data else None
        problems: list[tuple[str, str | OSError]] = []
        with open_directory(self.directory) as root:
            read_checked(
                root,
                [Reading(entry, wanted, self._cipher.opener(entry) if sealed and self._cipher else None)],
                # A few chunks: starting threads costs more. Through the page cache, which serves the next window.
                threads=1,
                on_problem=lambda path, what: problems.append((path, what)),
                from_medium=False,
            )
        self._require_none(problems)
        return bytes(data)

    def _require_none(self, problems: Sequence[tuple[str, str | OSError]]) -> None:
        for path, what in problems:
            # Storage that fails now says nothing about the checkpoint: it is not called corrupt.
            if isinstance(what, OSError):
                raise what
            raise _not_committed(self.directory / path, what)


def limit_of(path: str) -> Limit:
    """Returns the limit of a file that is read whole."""
    return _LIMITS.get(path.rsplit("/", 1)[-1], _RUNTIME_STATE)


def _not_committed(where: Path, found: object, expected: object = None) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        "a file of the checkpoint is not the one that was committed",
        where=where,
        found=found,
        expected=expected,
        remedy="see all of it with `verl-slurm verify`; resume from an older checkpoint (verl-slurm list RUN)",
    )


def _plain_size(entry: FileEntry) -> int:
    return entry.size if isinstance(entry.plain_size, msgspec.UnsetType) else entry.plain_size


def _is_sealed(entry: FileEntry) -> bool:
    return not isinstance(entry.plain_size, msgspec.UnsetType)
