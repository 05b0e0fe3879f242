"""What a rank writes itself, beside its saver's tensors: encrypted once, the same bytes on every medium."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from verl_slurm.base.errors import KeyRefused
from verl_slurm.base.keys import Keyring
from verl_slurm.checkpoint.format.encryption import CheckpointCipher
from verl_slurm.checkpoint.format.specification import PLAIN_FILES, FileEntry
from verl_slurm.checkpoint.store import commit as door
from verl_slurm.checkpoint.store.chunks import entry_of
from verl_slurm.save.writer.protocol import Sealing

__all__ = ["begin_sealing", "cipher_for", "seal_small", "write_small"]


def begin_sealing(keys: Keyring | None, name: str) -> Sealing | None:
    """How a new attempt to save `name` is encrypted: with a salt of its own. None without a key.

    Runs on rank 0.
    """
    if keys is None:
        return None
    return Sealing(name=name, encryption=CheckpointCipher.begin(keys.current, name).record)


def cipher_for(keys: Keyring | None, sealing: Sealing | None) -> CheckpointCipher | None:
    """This rank's cipher for what rank 0 began.

    Raises:
        KeyRefused: this rank has no key and rank 0 has, or the other way round, or another one.

    Runs on every rank.
    """
    if keys is None and sealing is None:
        return None
    if keys is None or sealing is None:
        raise KeyRefused(
            "the ranks do not agree on whether to encrypt",
            remedy="let every node see the same key (checkpoint.encryption)",
        )
    record = sealing.encryption
    return CheckpointCipher(keys.find(record.key_id, where="the key of rank 0"), sealing.name, record)


def seal_small(
    files: Mapping[str, bytes], cipher: CheckpointCipher | None
) -> tuple[dict[str, bytes], list[FileEntry]]:
    """Each file as it will lie on disk, by path, and the manifest's entries. Once an attempt: nonces."""
    written: dict[str, bytes] = {}
    entries = []
    for path in sorted(files):
        written[path] = files[path] if cipher is None else cipher.seal(path, files[path])
        entry = entry_of(path, written[path])
        if cipher is not None and path not in PLAIN_FILES:
            entry = msgspec.structs.replace(entry, plain_size=len(files[path]))
        entries.append(entry)
    return written, entries


def write_small(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write files, as `seal_small` gave them, durably below a staging directory.

    Raises:
        OSError: the medium refuses.

    Runs once per medium.
    """
    for path, data in files.items():
        (directory / path).parent.mkdir(mode=0o700, exist_ok=True)
        (directory / path).write_bytes(data)
    door.seal(directory, files)
