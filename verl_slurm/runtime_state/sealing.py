"""Specifies encrypted journal records. Rollouts are data, so with a key they are sealed, too.

```
payload of a frame with magic VSLE:   id of the key, 8 bytes | salt, 32 bytes | ciphertext | tag, 16 bytes
```

AES-256-GCM under a key for this record alone: HKDF-SHA256(key, salt, info = "verl-slurm ledger v2"). The salt is
random, the nonce fixed (12 zero bytes). Associated data are the run's id, attempt, rank, step and micro-batch: a record
of another run, in another place or of another segment does not open. A missing record, or a cut at the end, is not
noticed here and need not be: rollouts that the journal lacks are generated again, identically.

Samples (`samples.py`) are sealed in the same way, at the rank 2^32 - 1.

With a key configured an unsealed record counts as damage.
"""

import secrets
import struct

from verl_slurm.base.errors import CheckpointCorrupt, KeyRefused
from verl_slurm.base.keys import Keyring, MasterKey

_SALT_BYTES = 32
_TAG_BYTES = 16
_KEY_ID_BYTES = 8
OVERHEAD_BYTES = _KEY_ID_BYTES + _SALT_BYTES + _TAG_BYTES
_INFO = b"verl-slurm ledger v2"
# Fixed, as each record has a random salt and so a key of its own; the number of records is not limited by it.
_NONCE = bytes(12)
# Without the record's offset: compaction moves records.
_PLACE = struct.Struct(">8sIIQI")

Place = tuple[str, int, int, int, int]
"""The run's id, attempt, rank, step, micro-batch."""


def seal_record(key: MasterKey, place: Place, payload: bytes) -> bytes:
    """Returns `payload` as it is written."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    # A salt for each record, and with it a key: a record that is appended again after a death shares no nonce with the
    # first.
    salt = secrets.token_bytes(_SALT_BYTES)
    sealed = AESGCM(key.derive(_INFO, salt).reveal()).encrypt(_NONCE, payload, _associated(place))
    return bytes.fromhex(key.id) + salt + sealed


def open_record(keys: Keyring | None, place: Place, data: bytes, *, sealed: bool, where: object) -> bytes:
    """Returns the payload that was written at `place`. `sealed`: its frame says so.

    Raises:
        KeyRefused: there is no key, or it was sealed with another one.
        CheckpointCorrupt: it is not what was sealed there; or it is not sealed and has to be.
    """
    if not sealed:
        if keys is None:
            return data
        # Any process that can write the file could have made it.
        raise CheckpointCorrupt(
            "a ledger record is not encrypted, and a key is configured",
            where=where,
            remedy="its rollouts will be generated again",
        )
    key_id, salt = data[:_KEY_ID_BYTES].hex(), data[_KEY_ID_BYTES : _KEY_ID_BYTES + _SALT_BYTES]
    if keys is None:
        raise KeyRefused(
            "the ledger is encrypted, and no key is configured",
            where=where,
            found=f"key id {key_id}",
            remedy="set checkpoint.encryption={key_file: FILE}",
        )
    # After the question for a key: without one that is what is told, whatever else is wrong.
    if len(data) < OVERHEAD_BYTES:
        raise CheckpointCorrupt("an encrypted ledger record is too short", where=where)
    # Imported where a sealed record is opened: without a key `cryptography` is never loaded.
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    key = keys.find(key_id, where=where).derive(_INFO, salt)
    try:
        return AESGCM(key.reveal()).decrypt(_NONCE, data[_KEY_ID_BYTES + _SALT_BYTES :], _associated(place))
    except InvalidTag:
        raise CheckpointCorrupt(
            "an encrypted ledger record does not open",
            where=where,
            expected="the bytes that were sealed there with this key",
        ) from None


def _associated(place: Place) -> bytes:
    run, *rest = place
    return _PLACE.pack(bytes.fromhex(run), *rest)
