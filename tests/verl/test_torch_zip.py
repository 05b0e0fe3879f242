import io
import os
import zipfile
from pathlib import Path

import pytest
import torch

from verl_slurm.verl.torch_zip import zip_problem

pytestmark = pytest.mark.torch


def judge(data: bytes, *, read_all: bool = True) -> str:
    fd = os.memfd_create("shard")
    try:
        os.write(fd, data)
        return zip_problem(fd, read_all=read_all)
    finally:
        os.close(fd)


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


def test_any_single_flipped_bit_is_found(shard: bytes) -> None:
    fd = os.memfd_create("shard")
    os.write(fd, shard)
    missed = []
    for bit in range(len(shard) * 8):
        at = bit // 8
        os.pwrite(fd, bytes([shard[at] ^ 1 << bit % 8]), at)
        if not zip_problem(fd):
            missed.append((at, bit % 8))
        os.pwrite(fd, shard[at : at + 1], at)
    os.close(fd)
    assert missed == []


def test_any_truncation_is_found_even_by_a_look_at_the_directory_alone(shard: bytes) -> None:
    assert all(judge(shard[:length], read_all=False) for length in range(len(shard)))


def test_anything_behind_the_end_is_found(shard: bytes) -> None:
    assert judge(shard + b"\0")
    assert judge(shard + shard)


@pytest.mark.parametrize("block", [64, 512])
def test_a_block_of_zeroes_as_a_lost_page_leaves_it_is_found(shard: bytes, block: int) -> None:
    for at in range(0, len(shard) - block, block):
        if any(shard[at : at + block]):
            assert judge(shard[:at] + bytes(block) + shard[at + block :]), at


def test_an_empty_file_says_so() -> None:
    assert judge(b"") == "empty: 0 bytes"


def test_a_pickle_without_a_zip_is_refused_because_nothing_vouches_for_it() -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(3)}, buffer, _use_new_zipfile_serialization=False)
    assert "nothing in it can be checked" in judge(buffer.getvalue())


def test_a_shard_written_without_checksums_is_refused_for_that_reason() -> None:
    buffer = io.BytesIO()
    try:
        torch.serialization.set_crc32_options(False)
        torch.save({"w": torch.ones(3)}, buffer)
    finally:
        torch.serialization.set_crc32_options(True)
    assert "written without checksums" in judge(buffer.getvalue())


def test_a_zip_of_somebody_else_is_not_a_shard() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/readme", b"hello")
    assert judge(buffer.getvalue()) == "a zip, but not one of torch.save"


def test_a_plain_zip_of_pythons_with_the_records_of_torch_passes() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in ("a/data.pkl", "a/version"):
            archive.writestr(zipfile.ZipInfo(name), b"hello")
    assert judge(buffer.getvalue()) == ""


def test_a_directory_that_claims_gigabytes_costs_no_memory(shard: bytes) -> None:
    end = bytearray(shard[-22:])
    end[12:16] = (0xFFFFFFF0).to_bytes(4, "little")
    assert judge(shard[:-22] + bytes(end))


def test_a_sparse_shard_of_more_than_4_gib_needs_the_wide_numbers(tmp_path: Path) -> None:
    """Made by hand: torch writes such a record with a zip64 field in the directory and 8-byte sizes behind the data."""
    import struct

    from verl_slurm.verl import torch_zip

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
        assert zip_problem(fd, read_all=False) == ""
        (record,) = torch_zip._directory(fd, os.fstat(fd).st_size)[1]
        assert (record.size, record.offset) == (size, 0)
        assert torch_zip._check_descriptor(fd, record, len(local) + size) == start
    finally:
        os.close(fd)
