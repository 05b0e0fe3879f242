"""Specifies what a tier's storage must promise.

A backend knows keys and bytes. It knows nothing of checkpoints: what one is, when it is whole, and what may be removed.

`tests/tiers/test_backends.py` checks these obligations for every backend:

- one thread calls it (`read` and `blocks` may be called from several); one mover per run at a time, but another run's
  mover, or a former attempt's, may work on the same storage;
- `put` and `commit` are durable when they return, atomic (no reader sees half an object), and may be repeated;
- `put` may be killed at any point; called again with the same bytes it does not send again what has arrived;
- nothing that the storage says of itself is believed: `holds` checks whether the bytes are there, and `transfer` calls
  it;
- every failure is a `TierError` of one line, without secrets in it; time-outs and retries are bounded inside.

A plug-in is an entry point of the group `verl_slurm.tiers`: a callable that takes the `TierConfig` of `kind:
plugin:NAME` and returns a `Backend`.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from verl_slurm.checkpoint.format.specification import FileEntry


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """One object as its storage lists it.

    Attributes:
        size: bytes.
        stamp: changes when the object is replaced (ETag, or inode and time); compared for equality alone.
    """

    key: str
    size: int
    stamp: str


class Source(Protocol):
    """Bytes to be put: read by position, from several threads, more than once."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, size: int) -> bytes:
        """Returns exactly `size` bytes from `offset`, fewer only at the end.

        Raises:
            OSError: they cannot be read.
            TierError: the source is an object, and its storage failed.
        """
        ...


class Backend(Protocol):
    """A tier's storage; the module specifies its obligations."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Lists every object whose key begins with `prefix`, in any order; uploads under way are left out."""
        ...

    def stat(self, key: str) -> ObjectInfo | None:
        """Returns the object, or None when there is none."""
        ...

    def read(self, key: str, offset: int, size: int) -> bytes:
        """Returns bytes of an object, fewer only at its end. No such object: TierError."""
        ...

    def blocks(self, key: str) -> Iterator[bytes]:
        """Yields all bytes of an object, in order, a few MiB at a time."""
        ...

    def put(self, key: str, source: Source, entry: FileEntry) -> int:
        """Makes `key` hold `source`; replaces what is there. Returns the bytes that were sent, without those of former
        attempts. `entry` describes the expected bytes; the backend need not check it."""
        ...

    def commit(self, key: str, data: bytes) -> bool:
        """Makes `key` hold `data` unless it holds something; returns False when it does."""
        ...

    def holds(self, key: str, entry: FileEntry) -> str:
        """Returns an empty text when `key` has the size and the digest of `entry`, read from the medium and not from
        memory; otherwise the fault, a short clause."""
        ...

    def delete(self, key: str) -> None:
        """Removes an object; a missing one is no error."""
        ...

    def forget(self, prefix: str, keep: Collection[str] = ()) -> int:
        """Abandons uploads under way below `prefix`, except below one of `keep`; returns how many."""
        ...
