"""Is a file byte for byte what torch.save wrote? Answered without a digest of ours, without torch, without unpickling.

torch.save writes a zip whose records are stored, not compressed, each with a CRC-32 (in torch's repository:
caffe2/serialize/inline_container.cc, third_party/miniz-3.0.2/miniz.c). torch itself checks none of them when it loads
(`MINIZ_DISABLE_ZIP_READER_CRC32_CHECKS`): a flipped bit in a weight is loaded as it stands. We read every byte and hold
to its word what the zip says twice:

```
record     local header: as in the directory, but CRC and sizes 0, they follow                     30 bytes
           name, and an extra field "FB" that pads with Z up to the alignment of the data
           data, whose CRC-32 is in the directory
           descriptor: PK 7 8, CRC-32, sizes of 4 bytes (of 8: zip64)                              16 or 24 bytes
...        the next record, without a gap
directory  46 bytes and the name of each record; but for name, CRC, size and place all are the same
end        zip64 end, its locator, the end record; nothing behind it
```

So a bit that flips anywhere in the file contradicts something. Zips of others (Python's zipfile) pass as long as they
are as plain as these. The layout of a zip: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["directory_bytes", "zip_problem"]

_BLOCK = 4 << 20
_MAX_DIRECTORY = 16 << 20
"""Bytes; 150,000 records of 100 bytes each: an optimizer's shard has three a parameter."""

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_FOLLOWS = 1 << 3
"""Of a record's flags: its CRC and sizes come behind the data."""
_FULL32 = 0xFFFFFFFF
_FULL16 = 0xFFFF
_WRITERS64 = {(0x031E, 0x2D), (0x2D, 0x2D)}
"""(made by, needed) in the zip64 end: miniz's, which is torch's, and Python's."""
_PADDING = b"FB"
_ZIP64 = b"\x01\x00"


class _Bad(Exception):
    """What is wrong, for people."""


@dataclass(frozen=True, slots=True)
class _Record:
    name: bytes
    common: tuple[int, ...]
    """Versions, flags, method, time, date, disk and attributes: nothing that differs from record to record. One
    object for all of them."""
    crc: int
    size: int
    offset: int


def zip_problem(fd: int, on_bytes: Callable[[int], None] = lambda _: None, *, read_all: bool = True) -> str:
    """Read the whole file; returns what is wrong with it, empty where nothing is.

    Args:
        fd: a regular file, opened to read.
        on_bytes: told how many more bytes were read, for a progress bar.
        read_all: False: the directory alone: finds what is cut off or empty, and no flipped bit of a tensor.

    Raises:
        OSError: the storage does not give the file.

    Called by: shards.
    """
    size = os.fstat(fd).st_size
    if size == 0:
        return "empty: 0 bytes"
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    try:
        start, records = _directory(fd, size)
        if not read_all:
            return ""
        position = 0
        for record in sorted(records, key=lambda one: one.offset):
            position = _check_record(fd, record, position, start, on_bytes)
        if position != start:
            raise _Bad(f"{start - position} bytes before the zip's directory belong to no record")
    except _Bad as bad:
        return str(bad)
    on_bytes(size - start)
    return ""


def directory_bytes(fd: int) -> int:
    """How long the zip says its directory is; 0 where it is none."""
    size = os.fstat(fd).st_size
    data = os.pread(fd, _END.size, max(size - _END.size, 0))
    return _END.unpack(data)[5] if len(data) == _END.size and data.startswith(b"PK\5\6") else 0


