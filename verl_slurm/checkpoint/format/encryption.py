"""Encryption at rest: the specification, and the cipher of one checkpoint. torch-free.

## 1. What is sealed

With a key configured, every file of a checkpoint is sealed except `PLAIN_FILES` and manifest.json: tensors, runtime
state (rollouts are data), texts (config.yaml names paths and people). The manifest shows the step, the attempt, the
time and the key; file names, sizes and `dataset_fingerprint` stay visible.

## 2. Keys

`Manifest.encryption` has the id of the user's key and a random salt of SALT_BYTES, new for every *attempt* to save. A
file's key is HKDF-SHA256(key, salt, info = "verl-slurm file v1" NUL checkpoint name NUL path): no two files ever share
one. (`name` is that of the directory; for models stored by content, the name that the store uses.)

## 3. A sealed file of P plain bytes

```
offset 0        ciphertext of chunk 0, SEALED_CHUNK_BYTES        each byte at the offset that it has in the plain file
...
                ciphertext of the last chunk, the rest    (P = 0: one chunk of no bytes)
offset P        tag of chunk 0, TAG_BYTES
                tag of chunk 1 ...
size            P + TAG_BYTES * chunks(P)                 `FileEntry.size`; P is `FileEntry.plain_size`
```

Each chunk is AES-256-GCM (NIST SP 800-38D) with the chunk's index as a 96-bit big-endian nonce, and as associated data
`<u64 index><u64 P><u8 1 if last>` (big-endian) and the path. A changed bit, a truncation, and chunks in another order,
of another file or of another checkpoint all fail, and no plaintext of that chunk is returned. The SHA-256 digests in
the manifest are of the sealed bytes: comparing them with the disk needs no key. `signature.py` tells who made the
manifest; the scrub and the tiers ask it, too.

## 4. The caller's duty

A nonce must never be used for two texts with one key. So: a new `CheckpointCipher.begin` for every attempt, and one
`ChunkSealer` per file. For a second medium a chunk may be sealed once more: then its tag must be the first one, or the
sealer refuses it and gives nothing out. A saver process refuses a salt that it has seen (`save.writer.file_sealing`).

Measured on one core (EPYC with VAES): section "Cost" of docs/decisions/0003-encryption.md.
"""

import secrets
import struct
from typing import Self

import msgspec

from verl_slurm.base.errors import CheckpointCorrupt, KeyRefused
from verl_slurm.base.keys import Keyring, MasterKey, Secret
from verl_slurm.checkpoint.format.specification import (
    PLAIN_FILES,
    SEALED_CHUNK_BYTES as SEALED_CHUNK_BYTES,
    TAG_BYTES as TAG_BYTES,
    Encryption,
    FileEntry,
    Manifest,
    sealed_chunks,
    sealed_size,
)

# So many random bits that two attempts never draw the same: the key of a file, and with it each nonce, is used once.
SALT_BYTES = 32
_FILE_KEY = b"verl-slurm file v1"
_ASSOCIATED = struct.Struct(">QQB")


class _Chunks:
    """Shared geometry of one file for sealing and opening: its chunks, nonces and associated data."""

    def __init__(self, key: Secret, path: str, plain_size: int) -> None:
        # Imported where a key is used: without one no process pays for the package.
        from cryptography.hazmat.primitives.ciphers import algorithms

        self._aes = algorithms.AES(key.reveal())
        self._path = path.encode("ascii")
        self.plain_size, self.num_chunks = plain_size, sealed_chunks(plain_size)

    def length(self, index: int) -> int:
        """Returns the plain bytes of chunk `index`."""
        if not 0 <= index < self.num_chunks:
            raise ValueError(f"chunk {index} of {self.num_chunks}")
        return min(SEALED_CHUNK_BYTES, self.plain_size - index * SEALED_CHUNK_BYTES)

    def associated(self, index: int) -> bytes:
        """Returns the data that a chunk's tag covers in addition to its bytes."""
        last = index == self.num_chunks - 1
        # Size and last flag bind the file's length: one that was cut at a chunk's border does not open.
        return _ASSOCIATED.pack(index, self.plain_size, last) + self._path

    def _check(self, index: int, data: memoryview, out: memoryview) -> None:
        length = self.length(index)
        if data.nbytes != length or out.nbytes != length:
            raise ValueError(f"chunk {index} has {length} bytes; got {data.nbytes} and room for {out.nbytes}")


class ChunkSealer(_Chunks):
    """Seals the chunks of one file of `plain_size` bytes, in any order, from any number of threads."""

    def __init__(self, key: Secret, path: str, plain_size: int) -> None:
        super().__init__(key, path, plain_size)
        # Of each chunk (section 4): two plaintexts under one nonce would give away their difference.
        self._tags: dict[int, bytes] = {}

    def seal_into(self, index: int, plaintext: memoryview, out: memoryview) -> bytes:
        """Encrypts the chunk `plaintext` into `out`, which must not overlap it; returns the chunk's tag.

        Runs without the interpreter lock.

        Raises:
            ValueError: a length differs; or it was sealed before with other bytes, and `out` holds zeros.
        """
        from cryptography.hazmat.primitives.ciphers import Cipher, modes

        self._check(index, plaintext, out)
        # The index may be the nonce because the key serves for this file of this attempt, and each index for one text.
        encryptor = Cipher(self._aes, modes.GCM(index.to_bytes(12, "big"))).encryptor()
        encryptor.authenticate_additional_data(self.associated(index))
        # Into the caller's buffer: GCM's output is as long as its input, so every byte keeps its offset.
        encryptor.update_into(plaintext, out)
        encryptor.finalize()
        # The tag stands for the text: without the key nobody can make two with one tag.
        if self._tags.setdefault(index, encryptor.tag) != encryptor.tag:
            out[:] = bytes(out.nbytes)
            raise ValueError(
                f"chunk {index} was sealed before with other bytes: its nonce must not be used again"
            )
        return encryptor.tag


