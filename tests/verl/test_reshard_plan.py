"""How a tensor is cut among another number of ranks, and which checkpoints cannot be."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest

from verl_slurm.base.errors import ConfigError
from verl_slurm.verl.reshard.cuts import pieces, share
from verl_slurm.verl.reshard.plan import (
    DataState,
    Described,
    Model,
    Move,
    local_shape,
    parts_of,
    plan_reshard,
)
from verl_slurm.verl.reshard.tensors import Builder, Tensor
from verl_slurm.verl.reshard.torch_pickle import Made, Name, PickleProblem

FLOAT = Name("torch", "FloatStorage")
SHAPES = [(1,), (5,), (7, 3), (2, 3), (4, 0), (0, 2), (3, 5, 2), (11, 1, 1)]


def cut(whole: list[int], shape: tuple[int, ...], dim: int, ranks: int) -> list[list[int]]:
    """The parts of all ranks, element by element and not by ranges."""
    strides = [1] * len(shape)
    for at in range(len(shape) - 2, -1, -1):
        strides[at] = strides[at + 1] * shape[at + 1]
    parts = []
    for rank in range(ranks):
        begin, end = share(shape[dim], ranks, rank)
        axes = [range(begin, end) if at == dim else range(length) for at, length in enumerate(shape)]
        places = itertools.product(*axes)
        parts.append([whole[sum(i * s for i, s in zip(place, strides, strict=True))] for place in places])
    return parts


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_new_parts_are_those_that_the_whole_tensor_would_be_cut_into(shape: tuple[int, ...]) -> None:
    whole = list(range(math.prod(shape)))
    for dim, before, after in itertools.product(range(len(shape)), range(1, 6), range(1, 6)):
        former, wanted = cut(whole, shape, dim, before), cut(whole, shape, dim, after)
        for rank in range(after):
            found = [
                value
                for source, start, count in pieces(shape, dim, before, after, rank)
                for value in former[source][start : start + count]
            ]
            assert found == wanted[rank], (dim, before, after, rank)


def test_five_rows_on_four_ranks_are_two_two_one_and_none() -> None:
    assert [share(5, 4, rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]


@pytest.mark.torch
def test_rows_are_shared_as_torch_chunks_them() -> None:
    torch = pytest.importorskip("torch")
    for length, ranks in itertools.product(range(12), range(1, 8)):
        chunks = torch.arange(length).chunk(ranks)
        wanted = [len(chunk) for chunk in chunks] + [0] * (ranks - len(chunks))
        assert [end - begin for begin, end in (share(length, ranks, rank) for rank in range(ranks))] == wanted


# ---- plans


def tensor(path: str, *shape: int, ranks: int = 2, rank: int = 0, dtensor: bool = True) -> Tensor:
    """A DTensor that is divided along its first dimension, or a plain one."""
    if not dtensor:
        return Tensor(path, FLOAT, shape, None, 1, 1000 * rank, shape)
    begin, end = share(shape[0], ranks, rank)
    return Tensor(path, FLOAT, shape, 0, ranks, 1000 * rank, (end - begin, *shape[1:]), True)


def flat_model(*lengths: int, ranks: int = 2, tied: bool = False) -> Model:
    """FSDP1: a root with an embedding and an output layer, and two layers; `lengths` are of the optimizer's parts."""
    names = {"model.embed_tokens.weight": (5, 2), "model.layers.0.w": (7,), "model.layers.1.w": (3, 3)}
    names |= {"lm_head.weight": (5, 2)}
    parameters = tuple(
        tuple(tensor(name, *shape, ranks=ranks, rank=rank) for name, shape in names.items())
        for rank in range(ranks)
    )
    moments = tuple(
        tuple(
            one
            for at, length in enumerate(lengths)
            for one in (
                tensor(f"state.{at}.step", dtensor=False, rank=rank),
                tensor(f"state.{at}.exp_avg", length, dtensor=False, rank=rank),
            )
        )
        for rank in range(ranks)
    )
    return Model(
        role="actor",
        engine=1,
        parameters=parameters,
        moments=moments,
        units=("", "model.layers.0", "model.layers.1"),
        num_groups=1,
        num_flat=len(lengths),
        device="cuda",
    )


def step(*models: Model, ranks: int = 2, data: DataState | None = None) -> Described:
    return Described(step=Path("/run/global_step_6"), ranks=ranks, models=models, data=data)


def flat_lengths(model: Model) -> list[tuple[int, ...]]:
    plan = plan_reshard(step(model), 3)
    return [move.tensor.shape for move in plan.roles[0].moments if move.becomes == "flat"]


def test_a_flat_parameter_is_as_long_as_the_parameters_in_its_unit() -> None:
    # 20 in the root, 7 and 9 in the layers, in halves.
    assert flat_lengths(flat_model(10, 4, 5)) == [(20,), (7,), (9,)]


def test_an_output_layer_that_is_the_embedding_counts_once_in_a_flat_parameter() -> None:
    assert flat_lengths(flat_model(5, 4, 5)) == [(10,), (7,), (9,)]


@pytest.mark.parametrize("lengths", [(10, 4), (10, 4, 6), (10, 5, 4), (10, 4, 5, 1)])
def test_flat_parameters_of_other_lengths_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"flat parameters.*docs/verl.md"):
        plan_reshard(step(flat_model(*lengths)), 3)


def test_a_model_without_names_of_units_and_two_groups_are_refused() -> None:
    good = flat_model(10, 4, 5)
    for model in (replace(good, units=()), replace(good, num_groups=2), replace(good, num_flat=27)):
        with pytest.raises(ConfigError, match="flat parameters"):
            plan_reshard(step(model), 3)


