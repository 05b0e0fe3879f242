"""Computes SHA-256 of many chunks: sixteen at once where the processor is faster that way, checked against hashlib.

The SHA-256 of one chunk is a chain that no core can shorten. Chunks do not depend on each other, so
`stringzilla.Sha256s` keeps one word of each of sixteen chunks in a wide register and advances all of them with each
instruction (Gueron and Krasnov, 2012, https://eprint.iacr.org/2012/371). docs/decisions/0005 tells when that pays.

The processor selects one of the two for a process. At its first use both hash the same messages, and
`stringzilla` is not used where they differ. A reader asks hashlib before it calls a chunk damaged.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar

from verl_slurm.checkpoint.format.specification import CHUNK_BYTES

LANES = 16
FEWEST = 8
"""A batch of sixteen takes as long as eight chunks by hashlib, however few of its lanes are used."""

_Job = TypeVar("_Job")


@dataclass(frozen=True)
class Hasher:
    """Hashes chunks, from any number of threads; `lanes`: `stringzilla.Sha256s`, or None for hashlib."""

    lanes: Callable[[int], Any] | None = None

    @property
    def at_once(self) -> int:
        """Returns the number of chunks in a batch."""
        return 1 if self.lanes is None else LANES

    def batches(self, jobs: Sequence[_Job]) -> list[Sequence[_Job]]:
        """Cuts `jobs` into batches. Jobs that are too few for a batch come one by one, so that threads share them."""
        step = self.at_once
        whole = len(jobs) - len(jobs) % step
        # A rest of that size is still faster at once than one by one.
        if len(jobs) - whole >= FEWEST:
            whole = len(jobs)
        return [
            *(jobs[first : min(first + step, whole)] for first in range(0, whole, step)),
            *([job] for job in jobs[whole:]),
        ]

    def digests(self, pieces: Sequence[memoryview]) -> list[bytes]:
        """Returns the SHA-256 of each piece. Releases the interpreter lock while it hashes."""
        if self.lanes is None or len(pieces) < FEWEST:
            return _hash_each(pieces)
        found: list[bytes] = self.lanes(len(pieces)).update(pieces).digest()
        return found


def hashlib_of(piece: memoryview, found: bytes) -> bytes:
    """Returns hashlib's digest of a piece for which `Hasher.digests` gave the unexpected digest `found`."""
    digest = sha256(piece).digest()
    if digest != found:
        _say("found another SHA-256 than hashlib, which decides")
    return digest


@functools.cache
def process_hasher(*, reading: bool = False) -> Hasher:
    """Returns the faster hasher here; `reading`: to check a checkpoint soonest, not with the least work."""
    try:
        # Here, not at the top: verifying must work where it is not installed, and most commands hash nothing.
        import stringzilla
    except ImportError:
        return Hasher()
    try:
        # stringzilla's names: "skylake" is AVX-512, "haswell" AVX2, "goldmont" the SHA instructions. With these hashlib
        # is faster than AVX2. For a reading it is than AVX-512, too: two cores are as fast as a disk, chunk by chunk,
        # and the last batches would be hashed when nothing is left to read, from 128 MiB more of fresh memory.
        able = stringzilla.__capabilities__
        faster = ("skylake" in able and not (reading and "goldmont" in able)) or (
            "haswell" in able and "goldmont" not in able
        )
        if faster and not _agrees(stringzilla.Sha256s):
            _say("found another SHA-256 than hashlib when it was tried; it is not used")
            faster = False
        return Hasher(stringzilla.Sha256s if faster else None)
    except Exception as error:  # noqa: BLE001 - of another release; no checkpoint fails for want of speed
        _say(f"cannot be used: {type(error).__name__}: {error}")
        return Hasher()


def _agrees(lanes: Callable[[int], Any]) -> bool:
    """Returns whether its digests are hashlib's on every lane, at the edges of the padding too."""
    memory = memoryview(bytes(range(251)) * (CHUNK_BYTES // 251 + 2))
    lengths = [[size] * LANES for size in (0, 1, 55, 56, 63, 64, 119, 120, 128, 4096, 8191, CHUNK_BYTES)]
    # Different lengths side by side: lanes that end early must not disturb the others.
    lengths += [[lane * 61 for lane in range(count)] for count in range(1, LANES + 1)]
    batches = [[memory[3 * lane :][:size] for lane, size in enumerate(sizes)] for sizes in lengths]
    return all(lanes(len(batch)).update(batch).digest() == _hash_each(batch) for batch in batches)


def _hash_each(pieces: Sequence[memoryview]) -> list[bytes]:
    return [sha256(piece).digest() for piece in pieces]


def _say(what: str) -> None:
    sys.stderr.write(f"verl-slurm: stringzilla {what}\n")
