"""Sixteen chunks at once: the digests of hashlib, whatever the number and the length of the pieces."""

import hashlib
import random
import sys

import pytest

from verl_slurm.save_path import lanes
from verl_slurm.save_path.lanes import LANES, Hasher, hash_each, make_hasher, worth_it

FEATURES = {"avx512f": False, "avx2": True, "sha": True}


@pytest.fixture(scope="module")
def side_by_side() -> Hasher:
    """Compiled for any processor, wide registers or not: LLVM splits what does not fit."""
    llvm = pytest.importorskip("llvmlite.binding")
    return lanes._SideBySide(lanes._compile(llvm.get_host_cpu_features().flatten()))


def pieces(sizes: list[int]) -> list[memoryview]:
    memory = memoryview(bytearray(random.Random(7).randbytes(sum(sizes))))
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [memory[end - size : end] for end, size in zip(ends, sizes, strict=True)]


@pytest.mark.parametrize("count", [1, 6, 7, LANES - 1, LANES, LANES + 1, 3 * LANES])
def test_any_number_of_pieces_of_one_length(side_by_side: Hasher, count: int) -> None:
    some = pieces([4096] * count)
    assert side_by_side(some) == [hashlib.sha256(piece).digest() for piece in some]


@pytest.mark.parametrize("length", [0, 1, 55, 56, 63, 64, 65, 119, 120, 127, 128, 1000, 100_003])
def test_every_length_of_the_padding(side_by_side: Hasher, length: int) -> None:
    some = pieces([length] * LANES)
    assert side_by_side(some) == [hashlib.sha256(piece).digest() for piece in some]


def test_pieces_of_several_lengths_keep_their_order(side_by_side: Hasher) -> None:
    some = pieces([64, 4096, 0] * 20 + [17])
    assert side_by_side(some) == [hashlib.sha256(piece).digest() for piece in some]


def test_the_examples_of_the_standard(side_by_side: Hasher) -> None:
    """FIPS 180-2, appendix B: "abc", and a million letters."""
    for text, digest in (
        (b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
        (b"a" * 1_000_000, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"),
    ):
        found = side_by_side([memoryview(bytearray(text))] * LANES)
        assert found == [bytes.fromhex(digest)] * LANES


@pytest.mark.parametrize(
    ("what", "expected"),
    [({}, False), ({"avx512f": True}, True), ({"sha": False}, True), ({"sha": False, "avx2": False}, False)],
)
def test_it_is_used_where_it_is_faster(what: dict[str, bool], expected: bool) -> None:
    assert worth_it(FEATURES | what) is expected


def test_without_the_compiler_hashlib_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    assert make_hasher() is hash_each


def test_a_compiler_that_gets_it_wrong_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, side_by_side: Hasher
) -> None:
    def wrong(features: str) -> object:
        code = side_by_side._code  # type: ignore[attr-defined]

        def call(state: int, pointers: int, count: int) -> None:
            code.call(state, pointers, count - (count == 4))

        return lanes._Code(call, code)

    monkeypatch.setattr(lanes, "worth_it", lambda features: True)
    monkeypatch.setattr(lanes, "_compile", wrong)
    assert make_hasher() is hash_each


def test_a_processor_that_llvm_does_not_know_hashes_one_by_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llvm = pytest.importorskip("llvmlite.binding")

    def unknown() -> None:
        raise RuntimeError("failed to get host cpu features.")

    monkeypatch.setattr(llvm, "get_host_cpu_features", unknown)
    assert make_hasher() is hash_each
    assert "one by one: RuntimeError" in capsys.readouterr().err


def test_where_made_code_may_not_run_llvm_is_not_asked_to_make_any(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite.binding")
    assert lanes._may_run_what_is_made()
    monkeypatch.setattr(lanes, "worth_it", lambda features: True)
    monkeypatch.setattr(lanes, "_may_run_what_is_made", lambda: False)
    monkeypatch.setattr(lanes, "_compile", lambda features: pytest.fail("LLVM would end the process"))
    assert make_hasher() is hash_each
