"""The files of a checkpoint as they were before encryption, whether it is encrypted or not; every byte checked.

What is encrypted is vouched for by the tags, which bind each chunk to its file, place and checkpoint; what is
not, by the manifest's digests. With keys the manifest itself must be signed with one of them.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from verl_slurm.checkpoint.chunks import Reading, Wanted, entry_of
from verl_slurm.checkpoint.encryption import CheckpointCipher
from verl_slurm.checkpoint.format import FileEntry
from verl_slurm.checkpoint.verify import read_manifest
from verl_slurm.errors import CheckpointCorrupt
from verl_slurm.keys import Keyring

__all__ = ["CheckpointReader"]


class CheckpointReader:
    """A checkpoint that `verify` found whole, to be read.

    Args:
        keys: where some are configured; None opens what is not encrypted.

    Attributes:
        directory: as given.
        manifest: authentic where keys are given.

    Raises:
        OSError, SchemaMismatch, CheckpointCorrupt: `read_manifest`.
        KeyRefused: it needs a key that is not there, or is not signed with one of ours.

    Called by: dcp.loader, dcp.compare, trainer.resuming.
    """

    def __init__(self, directory: Path, keys: Keyring | None = None) -> None:
        self.directory = directory
        self.manifest = read_manifest(directory, keys=keys)
        self._cipher = CheckpointCipher.of(self.manifest, keys, where=directory)
        self._entries = {entry.path: entry for entry in self.manifest.files}

    def read(self, path: str) -> bytes:
        """A whole file, as it was before encryption. For small ones: tensors are read by `reading`.

        Raises:
            OSError: the storage did not give it.
            CheckpointCorrupt: it is not what was committed.
        """
        data = (self.directory / path).read_bytes()
        entry = self._entries.get(path)
        if entry is None or (not _is_sealed(entry) and entry_of(path, data) != entry):
            raise CheckpointCorrupt(
                "a file of the checkpoint is not the one that was committed",
                where=self.directory / path,
                remedy="resume from an older checkpoint (verl-slurm checkpoints)",
            )
        return data if self._cipher is None else self._cipher.open(entry, data)

    def plain_size(self, path: str) -> int:
        """Bytes of a file before encryption; -1 where there is no such file."""
        entry = self._entries.get(path)
        if entry is None:
            return -1
        return entry.size if isinstance(entry.plain_size, msgspec.UnsetType) else entry.plain_size

    def reading(self, path: str, wanted: Sequence[Wanted]) -> Reading:
        """For `chunks.read_checked`: these ranges of a file that is there."""
        entry = self._entries[path]
        sealed = self._cipher is not None and _is_sealed(entry)
        return Reading(entry, wanted, self._cipher.opener(entry) if sealed and self._cipher else None)


def _is_sealed(entry: FileEntry) -> bool:
    return not isinstance(entry.plain_size, msgspec.UnsetType)
