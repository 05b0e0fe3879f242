"""Pickles that are read as descriptions: what torch writes comes out as it went in, and nothing is ever called."""

import io
import os
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from verl_slurm.verl.reshard import torch_file
from verl_slurm.verl.reshard.torch_file import Part, TorchFile, write_torch_file
from verl_slurm.verl.reshard.torch_pickle import Made, Name, PickleProblem, Storage, dump, load
from verl_slurm.verl.torch_zip import zip_problem

pytestmark = pytest.mark.torch


def described(value: Any) -> Any:
    """The description of what torch.save makes of a value."""
    file = io.BytesIO()
    torch.save(value, file)
    with zipfile.ZipFile(file) as archive:
        return load(archive.read("archive/data.pkl"))


class _Called:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/nowhere/else",)


def test_a_tensor_is_a_call_with_a_storage_and_a_call_is_never_made() -> None:
    found = described({"w": torch.ones(2, 3, dtype=torch.bfloat16), "odd": _Called()})
    tensor = found["w"]
    assert tensor.func == Name("torch._utils", "_rebuild_tensor_v2")
    assert tensor.args[:4] == (Storage(Name("torch", "BFloat16Storage"), "0", "cpu", 6), 0, (2, 3), (3, 1))
    assert found["odd"] == Made(Name("posix", "mkdir"), ("/nowhere/else",))


def test_what_is_written_is_read_as_the_same_again() -> None:
    shared = [1, 2.5, None, True, "text", -(2**70)]
    value = described({"a": shared, "b": (shared, shared), 3: {}, "t": torch.arange(3), "i": 2**40})
    again = load(dump(value))
    assert again == value
    assert again["b"][0] is again["b"][1] is again["a"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x02}q\x00",
        pickle.dumps({"a": 1}, protocol=4),
        # Opcodes that torch.save has no use for: they import, call or make classes by themselves.
        b"\x80\x02(ios\nsystem\n.",
        b"\x80\x02]q\x00(K\x01oq\x01.",
        b"\x80\x02(dq\x00.",
        b"\x80\x02cos\nsystem\n(X\x01\x00\x00\x00atRq\x00(tR.",
        b"\x80\x02X\x01\x00\x00\x00aQ.",
        b"\x80\x02cos\nsystem\n}b.",
        b"\x80\x02h\x07.",
    ],
    ids=[
        "empty",
        "cut",
        "newer",
        "inst",
        "obj",
        "dict",
        "call of a call",
        "no storage",
        "state of a name",
        "memo",
    ],
)
def test_what_torch_does_not_write_is_refused(data: bytes) -> None:
    with pytest.raises(PickleProblem):
        load(data)


def test_nesting_without_end_is_refused() -> None:
    deep = b"\x80\x02" + b"(" * 20_000 + b"t" * 20_000 + b"."
    with pytest.raises(PickleProblem):
        dump(load(deep))


def test_no_change_of_bytes_does_anything_but_refuse() -> None:
    draw = random.Random(7)
    print("seed 7")
    whole = bytearray(pickle.dumps({"a": [1, (2, "x")], "b": {"c": None}}, protocol=2))
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            load(bytes(data))
        except PickleProblem:
            continue


@pytest.mark.parametrize("large", [False, True], ids=["small", "zip64"])
def test_a_file_that_is_written_is_torchs_own_whole_and_aligned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """Records of 2 GiB and more have longer headers; here all of them have."""
    if large:
        monkeypatch.setattr(torch_file, "_ZIP64_FROM", 0)
    first, second = tmp_path / "first.pt", tmp_path / "second.pt"
    torch.save({"w": torch.arange(1000.0), "n": torch.arange(3)}, first)
    with first.open("rb") as opened:
        file = TorchFile(opened.fileno())
        storages = [file.value[name].args[0] for name in ("w", "n")]
        places = [file.place(one, size) for one, size in zip(storages, (4, 8), strict=True)]
        parts = [
            (storages[0].key, [Part(400, file.fd, places[0]), Part(3600, file.fd, places[0] + 400)]),
            (storages[1].key, [Part(24, data=b"".join(n.to_bytes(8, "little") for n in (7, 8, 9)))]),
        ]
        write_torch_file(second, file.value, parts, file.small)
    found = torch.load(second, weights_only=True, mmap=True)
    assert torch.equal(found["w"], torch.arange(1000.0))
    assert found["n"].tolist() == [7, 8, 9]
    with open(second, "rb") as opened:
        assert zip_problem(opened.fileno()) == ""
    with second.open("rb") as opened:
        file = TorchFile(opened.fileno())
        assert [begin % 64 for begin, _ in file._records.values()] == [0] * len(file._records)


def test_a_storage_that_is_shorter_than_its_tensor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.arange(10.0)}, path)
    with path.open("rb") as opened:
        file = TorchFile(opened.fileno())
        storage = file.value["w"].args[0]
        with pytest.raises(PickleProblem, match="40 bytes"):
            file.place(storage, 8)
