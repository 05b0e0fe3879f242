"""Computes SHA-256 of many chunks: sixteen at once where the processor is faster that way, checked against hashlib.

The SHA-256 of one chunk is a chain that no core can shorten. Chunks do not depend on each other, so
`stringzilla.Sha256s` keeps one word of each of sixteen chunks in a wide register and advances all of them with each
instruction (Gueron and Krasnov, 2012, https://eprint.iacr.org/2012/371). docs/decisions/0005 tells when that pays.

hashlib decides:

* At the first use both hash the same messages, with every length of the padding on every lane.
* Of every fourth batch of a save or a reading, the first included, hashlib hashes one chunk as well, each time on
  another lane.
* A reader asks hashlib before it calls a chunk damaged (`Hasher.again`).

If the two ever differ, the process reports it on stderr and uses hashlib from then on. Each save or reading under way
hashes all of its chunks again (`Hasher.settled`). A save or a reading that had ended before stands: its own samples
were right.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, TypeVar

LANES = 16
FEWEST = 8
"""A batch of sixteen takes as long as eight chunks by hashlib, however few of its lanes are used."""
_JUDGED_EVERY = 4  # one chunk of 64 by hashlib, too: 3 % more work

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


class Hasher:
    """Hashes the chunks of a process; any number of its threads may use it.

    Args:
        lanes: `stringzilla.Sha256s`; None: hashlib.
    """

    def __init__(self, lanes: Callable[[int], Any] | None = None) -> None:
        self._lanes = lanes

    @property
    def at_once(self) -> int:
        """Returns the number of chunks in a batch."""
        return 1 if self._lanes is None else LANES

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

    def digests(self, pieces: Sequence[memoryview], number: int) -> list[bytes]:
        """Returns the SHA-256 of each piece. Releases the interpreter lock while it hashes.

        Args:
            number: of this batch within the save or the reading, from 0. It selects what hashlib checks.
        """
        lanes = self._lanes
        # `_lanes` is read once: another thread may set it to None in the middle of this call.
        if lanes is None or len(pieces) < FEWEST:
            return _hash_each(pieces)
        found: list[bytes] = lanes(len(pieces)).update(pieces).digest()
        if number % _JUDGED_EVERY == 0:
            # Another lane each time, so that a fault of one lane is met as well.
            judged = number // _JUDGED_EVERY % len(pieces)
            if self.again(pieces[judged], found[judged]) != found[judged]:
                return _hash_each(pieces)
        return found

    def again(self, piece: memoryview, found: bytes) -> bytes:
        """Returns hashlib's digest of a piece that `digests` gave the digest `found`."""
        digest = sha256(piece).digest()
        # Said once for the process: threads of one reading may all find it.
        if digest != found and self._lanes is not None:
            self._lanes = None
            _say("found another SHA-256 than hashlib; hashlib now hashes everything, from the beginning")
        return digest

    def settled(self, work: Callable[[], _Result]) -> _Result:
        """Returns the result of `work()`. If it used digests that are no longer believed, runs it again and returns
        that result.

        Args:
            work: a whole save or reading. May be called twice.
        """
        before = self._lanes
        result = work()
        # Identity, not equality: what counts is whether any thread gave the fast one up meanwhile.
        return result if self._lanes is before else work()


@functools.cache
def process_hasher() -> Hasher:
    """Returns the faster hasher on this processor. The first call loads stringzilla, if it is installed."""
    try:
        # Here, not at the top: verifying must work where it is not installed, and most commands hash nothing.
        import stringzilla
    except ImportError:
        return Hasher()
    try:
        # stringzilla's names: "skylake" is AVX-512, "haswell" AVX2. With AVX2 and the SHA instructions ("goldmont")
        # hashlib is faster.
        able = stringzilla.__capabilities__
        faster = "skylake" in able or ("haswell" in able and "goldmont" not in able)
        if faster and not _agrees(stringzilla.Sha256s):
            _say("found another SHA-256 than hashlib when it was tried; it is not used")
            faster = False
        return Hasher(stringzilla.Sha256s if faster else None)
    except Exception as error:  # noqa: BLE001 - of another release; no checkpoint fails for want of speed
        _say(f"cannot be used: {type(error).__name__}: {error}")
        return Hasher()


@functools.cache
def reading_hasher() -> Hasher:
    """Returns the hasher that lets this processor read and check a checkpoint soonest."""
    hasher = process_hasher()
    if hasher.at_once == 1:
        return hasher
    import stringzilla

    # With the SHA instructions two cores by hashlib are as fast as a disk, chunk by chunk. Batches would cost less of
    # the processor, but the last ones are hashed when nothing is left to read, from 128 MiB more of fresh memory.
    return Hasher() if "goldmont" in stringzilla.__capabilities__ else hasher


def _agrees(lanes: Callable[[int], Any]) -> bool:
    """Returns whether it matches hashlib's digests on every lane: every padding length, whole blocks, uneven
    lengths."""
    memory = memoryview(bytes(range(251)) * 40)
    lengths = [[size] * LANES for size in (0, 1, 55, 56, 63, 64, 119, 120, 128, 4096, 8191)]
    # Different lengths side by side: lanes that end early must not disturb the others.
    lengths += [[lane * 61 for lane in range(count)] for count in range(1, LANES + 1)]
    batches = [[memory[3 * lane :][:size] for lane, size in enumerate(sizes)] for sizes in lengths]
    return all(lanes(len(batch)).update(batch).digest() == _hash_each(batch) for batch in batches)


def _hash_each(pieces: Sequence[memoryview]) -> list[bytes]:
    return [sha256(piece).digest() for piece in pieces]


def _say(what: str) -> None:
    sys.stderr.write(f"verl-slurm: stringzilla {what}\n")
