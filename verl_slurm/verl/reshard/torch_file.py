"""Opens a file of torch.save as a pickle and byte ranges, and writes one of such parts. No torch.

```
NAME/data.pkl             the pickle (`torch_pickle`)
NAME/data/<key>           the bytes of one storage
NAME/.format_version, .storage_alignment, byteorder, version, .data/serialization_id
```

All records are stored, not compressed, and their data begin at multiples of 64 bytes, so that torch can map them. NAME
is the file's name without `.pt`. `torch_zip` says whether such a file is whole.
"""

import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_slurm.base.files import open_new
from verl_slurm.verl.reshard.torch_pickle import PickleProblem, Storage, dump, load

_HEADER_BYTES = 30
_ZIP64_BYTES = 20
_ZIP64_FROM = 1 << 31
_ALIGNMENT = 64
_PADDING = 0x4246
"""The id of the extra field that torch pads with."""
_BLOCK = 4 << 20
_MAX_SMALL = 64 << 20
_MSDOS_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Part:
    """Bytes of a new storage: a range of an open file, or those in `data`."""

    num_bytes: int
    fd: int = -1
    offset: int = 0
    data: bytes | None = None


class TorchFile:
    """A file of torch.save.

    Args:
        fd: of the file, open to read; the caller closes it.

    Attributes:
        value: what it describes (`torch_pickle.load`).
        small: its records besides the pickle and the storages, by their names without NAME/.

    Raises:
        PickleProblem: torch.save has not written it for a state dict.
        OSError: it cannot be read.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        try:
            self._records = _records(fd)
            self.value: Any = load(self._read("data.pkl"))
            names = [name for name in self._records if not name.startswith("data/") and name != "data.pkl"]
            self.small = {name: self._read(name) for name in names}
        except (zipfile.BadZipFile, KeyError, struct.error) as error:
            raise PickleProblem(f"not a file of torch.save: {error}") from None
        # Written by a big-endian machine: the bytes of a tensor could be moved, those of new values could not.
        if self.small.get("byteorder", b"little") != b"little":
            raise PickleProblem("written by a big-endian machine")

    def place(self, storage: Storage, itemsize: int) -> int:
        """Returns where the bytes of a storage begin.

        Raises:
            PickleProblem: it is not there, or not as long as the pickle says.
        """
        begin, size = self._records.get(f"data/{storage.key}", (0, -1))
        if size != storage.numel * itemsize:
            raise PickleProblem(f"storage {storage.key} of {storage.numel} elements has {size} bytes")
        return begin

    def _read(self, name: str) -> bytes:
        begin, size = self._records[name]
        if size > _MAX_SMALL:
            raise PickleProblem(f"{name} of {size} bytes, at most {_MAX_SMALL}")
        data = os.pread(self.fd, size, begin)
        if len(data) != size:
            raise PickleProblem(f"{name} is cut off")
        return data


def _records(fd: int) -> dict[str, tuple[int, int]]:
    """Returns begin and size of each record's data."""
    with os.fdopen(os.dup(fd), "rb") as file, zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
    found = {}
    for info in infos:
        # Names and extra fields of the record's own header may be longer than the directory's.
        lengths = os.pread(fd, 4, info.header_offset + _HEADER_BYTES - 4)
        begin = info.header_offset + _HEADER_BYTES + sum(struct.unpack("<2H", lengths))
        found[info.filename.partition("/")[2]] = (begin, info.file_size)
    return found


def write_torch_file(
    path: Path,
    value: Any,
    storages: Iterable[tuple[str, Iterable[Part]]],
    small: Mapping[str, bytes],
    on_bytes: Callable[[int], None] = lambda _: None,
) -> None:
    """Writes a new file, 0600, that torch.load reads as `value`. Not durable: a commit seals it.

    Args:
        value: a description (`torch_pickle`).
        storages: key and bytes of each storage that `value` names, in the order in which they are written.
        small: the other records, from the file that this one is made of.
        on_bytes: told how many more bytes of storages were written.

    Raises:
        OSError: a part cannot be read or written.
        PickleProblem: `value` cannot be written.
    """
    name, data = path.stem, dump(value)
    with os.fdopen(open_new(path), "w+b") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        # In torch's order, except that `version` and the id come before the storages.
        for inner, content in {"data.pkl": data, **small}.items():
            _write_record(archive, file.tell(), f"{name}/{inner}", len(content), [content])
        for key, parts in storages:
            listed = list(parts)
            size = sum(part.num_bytes for part in listed)
            blocks = (block for part in listed for block in _blocks(part, on_bytes))
            _write_record(archive, file.tell(), f"{name}/data/{key}", size, blocks)


def _write_record(archive: zipfile.ZipFile, at: int, name: str, size: int, blocks: Iterable[bytes]) -> None:
    info = zipfile.ZipInfo(name, _MSDOS_EPOCH)
    large = size >= _ZIP64_FROM
    begin = at + _HEADER_BYTES + len(name.encode()) + 4 + (_ZIP64_BYTES if large else 0)
    padding = -begin % _ALIGNMENT
    info.extra = struct.pack("<2H", _PADDING, padding) + b"Z" * padding
    info.file_size = size
    with archive.open(info, "w", force_zip64=large) as record:
        for block in blocks:
            record.write(block)
    # The directory needs no padding, and is read into memory.
    info.extra = b""


def _blocks(part: Part, on_bytes: Callable[[int], None]) -> Iterator[bytes]:
    if part.data is not None:
        yield part.data
        return
    for block in read_range(part.fd, part.offset, part.num_bytes):
        yield block
        on_bytes(len(block))


def read_range(fd: int, offset: int, num_bytes: int) -> Iterator[bytes]:
    """Yields the bytes of a range of an open file, in blocks of at most 4 MiB.

    Raises:
        OSError: it cannot be read, or the file ends before.
    """
    while num_bytes > 0:
        block = os.pread(fd, min(_BLOCK, num_bytes), offset)
        if not block:
            raise OSError(f"the file ends {num_bytes} bytes before it should")
        yield block
        offset, num_bytes = offset + len(block), num_bytes - len(block)
