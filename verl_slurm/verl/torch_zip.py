"""Finds damage in a file of torch.save, without a digest of ours, without torch and without unpickling.

torch.save writes a zip whose records are stored, not compressed, each with a CRC-32. torch ignores the CRCs when it
loads (`MINIZ_DISABLE_ZIP_READER_CRC32_CHECKS` in its build), so a flipped bit in a weight is loaded as it stands.
`zipfile` parses the directory and checks the CRC of every record. This module adds limits, because the file may be
another user's, and checks the fields that torch uses and zipfile ignores.

Not found: damage to header fields that change nothing (padding, dates, versions, repeated sizes), and to 37 bytes at
the end of the file that make torch refuse it. docs/decisions/0012-torch-zips.md has the measurement.
"""

import io
import os
import struct
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

_BLOCK = 1 << 20
_MAX_DIRECTORY = 16 << 20
"""Bytes; 150,000 records of 100 bytes each: an optimizer's shard has three per parameter. A hostile directory has at
most 357,000 records, for which zipfile takes 130 MB.
"""
_MAX_SMALL = 2_000
"""Records of a zip that is judged in parallel with others. zipfile takes 350 bytes each."""
_MAX_GAP = 64 << 10
"""Bytes between two records: a data descriptor of 16 or 24 bytes, and padding."""
_END_BYTES = 22
_HEADER_BYTES = 30
_HARMLESS_FLAGS = 0x0808
"""The name is UTF-8; the CRC and the sizes follow the data. All others mean encryption or compression."""
_MAX_MESSAGE = 200
_NO_TURN = nullcontext()
_MSDOS_DIRECTORY = 0x10
"""An external attribute: torch reads no data for such a record, and leaves the tensor's memory uninitialized."""


class _BoundedReader(io.BufferedReader):
    """Bounds reads: zipfile reads as many bytes as the file says its directory has."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _MAX_DIRECTORY:
            raise zipfile.BadZipFile(f"a directory of {size} bytes, at most {_MAX_DIRECTORY}")
        return super().read(_MAX_DIRECTORY if size is None or size < 0 else size)


def zip_problem(
    fd: int,
    on_bytes: Callable[[int], None] = lambda _: None,
    *,
    turn: AbstractContextManager[object] = _NO_TURN,
) -> str:
    """Reads the whole file; returns its problem, or an empty text.

    Args:
        fd: a regular file, opened to read. Its position is moved.
        on_bytes: told how many more bytes were read.
        turn: a lock; held while a directory is parsed, and as long as one with many records is in memory.

    Raises:
        OSError: the storage does not give the file.
    """
    size = os.fstat(fd).st_size
    if size == 0:
        return "empty: 0 bytes"
    if os.pread(fd, 2, 0) == b"\x80\x02":
        return "a pickle of torch before 1.6, or one without a zip around it: nothing in it can be checked"
    end = os.pread(fd, _END_BYTES, max(size - _END_BYTES, 0))
    # zipfile would also look for an end record further forward, with a comment after it.
    if not (len(end) == _END_BYTES and end.startswith(b"PK\5\6") and end.endswith(b"\0\0")):
        return "no zip directory at its end: cut off, or something else than torch.save wrote it"
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    with ExitStack() as parsing:
        # The number of records is known once the directory is parsed, so each one is parsed alone.
        parsing.enter_context(turn)
        try:
            with _BoundedReader(io.FileIO(fd, closefd=False)) as file, zipfile.ZipFile(file) as archive:
                # Small ones let go of the turn here, and their records are read beside each other.
                if len(archive.filelist) <= _MAX_SMALL:
                    parsing.close()
                # Before any record is opened: a compressed one could unpack to any size.
                if problem := _directory_problem(archive):
                    return problem
                # Headers and padding are told at the end, so that a bar arrives at the file's size.
                on_bytes(size - _check_records(fd, archive, on_bytes))
        # RuntimeError: encrypted, or (NotImplementedError) a later version of zip. ValueError: a name is not UTF-8.
        except (zipfile.BadZipFile, EOFError, OverflowError, RuntimeError, ValueError, struct.error) as error:
            return f"damaged: {str(error)[:_MAX_MESSAGE] or 'cut off'}"
    return ""


def _directory_problem(archive: zipfile.ZipFile) -> str:
    """Returns what torch.save never writes in the directory's entries of the records, if anything."""
    names = set(archive.namelist())
    tops = {name.split("/", 1)[0] for name in names}
    # Of two records of one name zipfile checks both and torch takes one.
    if len(names) != len(archive.filelist) or len(tops) != 1 or f"{min(tops)}/data.pkl" not in names:
        return "a zip, but not one of torch.save"
    for info in archive.filelist:
        if (
            info.compress_type != zipfile.ZIP_STORED
            or info.compress_size != info.file_size
            or info.flag_bits & ~_HARMLESS_FLAGS
            or info.external_attr & _MSDOS_DIRECTORY
            or info.volume
            or info.comment
        ):
            return f"damaged: the zip's directory describes {info.filename[:_MAX_MESSAGE]} as torch.save does not"
    # All of them zero: torch was told to write none. One alone is an empty record's right checksum.
    if not any(info.CRC for info in archive.filelist):
        return (
            "written without checksums (torch.serialization.set_crc32_options(False)): it cannot be checked"
        )
    return ""


def _check_records(fd: int, archive: zipfile.ZipFile, on_bytes: Callable[[int], None]) -> int:
    """Reads every record once, in the order of the file; returns how many bytes `on_bytes` was told of.

    Raises:
        BadZipFile, EOFError: a record is damaged, overlaps another, or there are bytes that belong to none.
    """
    position = told = 0
    # In the file's order, not the directory's: gaps and overlaps show that way, and the disk is read forwards.
    for info in sorted(archive.filelist, key=lambda info: info.header_offset):
        _check_gap(position, info.header_offset, most=_MAX_GAP if position else 0)
        with archive.open(info) as record:
            while block := record.read(_BLOCK):
                told += len(block)
                on_bytes(len(block))
        # The record's own header, since name and extra field may be longer there than in the directory.
        lengths = os.pread(fd, 4, info.header_offset + _HEADER_BYTES - 4)
        begin = info.header_offset + _HEADER_BYTES + sum(struct.unpack("<2H", lengths))
        position = begin + info.file_size
    # Up to the directory, too: bytes between the last record and it would belong to nothing.
    _check_gap(position, archive.start_dir, most=_MAX_GAP)
    return told


def _check_gap(position: int, begin: int, *, most: int) -> None:
    if begin < position:
        raise zipfile.BadZipFile(f"records overlap at {begin}")
    if begin - position > most:
        raise zipfile.BadZipFile(f"{begin - position} bytes at {position} belong to no record")
