"""Whole tensors out of a checkpoint directory, all of them or some."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from verl_slurm.dcp.collective import alone_on_purpose
from verl_slurm.dcp.reading import TensorInfo, groups_of, list_tensors, read_domain
from verl_slurm.errors import CheckpointCorrupt

pytestmark = pytest.mark.torch

TENSORS = {
    "b.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "a.step": torch.tensor(3.0),
    "c.ids": torch.arange(4),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with alone_on_purpose():
        dcp.save(dict(TENSORS), checkpoint_id=tmp_path / "actor", no_dist=True)
    return tmp_path


def test_tensors_are_listed_by_name_with_shape_and_type(directory: Path) -> None:
    listed = list_tensors(directory, "actor")
    assert list(listed) == ["a.step", "b.weight", "c.ids"]
    assert listed["b.weight"] == TensorInfo(shape=(2, 3), dtype=torch.bfloat16)
    assert [info.num_bytes for info in listed.values()] == [4, 12, 32]
    assert [info.num_elements for info in listed.values()] == [1, 6, 4]


def test_all_or_some_are_read_bit_for_bit_in_the_order_asked_for(directory: Path) -> None:
    for names in (None, ["c.ids", "a.step"], []):
        read = read_domain(directory, "actor", names)
        assert list(read) == (sorted(TENSORS) if names is None else names)
        assert all(torch.equal(read[name], TENSORS[name]) for name in read)
        assert all(read[name].dtype == TENSORS[name].dtype for name in read)


def test_a_tensor_that_is_not_there_is_named(directory: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match="no d"):
        read_domain(directory, "actor", ["c.ids", "d"])


def test_groups_hold_every_name_once_in_order_and_no_more_than_the_limit() -> None:
    sizes = (4, 4, 30, 4, 8, 1)
    infos = {f"t{i}": TensorInfo(shape=(size,), dtype=torch.uint8) for i, size in enumerate(sizes)}
    groups = list(groups_of(infos, 12))
    assert groups == [["t0", "t1"], ["t2"], ["t3", "t4"], ["t5"]]
    assert list(groups_of({}, 12)) == []
