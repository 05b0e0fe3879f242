import io
import os
import struct
import threading
import zipfile
from pathlib import Path

import pytest
import torch

from verl_slurm.verl import torch_zip
from verl_slurm.verl.torch_zip import zip_problem

pytestmark = pytest.mark.torch


def judge(data: bytes) -> str:
    fd = os.memfd_create("shard")
    try:
        os.write(fd, data)
        return zip_problem(fd)
    finally:
        os.close(fd)


_OVERLAP = "Overlapped entries"
"""zipfile's own words in Python 3.13, which looks for records that share bytes before it reads one."""


@pytest.fixture(scope="module")
def shard() -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(30.0), "b": torch.ones(3), "n": [1, 2]}, buffer)
    return buffer.getvalue()


def test_what_torch_saved_is_whole_and_all_of_it_was_read(shard: bytes) -> None:
    read: list[int] = []
    fd = os.memfd_create("shard")
    os.write(fd, shard)
    assert zip_problem(fd, read.append) == ""
    os.close(fd)
    assert len(shard) * 0.9 < sum(read) <= len(shard)


def loaded(data: bytes) -> str:
    """What torch makes of it; empty: it refuses."""
    try:
        return str(torch.load(io.BytesIO(data), weights_only=True))
    except Exception:  # noqa: BLE001 - torch raises anything for a damaged file
        return ""


def infos_of(data: bytes) -> list[zipfile.ZipInfo]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.infolist()


def begin_of(data: bytes, info: zipfile.ZipInfo) -> int:
    return info.header_offset + 30 + sum(struct.unpack_from("<2H", data, info.header_offset + 26))


def test_any_flipped_bit_of_a_records_bytes_is_found(shard: bytes) -> None:
    for info in infos_of(shard):
        begin = begin_of(shard, info)
        for bit in range(begin * 8, (begin + info.file_size) * 8):
            assert "CRC-32" in judge(flipped(shard, bit))


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_a_flipped_bit_that_is_not_found_changes_nothing_that_torch_loads(shard: bytes) -> None:
    good, missed = loaded(shard), 0
    for bit in range(0, len(shard) * 8, 11):
        damaged = flipped(shard, bit)
        if not judge(damaged):
            missed += 1
            assert loaded(damaged) in (good, ""), f"bit {bit % 8} at {bit // 8}"
    assert missed < len(shard) * 8 / 11 / 2


@pytest.mark.parametrize("block", [64, 512])
def test_a_block_of_zeroes_as_a_lost_page_leaves_it_is_found_where_it_matters(
    shard: bytes, block: int
) -> None:
    for at in range(0, len(shard) - block, block):
        damaged = shard[:at] + bytes(block) + shard[at + block :]
        assert judge(damaged) or loaded(damaged) == loaded(shard), at


@pytest.mark.parametrize("alignment", [64, 4096, 60_000])
@pytest.mark.parametrize("field", [b"FB", b"XY", b"\x35\xd9"])
def test_another_padding_than_todays_torch_writes_is_no_damage(
    shard: bytes, alignment: int, field: bytes
) -> None:
    """Python's writer repeats the padding in the directory, and puts the sizes into the local header."""
    padded = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(shard)) as old, zipfile.ZipFile(padded, "w") as new:
        for number, info in enumerate(old.infolist()):
            later = zipfile.ZipInfo(info.filename, (2030, 1, 1 + number, 0, 0, 0))
            missing = -(padded.tell() + 30 + len(info.filename) + 4) % alignment
            later.extra = field + struct.pack("<H", missing) + bytes(missing)
            new.writestr(later, old.read(info))
    assert loaded(padded.getvalue()) == loaded(shard)
    assert judge(padded.getvalue()) == ""
    at = begin_of(padded.getvalue(), next(i for i in infos_of(padded.getvalue()) if i.file_size > 100))
    assert "CRC-32" in judge(flipped(padded.getvalue(), at * 8))


def python_zip(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(name), b"hello")
    return buffer.getvalue()


def test_what_is_no_whole_file_of_torch_save_with_checksums_is_refused_for_its_reason(shard: bytes) -> None:
    assert all(judge(shard[:length]) for length in range(len(shard)))
    assert judge(shard + b"\0")
    assert judge(shard + shard)
    assert judge(b"") == "empty: 0 bytes"
    former, unchecked = io.BytesIO(), io.BytesIO()
    torch.save({"w": torch.ones(3)}, former, _use_new_zipfile_serialization=False)
    assert "nothing in it can be checked" in judge(former.getvalue())
    try:
        torch.serialization.set_crc32_options(False)
        torch.save({"w": torch.ones(3)}, unchecked)
    finally:
        torch.serialization.set_crc32_options(True)
    assert "written without checksums" in judge(unchecked.getvalue())
    assert judge(python_zip("a/readme")) == "a zip, but not one of torch.save"
    assert judge(python_zip("a/data.pkl", "a/version")) == ""


def test_a_directory_that_claims_gigabytes_is_not_read(tmp_path: Path, shard: bytes) -> None:
    """The file is a hole as large as it claims."""
    end64 = bytearray(shard[-98:])
    end64[40:48] = (1 << 33).to_bytes(8, "little")
    end64[48:56] = bytes(8)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, 0xFFFFFFF0, 0, 0)
    for tail in (bytes(end64), end):
        path = tmp_path / "hole.pt"
        with path.open("wb") as file:
            file.seek(1 << 33)
            file.write(tail)
        fd = os.open(path, os.O_RDONLY)
        assert "at most 16777216" in zip_problem(fd)
        os.close(fd)


