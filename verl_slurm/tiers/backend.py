"""What a tier's storage must promise.

A backend knows keys and bytes. What a checkpoint is, when it is whole and what may be removed, it need not know.

Obligations, held by `tests/tiers/test_backends.py` for every backend:

- one thread calls it (`read` and `blocks` may be called from several); one mover a run at a time, but another run's, or
  a former attempt's, may work on the same storage;
- `put` and `commit` are durable when they return, atomic (no reader sees half an object), and may be repeated;
- `put` may be killed at any point; called again with the same bytes it does not send again what has arrived;
- nothing that the storage says of itself is believed: whether the bytes are there is `holds`' question, and who asks
  it is `transfer`;
- every failure is a `TierError` of one line, without secrets in it; time-outs and retries are bounded inside.

A plug-in is an entry point of the group `verl_slurm.tiers`: a callable that takes the `TierConfig` of `kind:
plugin:NAME` and returns a `Backend`.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from verl_slurm.checkpoint.format.specification import FileEntry

__all__ = ["Backend", "ObjectInfo", "Source"]


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
    """Bytes that are to be put: read by position, from several threads, more than once."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`, fewer only at the end.

        Raises:
            OSError: they cannot be read.
            TierError: the source is an object, and its storage failed.
        """
        ...


class Backend(Protocol):
    """See the module."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key begins with `prefix`, in any order; uploads under way are none."""
        ...

    def stat(self, key: str) -> ObjectInfo | None:
        """The object, or None when there is none."""
        ...

    def read(self, key: str, offset: int, size: int) -> bytes:
        """Bytes of an object, fewer only at its end. No such object: TierError."""
        ...

    def blocks(self, key: str) -> Iterator[bytes]:
        """All bytes of an object, in order, a few MiB at a time."""
        ...

    def put(self, key: str, source: Source, entry: FileEntry) -> int:
        """Make `key` hold `source`; replaces what is there. Returns the bytes that were sent, those of former
        attempts not counted. `entry` says what the bytes ought to be; the backend need not check it."""
        ...

    def commit(self, key: str, data: bytes) -> bool:
        """Make `key` hold `data` unless it holds something; False when it does."""
        ...

    def holds(self, key: str, entry: FileEntry) -> str:
        """Empty when `key` has the size and the digest of `entry`, asked of the medium and not of a memory; else
        what is wrong, a short clause."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; gone already is fine."""
        ...

    def forget(self, prefix: str, keep: Collection[str] = ()) -> int:
        """Give up uploads that are under way below `prefix`, but not below one of `keep`; returns how many."""
        ...