def _read(fd: int, offset: int, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = os.pread(fd, length - len(data), offset + len(data))
        if not more:
            raise _Bad(f"it ends {length - len(data)} bytes early")
        data += more
    return data


def _directory(fd: int, size: int) -> tuple[int, list[_Record]]:
    """Where the directory begins, and what it lists."""
    if size < _END.size:
        raise _Bad(f"no zip: {size} bytes")
    if _read(fd, 0, 2) == b"\x80\x02":
        raise _Bad(
            "a pickle of torch before 1.6, or one without a zip around it: nothing in it can be checked"
        )
    magic, disk, first, here, count, length, start, comment = _END.unpack(
        _read(fd, size - _END.size, _END.size)
    )
    if magic != b"PK\5\6":
        raise _Bad("no zip directory at its end: cut off, or something else than torch.save wrote it")
    end = size - _END.size
    if (disk, first, comment) != (0, 0, 0):
        raise _Bad("the zip's end record is damaged")
    short = (here, count, length, start)
    locator = _read(fd, end - _LOCATOR.size, _LOCATOR.size) if end >= _LOCATOR.size + _END64.size else b""
    if locator.startswith(b"PK\6\7"):
        end, (here, count, length, start) = _end64(fd, end, locator)
        limits = (_FULL16, _FULL16, _FULL32, _FULL32)
        if any(
            said not in (min(value, limit), limit)
            for said, value, limit in zip(short, (here, count, length, start), limits, strict=True)
        ):
            raise _Bad("the zip's two end records contradict each other")
    if here != count or start + length != end or length > _MAX_DIRECTORY:
        raise _Bad("the zip's end record is damaged")
    return start, _records(_read(fd, start, length), count)


def _end64(fd: int, end: int, locator: bytes) -> tuple[int, tuple[int, int, int, int]]:
    _, disk, place, disks = _LOCATOR.unpack(locator)
    if (disk, disks) != (0, 1) or place != end - _LOCATOR.size - _END64.size:
        raise _Bad("the zip64 locator is damaged")
    magic, rest, made, needed, disk, first, here, count, length, start = _END64.unpack(
        _read(fd, place, _END64.size)
    )
    plain = magic == b"PK\6\6" and rest == _END64.size - 12 and (disk, first) == (0, 0)
    if not plain or (made, needed) not in _WRITERS64:
        raise _Bad("the zip64 end record is damaged")
    return place, (here, count, length, start)


def _records(data: bytes, count: int) -> list[_Record]:
    records: list[_Record] = []
    at = 0
    while at + _CENTRAL.size <= len(data):
        magic, *words = _CENTRAL.unpack_from(data, at)
        (
            made,
            needed,
            flags,
            method,
            time,
            date,
            crc,
            packed,
            size,
            name,
            extra,
            comment,
            disk,
            inside,
            outside,
            place,
        ) = words
        at += _CENTRAL.size
        if magic != b"PK\1\2" or comment or method or at + name + extra > len(data):
            raise _Bad("the zip's directory is damaged")
        text, more = data[at : at + name], data[at + name : at + name + extra]
        at += name + extra
        packed, size, place = _wide(more, packed, size, place)
        if packed != size:
            raise _Bad("the zip's directory is damaged: a stored record of two sizes")
        common: tuple[int, ...] = (made, needed, flags, method, time, date, disk, inside, outside)
        if records and common != records[0].common:
            raise _Bad("the zip's directory is damaged: its records disagree")
        common = records[0].common if records else common
        records.append(_Record(text, common, crc, size, place))
    if at != len(data) or len(records) != count:
        raise _Bad("the zip's directory is damaged")
    _check_names(records)
    return records


def _check_names(records: list[_Record]) -> None:
    names = {record.name for record in records}
    tops = {name.split(b"/", 1)[0] for name in names}
    if len(names) != len(records) or len(tops) != 1 or not names >= {top + b"/data.pkl" for top in tops}:
        raise _Bad("a zip, but not one of torch.save")
    if not any(record.crc for record in records):
        raise _Bad(
            "written without checksums (torch.serialization.set_crc32_options(False)): it cannot be checked"
        )


def _wide(extra: bytes, packed: int, size: int, place: int) -> tuple[int, int, int]:
    """The three numbers, from the zip64 field where the directory has no room for them."""
    fields = dict(_fields(extra))
    if set(fields) - {_ZIP64}:
        raise _Bad("the zip's directory is damaged: an unknown field")
    data = fields.get(_ZIP64, b"")
    wide = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    values = []
    for value in (size, packed, place):  # in this order
        if value == _FULL32 and not wide:
            raise _Bad("the zip's directory is damaged: a size is missing")
        values.append(wide.pop(0) if value == _FULL32 else value)
    if wide or len(data) % 8:
        raise _Bad("the zip's directory is damaged: a size too many")
    return values[1], values[0], values[2]


def _fields(extra: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], 0
    while at < len(extra):
        length = int.from_bytes(extra[at + 2 : at + 4], "little")
        if at + 4 + length > len(extra):
            raise _Bad("an extra field of the zip is damaged")
        found.append((extra[at : at + 2], extra[at + 4 : at + 4 + length]))
        at += 4 + length
    return found


def _check_record(
    fd: int, record: _Record, position: int, limit: int, on_bytes: Callable[[int], None]
) -> int:
    """Hold one record, header to descriptor, to what the directory says; returns where it ends."""
    name = record.name.decode("utf-8", "replace")
    if record.offset != position:
        raise _Bad(f"the record {name} does not begin where the one before it ends")
    magic, needed, flags, method, time, date, crc, packed, size, len_name, len_extra = _LOCAL.unpack(
        _read(fd, position, _LOCAL.size)
    )
    common = record.common
    if (
        magic != b"PK\3\4"
        or (needed, flags, method, time, date) != common[1:6]
        or len_name != len(record.name)
    ):
        raise _Bad(f"the header of the record {name} is damaged")
    follows = bool(flags & _FOLLOWS)
    said = (crc, packed, size)
    known = (record.crc, record.size, record.size)
    wide = (record.crc, _FULL32, _FULL32)
    if said not in ((known, wide, (0, 0, 0), (0, _FULL32, _FULL32)) if follows else (known, wide)):
        raise _Bad(f"the header of the record {name} is damaged")
    begin = position + _LOCAL.size
    words = _read(fd, begin, len_name + len_extra)
    if words[:len_name] != record.name:
        raise _Bad(f"the record {name} has another name in its header")
    for kind, data in _fields(words[len_name:]):
        if kind == _PADDING:
            good = data == b"Z" * len(data)
        else:
            numbers = {int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)}
            good = kind == _ZIP64 and len(data) % 8 == 0 and numbers <= {0, record.size, record.offset}
        if not good:
            raise _Bad(f"the header of the record {name} is damaged")
    begin += len_name + len_extra
    if begin + record.size > limit:
        raise _Bad(f"the record {name} reaches into the zip's directory")
    on_bytes(begin - position)
    if _crc(fd, begin, record.size, on_bytes) != record.crc:
        raise _Bad(f"the record {name} has another CRC-32 than when it was saved: its bytes have changed")
    end = begin + record.size
    return _check_descriptor(fd, record, end) if follows else end


def _crc(fd: int, begin: int, length: int, on_bytes: Callable[[int], None]) -> int:
    crc, done = 0, 0
    buffer = memoryview(bytearray(min(_BLOCK, max(length, 1))))
    while done < length:
        count = os.preadv(fd, [buffer[: min(len(buffer), length - done)]], begin + done)
        if not count:
            raise _Bad(f"it ends {length - done} bytes early")
        crc = zlib.crc32(buffer[:count], crc)
        done += count
        on_bytes(count)
    return crc


def _check_descriptor(fd: int, record: _Record, end: int) -> int:
    for form in ("<4s3I", "<4sI2Q"):
        layout = struct.Struct(form)
        if record.size > _FULL32 and layout.size == 16:
            continue
        wanted = layout.pack(b"PK\7\10", record.crc, record.size, record.size)
        if _read(fd, end, layout.size) == wanted:
            # 8-byte sizes below 4 GiB begin like 4-byte ones; what comes next tells them apart.
            after = end + layout.size
            if layout.size == 24 or _read(fd, after, 2) == b"PK":
                return after
    raise _Bad(f"what follows the record {record.name.decode('utf-8', 'replace')} is damaged")
