"""Frames, scans and resynchronizes one ledger segment's bytes (`format.py`, section 3).

Knows frames, not rollouts; reads with an open descriptor, writes nothing.
"""

import errno
import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verl_slurm.runtime_state.format import MAX_RECORD_BYTES

_HEAD = struct.Struct("<8sII")
_HEAD_MAGIC = b"VSLEDGR2"
_FRAME = struct.Struct("<4sIQII8s")
_FRAME_MAGIC = b"VSLR"
_SEALED_MAGIC = b"VSLE"
# The beginning of both frames' magic, so that one search finds either.
_ANY_MAGIC = b"VSL"
_CRC = struct.Struct("<I")
HEAD_BYTES = _HEAD.size
FRAME_BYTES = _FRAME.size + _CRC.size
_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A record whose frame header is whole.

    Attributes:
        offset: of its first byte in the segment.
        length: bytes of its payload.
        run: the id of the run that wrote it.
    """

    offset: int
    length: int
    step: int
    micro_batch: int
    payload_crc: int
    run: str
    sealed: bool = False

    @property
    def end(self) -> int:
        return self.offset + FRAME_BYTES + self.length

    def payload(self, fd: int) -> bytes | None:
        """Returns its payload, or None when it is cut short or does not match its CRC."""
        # pread: scans of one descriptor do not move each other's place.
        data = os.pread(fd, self.length, self.offset + FRAME_BYTES)
        return data if len(data) == self.length and zlib.crc32(data) == self.payload_crc else None


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A region without a record of this run: damage when whole records follow, else a torn tail.

    Attributes:
        run: the id of the other run whose whole records these are; empty: they are no records.
    """

    offset: int
    end: int
    torn: bool
    run: str = ""


def head(attempt: int, rank: int) -> bytes:
    """Returns the first bytes of a segment."""
    return _HEAD.pack(_HEAD_MAGIC, attempt, rank)


def frame(run: str, step: int, micro_batch: int, payload: bytes, *, sealed: bool = False) -> bytes:
    """Returns one record of the run with this id, ready to append."""
    magic = _SEALED_MAGIC if sealed else _FRAME_MAGIC
    fields = _FRAME.pack(magic, len(payload), step, micro_batch, zlib.crc32(payload), bytes.fromhex(run))
    # The header has a CRC of its own: a length must be believed before the payload, whose end it gives, can be checked.
    return fields + _CRC.pack(zlib.crc32(fields)) + payload


def open_segment(path: Path) -> int:
    """Opens a segment for reading; a link in its place is an OSError (ELOOP)."""
    # O_NONBLOCK: a FIFO in its place would wait for a writer.
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)


def is_locked(fd: int) -> bool:
    """Returns whether a live writer has locked the segment. False on a file system without locks, where it is
    unknown."""
    try:
        # A free lock is held from here until `fd` is closed, so no writer begins meanwhile.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def scan(fd: int, attempt: int, rank: int, run: str, *, check_from_step: int = 0) -> Iterator[Frame | Gap]:
    """Walks a segment, of this attempt, rank and run, from its head to its present end.

    Args:
        check_from_step: payloads of earlier steps are skipped without being read.

    Yields:
        Every good record of this run, and a Gap for each region without one, in order of their offsets.
    """
    # The size once: a living writer may append without end, and its last record is half there.
    size = os.fstat(fd).st_size
    patience = _Patience(size)
    offset = HEAD_BYTES
    if os.pread(fd, HEAD_BYTES, 0) != head(attempt, rank):
        # After a torn head there is nothing; after a damaged one there may be whole records.
        gap = _gap(fd, 0, 0, size, patience)
        yield gap
        offset = gap.end
    foreign: Gap | None = None
    while offset < size:
        found = _frame_at(fd, offset, size)
        # Payloads of earlier steps are not needed: their frames' own CRCs lead from one to the next.
        if found is not None and found.step >= check_from_step and found.payload(fd) is None:
            patience.left -= found.length
            found = None
        if found is not None and found.run != run:
            # Records of one run that follow each other are one gap: they are told once.
            if foreign is not None and foreign.run != found.run:
                yield foreign
                foreign = None
            start = offset if foreign is None else foreign.offset
            foreign = Gap(offset=start, end=found.end, torn=False, run=found.run)
            offset = found.end
            continue
        if foreign is not None:
            yield foreign
            foreign = None
        item = found or _gap(fd, offset, offset + 1, size, patience)
        yield item
        offset = item.end
    if foreign is not None:
        yield foreign


def _frame_at(fd: int, offset: int, size: int) -> Frame | None:
    raw = os.pread(fd, FRAME_BYTES, offset)
    if len(raw) < FRAME_BYTES:
        return None
    magic, length, step, micro_batch, payload_crc, run = _FRAME.unpack_from(raw)
    (header_crc,) = _CRC.unpack_from(raw, _FRAME.size)
    if magic not in (_FRAME_MAGIC, _SEALED_MAGIC) or header_crc != zlib.crc32(raw[: _FRAME.size]):
        return None
    # Before the payload is read: a length with a right CRC may be made up as well.
    if length > MAX_RECORD_BYTES or offset + FRAME_BYTES + length > size:
        return None
    return Frame(
        offset=offset,
        length=length,
        step=step,
        micro_batch=micro_batch,
        payload_crc=payload_crc,
        run=run.hex(),
        sealed=magic == _SEALED_MAGIC,
    )


@dataclass
class _Patience:
    """Bytes of payloads that may still turn out wrong before the rest of a segment counts as damage."""

    # Genuine frames do not overlap, so their total is at most the segment's size. Frames made to overlap would make us
    # read the same bytes again and again (4 MiB of them: 44 s).
    left: int


def _gap(fd: int, start: int, offset: int, size: int, patience: _Patience) -> Gap:
    """Returns the gap from `start` to the next whole record, payload included; the search begins at `offset`."""
    while offset < size and patience.left >= 0:
        try:
            # A hole of any size costs its maker nothing, and has no record.
            offset = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break  # a hole up to the end
        block = os.pread(fd, _BLOCK, offset)
        if not block:
            break
        at = block.find(_ANY_MAGIC)
        while at >= 0:
            found = _frame_at(fd, offset + at, size)
            if found is not None:
                # A frame with a damaged payload does not end the gap: a reader could not use it.
                if found.payload(fd) is not None:
                    return Gap(offset=start, end=found.offset, torn=False)
                patience.left -= found.length
                if patience.left < 0:
                    break
            at = block.find(_ANY_MAGIC, at + 1)
        # A magic may straddle two blocks.
        offset += max(len(block) - len(_FRAME_MAGIC) + 1, 1)
    return Gap(offset=start, end=size, torn=patience.left >= 0)