def test_the_last_part_of_a_flat_parameter_is_filled_up_with_zeros() -> None:
    whole = Tensor("state.1.exp_avg", FLOAT, (7,), 0, 2, 0, (4,))
    move = Move(tensor=whole, before=2, offsets=(100, 500), becomes="flat", dim=0)
    assert [local_shape(move, 3, rank) for rank in range(3)] == [(3,)] * 3
    parts = [parts_of(move, [8, 9], 3, rank) for rank in range(3)]
    assert [(part.fd, part.offset, part.num_bytes) for part in parts[0]] == [(8, 100, 12)]
    assert [(part.fd, part.offset, part.num_bytes) for part in parts[1]] == [(8, 112, 4), (9, 500, 8)]
    assert [(part.fd, part.offset) for part in parts[2][:1]] == [(9, 508)]
    assert parts[2][1].data == bytes(8)


def test_fsdp1_has_plain_tensors_on_one_rank_and_dtensors_on_more() -> None:
    plan = plan_reshard(step(flat_model(10, 4, 5)), 1)
    assert {(move.becomes, move.dim) for move in plan.roles[0].parameters} == {("plain", None)}
    one = flat_model(20, 7, 9, ranks=1)
    plain = tuple(replace(t, dim=None, is_dtensor=False) for t in one.parameters[0])
    plan = plan_reshard(step(replace(one, parameters=(plain,)), ranks=1), 2)
    assert {(move.becomes, move.dim) for move in plan.roles[0].parameters} == {("dtensor", 0)}


def test_ranks_beyond_those_that_saved_are_counted_as_new() -> None:
    plan = plan_reshard(step(flat_model(10, 4, 5)), 5)
    assert (plan.kept, plan.new) == (2, 3)
    plan = plan_reshard(step(flat_model(10, 4, 5)), 1)
    assert (plan.kept, plan.new) == (1, 0)


def test_the_same_number_of_ranks_needs_no_work() -> None:
    with pytest.raises(ConfigError, match="already.*nothing has to be done"):
        plan_reshard(step(flat_model(10, 4, 5)), 2)


@pytest.mark.parametrize(
    ("ranks", "loaders", "after", "expected"),
    [(2, 2, 3, (3, 8)), (2, 2, 1, (1, 24)), (4, 2, 6, (3, 8)), (4, 2, 2, (1, 24))],
)
def test_each_loader_of_sft_has_given_out_its_share_of_the_same_rows(
    ranks: int, loaders: int, after: int, expected: tuple[int, int]
) -> None:
    """With four ranks and two loaders, two ranks share a sequence."""
    plan = plan_reshard(step(ranks=ranks, data=DataState(count=loaders, samples=12)), after)
    assert (plan.num_data, plan.samples) == expected


def test_a_batch_that_cannot_be_divided_and_half_a_group_of_a_sequence_are_refused() -> None:
    with pytest.raises(ConfigError, match="24 samples.*5 data loaders.*train_batch_size"):
        plan_reshard(step(data=DataState(count=2, samples=12)), 5)
    with pytest.raises(ConfigError, match="ulysses.*a multiple of 2"):
        plan_reshard(step(ranks=4, data=DataState(count=2, samples=12)), 3)


# ---- meshes of other releases of torch


def mesh_of(**fields: object) -> Made:
    same = {"_mesh_dim_names": ("fsdp",), "_thread_id": None}
    return Made(Name("torch.distributed.device_mesh", "DeviceMesh"), (), True, [], True, {**same, **fields})


def layout_of(shape: object, stride: object = (1,)) -> Made:
    name = Name("torch.distributed._mesh_layout", "_MeshLayout")
    return Made(name, (), True, [], True, {"shape": shape, "stride": stride})


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((2,), (1,), (3,)),
        (2, 1, 3),
        (Made(Name("torch", "Size"), ((2,),)), (1,), Made(Name("torch", "Size"), ((3,),))),
    ],
    ids=["tuple", "number", "size"],
)
def test_a_mesh_as_torch_2_10_to_2_12_have_it_is_described_for_other_ranks(
    shape: object, stride: object, expected: object
) -> None:
    former = mesh_of(
        _layout=layout_of(shape, stride), _flatten_rank_map=(0, 1), _coordinate_on_dim=[1], _rank=1, _hash=5
    )
    found = Builder(2, 3)._mesh(former).state
    assert found["_layout"].state == {"shape": expected, "stride": stride}
    assert (found["_flatten_rank_map"], found["_coordinate_on_dim"], found["_rank"]) == ((0, 1, 2), [2], 2)
    assert (found["_hash"], found["_mesh_dim_names"]) == (None, ("fsdp",))


def test_a_mesh_as_torch_before_2_10_has_it_is_described_for_other_ranks() -> None:
    infos = [("", [0, 1], "0")]
    builder = Builder(2, 3)
    former = mesh_of(
        mesh="a tensor", _flatten_mesh_list=(0, 1), _coordinate_on_dim=[1], _dim_group_infos=infos
    )
    found = builder._mesh(former).state
    assert found["_dim_group_infos"] == [("", [0, 1, 2], "0")]
    [(key, [part])] = builder.storages
    assert found["mesh"].args[0].key == key
    assert part.data == b"".join(rank.to_bytes(4, "little") for rank in range(3))


@pytest.mark.parametrize(
    "fields",
    [{"_new": 1}, {"_layout": layout_of((2, 2))}, {"_layout": layout_of((2,), (2,))}],
    ids=["field", "shape", "stride"],
)
def test_a_mesh_that_is_not_known_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(PickleProblem, match="not known here"):
        Builder(0, 3)._mesh(mesh_of(_flatten_rank_map=(0, 1), _coordinate_on_dim=(0,), **fields))
