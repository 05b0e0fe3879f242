"""Which indexes are believed."""

from typing import Any

import msgspec
import pytest

from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.checkpoint.format.tensor_index import (
    Piece,
    TensorEntry,
    TensorIndex,
    parse_index,
    render_index,
    slabs,
    tensor_file,
)

WHOLE: dict[str, Any] = {
    "format": 1,
    "tensors": {
        "w": {
            "dtype": "float32",
            "shape": [4, 2],
            "pieces": [
                {"file": "rank_0000.bin", "at": 0, "offset": [0, 0], "shape": [3, 2]},
                {"file": "rank_0001.bin", "at": 64, "offset": [3, 0], "shape": [1, 2]},
            ],
        },
        "scalar": {
            "dtype": "int64",
            "shape": [],
            "pieces": [{"file": "rank_0000.bin", "at": 128, "offset": [], "shape": []}],
        },
        "empty": {"dtype": "bfloat16", "shape": [0, 3], "pieces": []},
    },
}


def _parse(value: object) -> TensorIndex:
    return parse_index(msgspec.json.encode(value), where="index.json")


def test_an_index_survives_being_written_and_read() -> None:
    index = _parse(WHOLE)
    assert parse_index(render_index(index), where="x") == index
    assert index.tensors["w"].num_bytes == 32
    assert tensor_file(12) == "rank_0012.bin"


RUNS: dict[str, Any] = {
    "format": 1,
    "tensors": {
        "w": {
            "dtype": "float32",
            "shape": [6, 4],
            "pieces": [
                {"file": "rank_0000.bin", "at": 0, "offset": [0, 0], "shape": [2, 2], "count": 3, "every": 2},
                {
                    "file": "rank_0001.bin",
                    "at": 64,
                    "offset": [0, 2],
                    "shape": [2, 2],
                    "count": 2,
                    "every": 2,
                },
                {"file": "rank_0005.bin", "at": 0, "offset": [4, 2], "shape": [1, 1], "count": 2, "axis": 1},
                {"file": "rank_0005.bin", "at": 64, "offset": [5, 2], "shape": [1, 2]},
            ],
        }
    },
}


def test_a_run_stands_for_its_pieces() -> None:
    index = _parse(RUNS)
    assert parse_index(render_index(index), where="x") == index
    entry = index.tensors["w"]
    assert entry.num_pieces == 8
    assert [(piece.file, piece.at, piece.offset) for piece in entry.without_runs().pieces] == [
        ("rank_0000.bin", 0, (0, 0)),
        ("rank_0002.bin", 0, (2, 0)),
        ("rank_0004.bin", 0, (4, 0)),
        ("rank_0001.bin", 64, (0, 2)),
        ("rank_0003.bin", 64, (2, 2)),
        ("rank_0005.bin", 0, (4, 2)),
        ("rank_0006.bin", 0, (4, 3)),
        ("rank_0005.bin", 64, (5, 2)),
    ]
    run = entry.pieces[0]
    assert [piece.offset[0] for piece in run.between(1, 3)] == [0, 2]
    assert [piece.offset[0] for piece in run.between(4, 100)] == [4]
    assert list(run.between(6, 9)) == []
    assert [part.shape for part in slabs(entry, 48)] == [(3, 4), (3, 4)]


def _run(number: int, **changes: Any) -> dict[str, Any]:
    tree: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(RUNS))
    tree["tensors"]["w"]["pieces"][number] |= changes
    return tree


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (_run(0, count=4), "a piece"),
        (_run(0, count=2), "do not make"),
        (_run(0, count=0), "count"),
        (_run(0, count=100_001), "count"),
        (_run(0, every=0), "every"),
        (_run(0, axis=2), "a run of"),
        (_run(0, axis=1), "a piece"),
        (_run(1, count=3), "do not make"),
        (_run(1, offset=[2, 2]), "overlap"),
        (_run(0, shape=[0, 2]), "a run of"),
        (_run(0, file="rank_00000.bin"), "a run from a file"),
    ],
)
def test_a_run_that_makes_no_box_is_refused(tree: object, says: str) -> None:
    with pytest.raises(CheckpointCorrupt, match="does not verify") as caught:
        _parse(tree)
    assert says in str(caught.value.found)


def _changed(name: str, piece: int, **changes: Any) -> dict[str, Any]:
    tree: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(WHOLE))
    tree["tensors"][name]["pieces"][piece] |= changes
    return tree


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (_changed("w", 0, offset=[0, 1]), "a piece"),
        (_changed("w", 1, shape=[2, 2]), "a piece"),
        (_changed("w", 1, offset=[2, 0]), "overlap"),
        (_changed("w", 1, shape=[1, 1]), "do not make"),
        (_changed("w", 0, at=3), "a piece"),
        (_changed("w", 0, at=-64), "at"),
        (_changed("w", 0, file="../../etc/passwd"), "a file named"),
        (_changed("w", 0, file="/rank_0000.bin"), "a file named"),
        (_changed("w", 0, offset=[0]), "a piece"),
        (_changed("scalar", 0, extra=1), "extra"),
        (WHOLE | {"format": 3}, "format"),
        (WHOLE | {"tensors": {"w": {"dtype": "object", "shape": [], "pieces": []}}}, "type 'object'"),
        (WHOLE | {"tensors": {"w": {"dtype": "int8", "shape": [2**60], "pieces": []}}}, "shape"),
        (WHOLE | {"tensors": {"w": {"dtype": "int8", "shape": [2**50, 2**50], "pieces": []}}}, "shape"),
        ([], "object"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(tree: object, says: str) -> None:
    with pytest.raises(CheckpointCorrupt, match="does not verify") as caught:
        _parse(tree)
    assert says in str(caught.value.found)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff", b'{"format":1,"format":1,"tensors":{}}', b"[" * 100_000]
)
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointCorrupt):
        parse_index(data, where="index.json")


def test_two_pieces_of_a_scalar_are_one_too_many() -> None:
    piece = Piece(file="rank_0000.bin", at=0, offset=(), shape=())
    index = TensorIndex(tensors={"s": TensorEntry(dtype="int8", shape=(), pieces=(piece, piece))})
    with pytest.raises(CheckpointCorrupt):
        parse_index(render_index(index), where="x")
