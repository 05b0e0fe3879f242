"""Loads the keys of a run, derives further keys from them, and keeps them out of every output.

A key is 32 random bytes. It comes from a file (`verl-slurm init --key FILE`: 64 hex digits and a newline; 32 raw
bytes are read too) or from an environment variable (64 hex digits). The key itself encrypts and signs nothing: every
use derives a key of its own by HKDF-SHA256 (RFC 5869), told apart by `info`. Its id, which is public, is the first 8
bytes (hex) of HMAC-SHA256(key, "verl-slurm key id v1").

Ways to leak a key are closed: `repr`, pickling and copying, errors, core dumps.
"""

import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import NoReturn, Protocol

from verl_slurm.base.errors import KeyRefused, PermissionRefused
from verl_slurm.base.files import create_file, read_private, require_safe_folder
from verl_slurm.base.packages import pip_install
from verl_slurm.base.processes import forbid_core_dumps

KEY_BYTES = 32
_ID_TEXT = b"verl-slurm key id v1"
_ID_BYTES = 8
_NEW = "make one with `verl-slurm init --key FILE`"


class Secret:
    """Holds bytes that are never shown."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def reveal(self) -> bytes:
        """Returns the bytes, to be passed straight to a cipher and not bound to a lasting name."""
        return self._value

    def hmac(self, data: bytes) -> str:
        """Returns HMAC-SHA256 of `data` under these bytes, hex."""
        return hmac.new(self._value, data, hashlib.sha256).hexdigest()

    # Errors and logs show objects by their repr.
    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # Also what `copy` and multiprocessing use: each process loads the key from its source.
        raise TypeError("a secret is neither pickled nor copied: load it from where it is")


class MasterKey:
    """Holds one of the user's keys; its `id`, 16 hex digits, is public."""

    __slots__ = ("_secret", "id")

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        self._secret = Secret(key)
        # An HMAC, so that the public id tells nothing of the key.
        self.id = self._secret.hmac(_ID_TEXT)[: 2 * _ID_BYTES]

    def derive(self, info: bytes, salt: bytes = b"") -> Secret:
        """Derives 32 bytes for the purpose that `info` names. KeyRefused: the package `cryptography` is missing."""
        try:
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ImportError:
            raise KeyRefused(
                "encryption is configured, but a package it needs is missing",
                where="cryptography",
                remedy=f"{pip_install('cryptography')}, or take checkpoint.encryption out of the configuration",
            ) from None
        # The key itself encrypts and signs nothing, so no two purposes share one.
        kdf = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt or None, info=info)
        return Secret(kdf.derive(self._secret.reveal()))

    def __repr__(self) -> str:
        return f"MasterKey(id={self.id})"


class Keyring:
    """Holds the key for writing and the keys for reading.

    Attributes:
        current: seals and signs all new data.
        accept_unsigned: digest of the one manifest without an HMAC that is still accepted, or None.
    """

    def __init__(
        self, current: MasterKey, old: tuple[MasterKey, ...] = (), *, accept_unsigned: str | None = None
    ) -> None:
        self.current = current
        self.accept_unsigned = accept_unsigned
        self._keys = {key.id: key for key in (*old, current)}

    def find(self, key_id: str, *, where: object) -> MasterKey:
        """Returns the key of that id; KeyRefused: no key of ours has it."""
        # By the id in the data: a wrong key is told as such, and not as damage.
        key = self._keys.get(key_id)
        if key is None:
            raise KeyRefused(
                "sealed with another key",
                where=where,
                found=f"key id {key_id}",
                expected="key id " + " or ".join(sorted(self._keys)),
                remedy="name that key's file in checkpoint.encryption.old_key_files",
            )
        return key

    def __repr__(self) -> str:
        return f"Keyring(current={self.current.id}, {len(self._keys)} keys)"


class KeyPlaces(Protocol):
    """Names where a configuration keeps its keys (`config.schema.EncryptionConfig`)."""

    @property
    def key_file(self) -> str | None: ...
    @property
    def key_env(self) -> str | None: ...
    @property
    def old_key_files(self) -> list[str]: ...
    @property
    def accept_unsigned(self) -> str | None: ...