class ChunkOpener(_Chunks):
    """Opens the chunks of one file, in any order, from any number of threads."""

    def open_into(self, index: int, ciphertext: memoryview, tag: bytes, out: memoryview) -> None:
        """Decrypts one chunk into `out`, without the interpreter lock.

        Raises:
            CheckpointCorrupt: not the bytes sealed as this chunk of this file; `out` then holds zeros.
            ValueError: lengths that do not fit.
        """
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher, modes

        self._check(index, ciphertext, out)
        # A shorter tag is easier to forge.
        if len(tag) != TAG_BYTES:
            raise ValueError(f"a tag has {TAG_BYTES} bytes, not {len(tag)}")
        decryptor = Cipher(self._aes, modes.GCM(index.to_bytes(12, "big"), tag)).decryptor()
        decryptor.authenticate_additional_data(self.associated(index))
        try:
            # It writes plaintext before the tag is checked: nobody may look at `out` until `finalize` has returned.
            decryptor.update_into(ciphertext, out)
            decryptor.finalize()
        except InvalidTag:
            out[:] = bytes(out.nbytes)  # unauthenticated bytes must not stay in memory
            raise CheckpointCorrupt(
                "an encrypted file does not open",
                where=f"{self._path.decode()}, chunk {index} of {self.num_chunks}",
                expected="the bytes that were sealed here with this key",
                remedy="resume from an older checkpoint (verl-slurm list RUN)",
            ) from None


class CheckpointCipher:
    """Encrypts and decrypts the files of one checkpoint; `record`: the content of `Manifest.encryption`."""

    def __init__(self, key: MasterKey, name: str, record: Encryption) -> None:
        self.record = record
        self._key, self._name = key, name

    @classmethod
    def begin(cls, key: MasterKey, name: str) -> Self:
        """Makes the cipher for a new attempt to save `name`: rank 0 makes it and sends `record` to the other ranks."""
        # New for each attempt: a second attempt at the same name may seal other bytes under the same paths.
        return cls(key, name, Encryption(key_id=key.id, salt=secrets.token_hex(SALT_BYTES)))

    @classmethod
    def of(cls, manifest: Manifest, keys: Keyring | None, *, where: object) -> Self | None:
        """Returns the cipher for reading; None: nothing is encrypted. KeyRefused: the key is not there."""
        record = manifest.encryption
        # Whether it may be read, with a key configured, `signature.authenticate` has decided already.
        if isinstance(record, msgspec.UnsetType):
            return None
        if keys is None:
            raise KeyRefused(
                "the checkpoint is encrypted, and no key is configured",
                where=where,
                found=f"key id {record.key_id}",
                remedy="set checkpoint.encryption={key_file: FILE}",
            )
        return cls(keys.find(record.key_id, where=where), manifest.name, record)

    def file_key(self, path: str) -> Secret:
        """Returns the key of one file; it seals or opens that file alone."""
        # No name and no path holds a NUL, so two files never give the same text.
        info = b"\0".join((_FILE_KEY, self._name.encode("ascii"), path.encode("ascii")))
        return self._key.derive(info, bytes.fromhex(self.record.salt))

    def sealer(self, path: str, plain_size: int) -> ChunkSealer:
        """Returns what writes a file of `plain_size` bytes."""
        return ChunkSealer(self.file_key(path), path, plain_size)

    def opener(self, entry: FileEntry) -> ChunkOpener:
        """Returns what reads a sealed file by chunks."""
        return ChunkOpener(self.file_key(entry.path), entry.path, _plain_size(entry))

    def seal(self, path: str, data: bytes) -> bytes:
        """Returns a small file sealed; files of PLAIN_FILES unchanged. Once for each path (section 4)."""
        if path in PLAIN_FILES:
            return data
        sealer = self.sealer(path, len(data))
        plain, out = memoryview(data), bytearray(sealed_size(len(data)))
        view, at = memoryview(out), len(data)
        for index in range(sealer.num_chunks):
            start = index * SEALED_CHUNK_BYTES
            end = start + sealer.length(index)
            view[at : at + TAG_BYTES] = sealer.seal_into(index, plain[start:end], view[start:end])
            at += TAG_BYTES
        return bytes(out)


def _plain_size(entry: FileEntry) -> int:
    if isinstance(entry.plain_size, msgspec.UnsetType):
        raise CheckpointCorrupt("a file that has to be encrypted is not", where=entry.path)
    return entry.plain_size
