"""What a rank writes itself, beside its saver's tensors: encrypted once, the same bytes on every medium."""

from collections.abc import Mapping

import msgspec

from verl_slurm.base.errors import KeyRefused
from verl_slurm.base.keys import Keyring
from verl_slurm.checkpoint.format.encryption import CheckpointCipher
from verl_slurm.checkpoint.format.specification import PLAIN_FILES, FileEntry
from verl_slurm.checkpoint.store.chunks import entry_of
from verl_slurm.save.writer.protocol import Sealing

SealedFile = tuple[FileEntry, bytes]
"""A file as it will lie on disk, encrypted where a key is configured, and its entry of the manifest."""


def begin_sealing(keys: Keyring | None, name: str) -> Sealing | None:
    """How a new save of `name` is encrypted: with a salt of its own. None without a key.

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
    # Rank 0's choice and this rank's key must agree. A rank without a key would otherwise write plaintext into an
    # encrypted checkpoint.
    if keys is None and sealing is None:
        return None
    if keys is None or sealing is None:
        raise KeyRefused(
            "the ranks do not agree on whether to encrypt",
            remedy="let every node see the same key (checkpoint.encryption)",
        )
    record = sealing.encryption
    # By the id that rank 0 named: nodes may read different key files, or the file may have been exchanged.
    return CheckpointCipher(keys.find(record.key_id, where="the key of rank 0"), sealing.name, record)


def seal_small(files: Mapping[str, bytes], cipher: CheckpointCipher | None) -> list[SealedFile]:
    """Encrypt and hash each file, in the order of their paths. Once a save: a nonce serves once."""
    sealed = []
    # Sorted, so that entries have the same order on each medium.
    for path in sorted(files):
        data = files[path] if cipher is None else cipher.seal(path, files[path])
        entry = entry_of(path, data)
        # A few files stay readable without the key (`PLAIN_FILES`); `cipher.seal` gives those back as they are.
        if cipher is not None and path not in PLAIN_FILES:
            entry = msgspec.structs.replace(entry, plain_size=len(files[path]))
        sealed.append((entry, data))
    return sealed
