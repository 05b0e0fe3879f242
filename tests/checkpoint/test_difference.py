"""What `inspect A B` finds, and that it believes no file that is not what was committed."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from tests.builders import runtime_state
from tests.checkpoint.conftest import FILES, manifest_of, owns_it, stage
from verl_slurm.base.errors import CheckpointCorrupt, NotFound
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.specification import SCHEMA_VERSION, Topology
from verl_slurm.checkpoint.format.state_schema import render_schema, schema_of
from verl_slurm.checkpoint.format.tensor_index import (
    Piece,
    TensorEntry,
    TensorIndex,
    render_index,
    tensor_file,
)
from verl_slurm.checkpoint.inspect import compare as compare_module
from verl_slurm.checkpoint.inspect.compare import SUBJECTS, Difference, compare, difference
from verl_slurm.checkpoint.store.commit import commit
from verl_slurm.runtime_state.codec import encode

Save = Callable[..., Path]


def index(**shapes: tuple[int, ...]) -> bytes:
    """actor/index.json with a tensor of each shape, in one piece."""
    entries = {}
    for name, shape in shapes.items():
        piece = Piece(file="rank_0000.bin", at=0, offset=(0,) * len(shape), shape=shape)
        entries[name] = TensorEntry(dtype="float32", shape=shape, pieces=(piece,))
    return render_index(TensorIndex(tensors=entries))


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
    assert difference(one, one) == []


@pytest.mark.parametrize("name", ["config.yaml", "metadata.json", "orchestration.json", SCHEMA_VERSION])
def test_a_file_that_is_not_what_was_committed_is_not_believed(name: str, save: Save) -> None:
    good, bad = save(1), save(2)
    (bad / name).write_bytes((bad / name).read_bytes() + b"\n")
    with pytest.raises(CheckpointCorrupt, match=name):
        difference(good, bad)


def test_what_is_no_json_or_no_checkpoint_is_refused(save: Save, tmp_path: Path) -> None:
    bad = save(1, files=FILES | {"metadata.json": b"[1]"})
    with pytest.raises(CheckpointCorrupt, match=r"metadata\.json.*array"):
        difference(bad, bad)
    with pytest.raises(NotFound):
        difference(save(2), tmp_path)


# ---- bit for bit


def grid(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """The boxes without gaps that so many cuts along each axis make."""
    axes = []
    for size, count in zip(shape, parts, strict=True):
        step = max(1, -(-size // count))
        axes.append([slice(low, min(low + step, size)) for low in range(0, size, step)])
    return list(itertools.product(*axes))


def domain(tensors: dict[str, np.ndarray], parts: tuple[int, ...], ranks: int) -> dict[str, bytes]:
    """Files of `actor` for tensors that are cut so, their boxes dealt to ranks."""
    files: dict[str, bytearray] = {}
    entries = {}
    for name, array in tensors.items():
        pieces = []
        for number, box in enumerate(grid(array.shape, parts[: array.ndim])):
            data = files.setdefault(tensor_file(number % ranks), bytearray())
            data += bytes(-len(data) % 64)
            offset = tuple(part.start for part in box)
            piece = Piece(
                file=tensor_file(number % ranks), at=len(data), offset=offset, shape=array[box].shape
            )
            pieces.append(piece)
            data += array[box].tobytes()
        entries[name] = TensorEntry(dtype=str(array.dtype), shape=array.shape, pieces=tuple(pieces))
    index = {"actor/index.json": render_index(TensorIndex(tensors=entries))}
    return index | {f"actor/{name}": bytes(data) for name, data in files.items()}


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_tensors_are_the_same_however_they_were_cut_and_one_bit_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    kinds = st.sampled_from(["float32", "int64", "bool", "float16"])
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=7)
    tensors = {name: data.draw(hnp.arrays(data.draw(kinds), data.draw(shapes))) for name in ("w", "b")}
    others = {name: array.copy() for name, array in tensors.items()}
    changed = data.draw(st.sampled_from([*(name for name in others if others[name].size), ""]))
    if changed:
        others[changed].reshape(-1).view(np.uint8)[data.draw(st.integers(0, others[changed].nbytes - 1))] ^= 1
    rest = {name: text for name, text in FILES.items() if not name.startswith("actor/")}
    rest |= {f"{name}/index.json": render_index(TensorIndex(tensors={})) for name in ("critic", "optimizer")}
    rest |= {name: encode(runtime_state()) for name in rest if name.startswith("runtime_state")}
    sides = []
    for content in (tensors, others):
        parts = data.draw(st.tuples(*[st.integers(1, 4)] * 3))
        paths = RunPaths(tmp_path_factory.mktemp("run"))
        staging = stage(paths, 1, files=rest | domain(content, parts, data.draw(st.integers(1, 3))))
        sides.append(commit(staging, manifest_of(staging), attempt_check=owns_it))
    with pytest.MonkeyPatch.context() as patch:
        # So that tensors are read in slabs.
        patch.setattr(compare_module, "_GROUP_BYTES", data.draw(st.sampled_from([16, 100, 1 << 20])))
        found = compare(*sides)
    assert found.differing == ((f"actor/{changed}",) if changed else ())
    assert (found.num_tensors, found.num_bytes) == (2, sum(array.nbytes for array in tensors.values()))
