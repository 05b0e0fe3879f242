"""What `inspect A B` finds, and that it believes no file that is not what was committed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.conftest import FILES
from verl_slurm.base.errors import CheckpointCorrupt, NotFound
from verl_slurm.checkpoint.format.specification import SCHEMA_VERSION, Topology
from verl_slurm.checkpoint.format.state_schema import render_schema, schema_of
from verl_slurm.checkpoint.format.tensor_index import Piece, TensorEntry, TensorIndex, render_index
from verl_slurm.checkpoint.inspect.difference import SUBJECTS, Difference, difference

Save = Callable[..., Path]


def index(**shapes: tuple[int, ...]) -> bytes:
    """actor/index.json with a tensor of each shape, in one piece."""
    entries = {}
    for name, shape in shapes.items():
        piece = Piece(file="rank_0000.bin", at=0, offset=(0,) * len(shape), shape=shape)
        entries[name] = TensorEntry(dtype="float32", shape=shape, pieces=(piece,))
    return render_index(TensorIndex(tensors=entries))


def test_a_checkpoint_and_its_copy_do_not_differ(save: Save) -> None:
    path = save(1)
    assert difference(path, path) == []


def test_every_subject_is_compared_key_by_key(save: Save) -> None:
    files = FILES | {
        "config.yaml": b"name: other\ntrain:\n  steps: 5\n",
        "orchestration.json": json.dumps({"data_files": {"a.jsonl": "1"}}).encode(),
        SCHEMA_VERSION: render_schema(schema_of({"RuntimeState": {"rank": "float"}})),
        "actor/index.json": index(w=(2, 3)),
    }
    changes = {
        "topology": Topology(dp=1, tp=2),
        "dataset_fingerprint": "1" * 64,
        "frozen": {"reference": "2" * 64},
    }
    one = save(1, files=FILES | {"actor/index.json": index(w=(2, 2), b=(2,))})
    found = difference(one, save(2, 3, files=files, **changes))
    assert {row.subject for row in found} == set(SUBJECTS)
    for row in (
        Difference(subject="position", key="step", a=1, b=2),
        Difference(subject="position", key="safe_point", a=0, b=3),
        Difference(subject="schema", key="RuntimeState.rank", a="int", b="float"),
        Difference(subject="config", key="name", a="run", b="other"),
        Difference(subject="config", key="train.steps", a=None, b=5),
        Difference(subject="topology", key="dp", a=2, b=1),
        Difference(subject="topology", key="tp", a=1, b=2),
        Difference(subject="data", key="fingerprint", a="0" * 64, b="1" * 64),
        Difference(subject="data", key="file a.jsonl", a=None, b="1"),
        Difference(subject="tensors", key="actor/w", a="float32 [2, 2]", b="float32 [2, 3]"),
        Difference(subject="tensors", key="actor/b", a="float32 [2]", b=None),
        Difference(subject="frozen", key="reference", a=None, b="2" * 64),
    ):
        assert row in found


def test_times_attempts_and_parents_are_not_compared(save: Save) -> None:
    one = save(1)
    two = save(2, attempt=7, parent="step_000001", created_utc="2027-01-01T00:00:00Z", save_seconds=9.0)
    assert [row.key for row in difference(one, two)] == ["step"]


@pytest.mark.parametrize("name", ["config.yaml", "metadata.json", "orchestration.json", SCHEMA_VERSION])
def test_a_file_that_is_not_what_was_committed_is_not_believed(name: str, save: Save) -> None:
    good, bad = save(1), save(2)
    (bad / name).write_bytes((bad / name).read_bytes() + b"\n")
    with pytest.raises(CheckpointCorrupt, match=name):
        difference(good, bad)


def test_json_that_is_none_is_refused(save: Save) -> None:
    bad = save(1, files=FILES | {"metadata.json": b"[1]"})
    with pytest.raises(CheckpointCorrupt, match=r"metadata\.json.*array"):
        difference(bad, bad)


def test_what_is_no_checkpoint_is_not_found(save: Save, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        difference(save(1), tmp_path)