def load_keys(config: KeyPlaces | None) -> Keyring | None:
    """Loads the keys that the configuration names; returns None if it names none.

    Raises:
        KeyRefused: a key is missing or invalid.
        PermissionRefused: a key file, or its folder, is open to others.
    """
    if config is None:
        return None
    # Before a key is read: a crash from here on could write it to a core file.
    forbid_core_dumps()
    if config.key_file is not None:
        current = read_key_file(Path(config.key_file))
    else:
        current = _key_of_variable(config.key_env or "")
    # All of them now: an old key that is missing is found at the start, not at the checkpoint that needs it.
    old = tuple(read_key_file(Path(path)) for path in config.old_key_files)
    return Keyring(current, old, accept_unsigned=config.accept_unsigned)


def read_key_file(path: Path) -> MasterKey:
    """Reads the key from a regular 0600 file of ours, in a folder where no other user can replace it.

    Raises:
        KeyRefused: there is no such file, or it holds no key.
        PermissionRefused: others can read it or replace it.
    """
    try:
        _require_safe_folder(path.parent)
        data = read_private(path)
    except PermissionRefused:
        raise
    except OSError as error:
        # The system's words alone: an error quotes none of the bytes that were read.
        raise KeyRefused(
            "the key file cannot be read",
            where=path,
            found=error.strerror,
            remedy=f"correct the path, or {_NEW}",
        ) from error
    if len(data) == KEY_BYTES:
        if data.isascii():  # by chance once in 2 ** 32; mostly a pass phrase, or a key of half the length
            raise _no_key(path, "32 characters of text")
        return _checked(data, path)
    return _from_hex(data, path)


def new_key_file(path: Path) -> MasterKey:
    """Makes a key and writes it, 0600, durably. May raise OSError.

    Raises:
        KeyRefused: the name exists already.
        PermissionRefused: others can write the folder.
    """
    _require_safe_folder(path.parent)
    key = secrets.token_bytes(KEY_BYTES)
    # Never over an existing one: what it encrypts would be lost with it.
    if not create_file(path, key.hex().encode() + b"\n"):
        raise KeyRefused(
            "there is a file of that name already",
            where=path,
            remedy="choose another name: without its key a checkpoint is lost",
        )
    # Read back by the checks of every later use: mode, owner and folder are known to be right now.
    return read_key_file(path)


def _key_of_variable(name: str) -> MasterKey:
    value = os.environ.get(name)
    if value is None:
        raise KeyRefused(
            "the variable that holds the key is not set",
            where=f"${name}",
            remedy="export it, or use checkpoint.encryption.key_file, which needs nothing in the environment",
        )
    return _from_hex(value.encode(errors="replace"), f"${name}")


def _from_hex(data: bytes, where: object) -> MasterKey:
    # One newline, as `new_key_file` and editors write it; any other character makes it no key.
    text = data.removesuffix(b"\n")
    try:
        # `bytes.fromhex` skips blanks.
        if len(text) != 2 * KEY_BYTES or not text.isalnum():
            raise ValueError
        key = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        # `from None`: the error would quote what it could not read.
        raise _no_key(where, f"{len(data)} bytes that are no key") from None
    return _checked(key, where)


def _checked(key: bytes, where: object) -> MasterKey:
    if len(set(key)) < 8:  # zeros, or a pattern typed by hand
        raise _no_key(where, "a key of hardly any different bytes")
    return MasterKey(key)


def _no_key(where: object, found: str) -> KeyRefused:
    return KeyRefused(
        "this is no key",
        where=where,
        found=found,
        expected=f"{2 * KEY_BYTES} hex digits, or {KEY_BYTES} random bytes",
        remedy=_NEW,
    )


def _require_safe_folder(folder: Path) -> None:
    try:
        require_safe_folder(
            folder, "others can replace the key file", "put the key into a folder of your own with mode 0700"
        )
    except OSError as error:
        raise KeyRefused(
            "the key's folder cannot be looked at",
            where=folder,
            found=error.strerror,
            remedy="correct the path",
        ) from error