def entries_of(data: bytes) -> list[int]:
    """Where each record's entry in the directory begins."""
    entries = [infos_of(data)[-1].header_offset]
    while (at := data.find(b"PK\1\2", entries[-1] + 1)) >= 0:
        entries.append(at)
    return entries[1:]


def patched(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


@pytest.mark.parametrize(
    ("at", "new", "what"),
    [
        (8, b"\x01\x08", "as torch.save does not"),  # encrypted
        (10, b"\x08\x00", "as torch.save does not"),  # deflated
        (10, b"\x0e\x00", "as torch.save does not"),  # LZMA
        (24, b"\xff\xff\xff\x7f", "as torch.save does not"),  # one size of two
        (20, b"\xff\xff\xff\x7f" * 2, "cut off"),  # larger than the file
        (32, b"\x01\x00", "damaged"),  # a comment
        (34, b"\x01\x00", "as torch.save does not"),  # on another disk
        (38, b"\x10", "as torch.save does not"),  # a directory
        (42, bytes(4), "damaged"),  # where the first record is
        (42, b"\xff\xff\xff\x7f", "damaged"),
    ],
)
def test_what_no_torch_writes_into_the_directory_is_refused(
    shard: bytes, at: int, new: bytes, what: str
) -> None:
    entries = entries_of(shard)
    assert len(entries) == len(infos_of(shard))
    found = judge(patched(shard, entries[3] + at, new))
    assert what in found or _OVERLAP in found


def test_records_that_share_bytes_are_refused() -> None:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr(zipfile.ZipInfo("a/data/1"), b"x" * 100)
    outer = io.BytesIO()
    with zipfile.ZipFile(outer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("a/data.pkl"), inner.getvalue())
        archive.writestr(zipfile.ZipInfo("a/data/1"), b"x" * 100)
    data = outer.getvalue()
    assert judge(data) == ""
    within = patched(data, entries_of(data)[1] + 42, struct.pack("<I", data.index(inner.getvalue()[:30])))
    with zipfile.ZipFile(io.BytesIO(within)) as archive:
        assert len(archive.read("a/data/1")) == 100
    found = judge(within)
    assert "records overlap" in found or _OVERLAP in found


def test_bytes_that_belong_to_no_record_are_refused(shard: bytes) -> None:
    assert "belong to no record" in judge(b"x" * 100 + shard)
    hidden = io.BytesIO()
    with zipfile.ZipFile(hidden, "w") as archive:
        archive.writestr(zipfile.ZipInfo("a/data.pkl"), b"x")
        hidden.seek(100_000)
        archive.start_dir = 100_000
        archive.writestr(zipfile.ZipInfo("a/version"), b"3")
    assert "belong to no record" in judge(hidden.getvalue())


def test_a_directory_with_many_records_is_alone_in_memory(shard: bytes) -> None:
    many = io.BytesIO()
    with zipfile.ZipFile(many, "w") as archive:
        for name in ("a/data.pkl", *(f"a/data/{number}" for number in range(3000))):
            archive.writestr(zipfile.ZipInfo(name), b"x")
    for data, alone in ((shard, False), (many.getvalue(), True)):
        turn = threading.Lock()
        held: set[bool] = set()
        fd = os.memfd_create("shard")
        os.write(fd, data)
        assert zip_problem(fd, lambda _, turn=turn, held=held: held.add(turn.locked()), turn=turn) == ""
        os.close(fd)
        assert alone in held
        assert not turn.locked()


def test_a_record_of_more_than_4_gib_needs_the_wide_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch writes it: a zip64 field in the directory, and 8-byte sizes behind the data."""
    size = (1 << 32) + 5
    name = b"a/data.pkl"
    wide = struct.pack("<2sHQQ", b"\1\0", 16, size, size)
    common = (0, 0x0808, 0, 0, 0)
    local = struct.pack("<4s5H3I2H", b"PK\3\4", *common, 0, 0, 0, len(name), len(wide)) + name + wide
    crc = 0x12345678
    descriptor = struct.pack("<4sI2Q", b"PK\7\10", crc, size, size)
    start = len(local) + size + len(descriptor)
    words = (0, *common, crc, 0xFFFFFFFF, 0xFFFFFFFF, len(name), len(wide), 0, 0, 0, 0, 0)
    central = struct.pack("<4s6H3I5H2I", b"PK\1\2", *words) + name + wide
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0x031E, 0x2D, 0, 0, 1, 1, len(central), start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, start + len(central), 1)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(central), 0xFFFFFFFF, 0)
    path = tmp_path / "large.pt"
    with path.open("wb") as file:
        file.write(local)
        file.seek(len(local) + size)
        file.write(descriptor + central + end64 + locator + end)
    fd = os.open(path, os.O_RDONLY)
    try:
        # The record is a hole with a made-up checksum: reading 4 GiB of it would tell nothing of the directory.
        monkeypatch.setattr(torch_zip, "_check_records", lambda *_: 0)
        assert zip_problem(fd) == ""
    finally:
        os.close(fd)
