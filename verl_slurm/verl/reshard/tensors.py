"""Finds the tensors in a shard of verl's FSDP engine, and describes the same shard for another rank. No torch.

A shard is what one rank's `state_dict()` gives, as `torch_pickle` describes it. Its tensors are of two forms:

* a DTensor: this rank's part (`_local_tensor`), and a `DTensorSpec` of the mesh of ranks and the dimension that is
  divided. All parameters of FSDP2 and the moments of its optimizer; the parameters of FSDP1 on more than one rank.
* a plain tensor: whole on every rank (a step counter, a buffer, everything on one rank of FSDP1), or a part of FSDP1's
  flat parameters (`plan`).

Meshes of one dimension that hold all ranks are understood, as torch 2.13 describes them (shown) and the releases before
it (read in their source). All others are refused: a mesh that is not understood could not be described for another
number of ranks.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl_slurm.verl.reshard.cuts import share
from verl_slurm.verl.reshard.torch_file import Part, TorchFile
from verl_slurm.verl.reshard.torch_pickle import Made, Name, PickleProblem, Storage, dump

_TENSOR = Name("torch._utils", "_rebuild_tensor_v2")
_SUBCLASS = Name("torch._tensor", "_rebuild_from_type_v2")
_WRAPPER = Name("torch._utils", "_rebuild_wrapper_subclass")
_PARAMETER = Name("torch._utils", "_rebuild_parameter")
_ORDERED = Name("collections", "OrderedDict")
_DTENSOR = Name("torch.distributed.tensor", "DTensor")
_SPEC = Name("torch.distributed.tensor._dtensor_spec", "DTensorSpec")
_META = Name("torch.distributed.tensor._dtensor_spec", "TensorMeta")
_ORDER = Name("torch.distributed.tensor._dtensor_spec", "ShardOrderEntry")
_SHARD = Name("torch.distributed.tensor.placement_types", "Shard")
_MESH = Name("torch.distributed.device_mesh", "DeviceMesh")
_LAYOUT = Name("torch.distributed._mesh_layout", "_MeshLayout")
_FLAT = Name("torch.distributed._mesh_layout", "_FlatLayout")
_INT = Name("torch", "IntStorage")

_TYPES = {
    "DoubleStorage": (8, "float64"),
    "FloatStorage": (4, "float32"),
    "HalfStorage": (2, "float16"),
    "BFloat16Storage": (2, "bfloat16"),
    "LongStorage": (8, "int64"),
    "IntStorage": (4, "int32"),
    "ShortStorage": (2, "int16"),
    "CharStorage": (1, "int8"),
    "ByteStorage": (1, "uint8"),
    "BoolStorage": (1, "bool"),
}
"""Bytes of an element, and the dtype."""
_RANK_LISTS = ("_flatten_rank_map", "_flatten_mesh_list")
_SAME_ON_ALL = {
    "_device_type",
    "device_type",
    "_mesh_dim_names",
    "mesh_dim_names",
    "_dim_group_names",
    "_root_mesh",
    "_thread_id",
    "_flatten_mapping",
}
"""Fields of a mesh that do not depend on the ranks."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a shard.

    Attributes:
        path: of keys, for people; the same on every rank.
        kind: of its storage.
        shape: of the whole tensor.
        dim: divided along; None: whole on every rank.
        ranks: among which it is divided.
        offset: of this rank's part, in the file.
        local: shape of this rank's part.
        is_dtensor: not a plain tensor.
    """

    path: str
    kind: Name
    shape: tuple[int, ...]
    dim: int | None
    ranks: int
    offset: int
    local: tuple[int, ...]
    is_dtensor: bool = False

    @property
    def itemsize(self) -> int:
        return _TYPES[self.kind.name][0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.itemsize


def find_tensors(file: TorchFile) -> tuple[list[Tensor], bytes]:
    """Returns the tensors of a shard, and a digest of everything else in it.

    Two ranks of one save give the same digest, and tensors in the same order.

    Raises:
        PickleProblem: a tensor of a form that is not understood; the message says which and why.
    """
    found: list[Tensor] = []

    def see(path: str, node: Made) -> Any:
        tensor = _tensor(path, node, file)
        if tensor is None:
            return None
        found.append(tensor)
        # What the ranks agree on.
        return ("tensor", tensor.kind, tensor.shape, tensor.dim, tensor.ranks, tensor.is_dtensor)

    rest = mapped(file.value, see)
    return found, hashlib.sha256(dump(rest)).digest()


def is_tensor(node: Made) -> bool:
    """Returns whether `find_tensors` takes a node for a tensor, of whatever form."""
    return node.func in (_TENSOR, _SUBCLASS)


def mapped(value: Any, see: Callable[[str, Made], Any]) -> Any:
    """Returns a copy of a description in which `see` has replaced nodes.

    Args:
        see: given each `Made` with its path, outer ones first; returns its replacement, or None to look into it.

    Raises:
        PickleProblem: bytes that belong to no tensor, or nested without end.
    """
    known: dict[int, Any] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Storage):
            raise PickleProblem(f"{path or 'the file'} holds bytes outside of a tensor")
        if not isinstance(value, Made | dict | list | tuple):
            return value
        # What is shared stays shared.
        if id(value) in known:
            return known[id(value)]
        known[id(value)] = result = walk_into(value, path)
        return result

    def walk_into(value: Any, path: str) -> Any:
        if isinstance(value, Made):
            if (seen := see(path, value)) is not None:
                return seen
            return replace(
                value,
                args=tuple(walk(one, path) for one in value.args),
                pairs=[(key, walk(one, _below(path, key))) for key, one in value.pairs],
                state=walk(value.state, path),
            )
        if isinstance(value, dict):
            return {key: walk(one, _below(path, key)) for key, one in value.items()}
        kept = [walk(one, path) for one in value]
        return kept if isinstance(value, list) else tuple(kept)

    try:
        return walk(value, "")
    except RecursionError:
        raise PickleProblem("nested too deeply") from None


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _tensor(path: str, node: Made, file: TorchFile) -> Tensor | None:
    if node.func == _TENSOR:
        kind, shape, offset = _plain(path, node, file)
        return Tensor(path, kind, shape, None, 1, offset, shape)
    match node:
        # FSDP1 on one rank notes something of its own on a plain tensor.
        case Made(func=func, args=(inner, Name("torch", "Tensor"), tuple(args), dict())) if (func, inner) == (
            _SUBCLASS,
            _TENSOR,
        ):
            kind, shape, offset = _plain(path, Made(_TENSOR, args), file)
            return Tensor(path, kind, shape, None, 1, offset, shape)
    if node.func == _SUBCLASS:
        return _divided(path, node, file)
    # Parameters are a tensor inside of a call.
    if (
        node.func.module.startswith("torch")
        and node.func.name.startswith("_rebuild")
        and node.func != _PARAMETER
    ):
        raise PickleProblem(f"{path} is made by {node.func.module}.{node.func.name}")
    # FSDP1 without a device mesh; verl always gives one.
    if node.func.name == "ShardedTensor":
        raise PickleProblem(f"{path} is a ShardedTensor")
    return None


def _plain(path: str, node: Made, file: TorchFile) -> tuple[Name, tuple[int, ...], int]:
    """Returns the kind, the shape and the offset of a plain tensor."""
    match node.args:
        case (Storage() as storage, int(offset), tuple(size), tuple(stride), _, _, *_):
            pass
        case _:
            raise PickleProblem(f"{path} is described as no tensor of torch.save")
    shape = _size(size)
    if shape is None or storage.kind.module != "torch" or storage.kind.name not in _TYPES:
        raise PickleProblem(f"{path} has elements of {storage.kind.module}.{storage.kind.name}")
    # Strides of dimensions of one element say nothing.
    wanted = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    if 0 not in shape and any(n > 1 and a != b for n, a, b in zip(shape, stride, wanted, strict=True)):
        raise PickleProblem(f"{path} is not contiguous")
    if offset < 0 or offset + math.prod(shape) > storage.numel:
        raise PickleProblem(f"{path} is larger than its storage")
    itemsize = _TYPES[storage.kind.name][0]
    return storage.kind, shape, file.place(storage, itemsize) + offset * itemsize


def _size(value: Any) -> tuple[int, ...] | None:
    good = type(value) is tuple and all(type(one) is int and one >= 0 for one in value)
    return value if good else None


def _divided(path: str, node: Made, file: TorchFile) -> Tensor:
    """Returns a DTensor."""
    size, local, spec = _dtensor(path, node)
    kind, shape, offset = _plain(path, local, file)
    placements, mesh = spec.state.get("placements"), spec.state.get("mesh")
    if not isinstance(mesh, Made) or not isinstance(placements, tuple):
        raise PickleProblem(f"{path} has no mesh of ranks")
    names = mesh.state.get("_mesh_dim_names", mesh.state.get("mesh_dim_names"))
    if len(placements) != 1:
        shown = " x ".join(map(str, names)) if isinstance(names, tuple) else f"{len(placements)} dimensions"
        raise PickleProblem(
            f"{path} lies on a mesh of {shown}: replicas of shards (fsdp_size) or tensor parallelism"
        )
    ranks = _ranks(path, mesh)
    how = placements[0]
    if how.func.name == "Replicate":
        return Tensor(path, kind, size, None, ranks, offset, shape, True)
    dim = how.state.get("dim") if how.func.name == "Shard" and isinstance(how.state, dict) else None
    if type(dim) is not int or not 0 <= dim < len(size):
        raise PickleProblem(f"{path} is divided by {how.func.name}")
    rank = mesh.state.get("_coordinate_on_dim")
    begin, end = share(size[dim], ranks, rank[0]) if rank else (0, 0)
    if shape != (*size[:dim], end - begin, *size[dim + 1 :]):
        raise PickleProblem(f"{path}: a part of {list(shape)} of {list(size)} on {ranks} ranks")
    return Tensor(path, kind, size, dim, ranks, offset, shape, True)


def _dtensor(path: str, node: Made) -> tuple[tuple[int, ...], Made, Made]:
    """Returns the whole size of a DTensor, its local tensor, and its spec."""
    match node.args:
        case (func, Name(name="DTensor"), (_, _, tuple(size), *_), (None, dict(slots)) | dict(slots)) if (
            func == _WRAPPER and _size(size) is not None
        ):
            local, spec = slots.get("_local_tensor"), slots.get("_spec")
            if (
                isinstance(local, Made)
                and local.func == _TENSOR
                and isinstance(spec, Made)
                and isinstance(spec.state, dict)
            ):
                return size, local, spec
    raise PickleProblem(f"{path} is a subclass of Tensor that is no DTensor")


def _ranks(path: str, mesh: Made) -> int:
    """Returns the number of ranks of a mesh."""
    state = mesh.state if isinstance(mesh.state, dict) else {}
    listed = next((state[name] for name in _RANK_LISTS if name in state), None)
    if not isinstance(listed, tuple) or listed != tuple(range(len(listed))) or not listed:
        raise PickleProblem(f"{path} lies on a mesh that does not hold all ranks in order")
    where = state.get("_coordinate_on_dim")
    if not isinstance(where, tuple | list) or len(where) != 1 or where[0] not in listed:
        raise PickleProblem(f"{path} lies on a mesh in which this rank has no place")
    return len(listed)


class Builder:
    """Describes a shard for rank `rank` of `ranks`, after the shard of another save.

    Attributes:
        storages: key and bytes of each new storage.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self.storages: list[tuple[str, list[Part]]] = []
        self._known: dict[tuple[Name, tuple[Part, ...]], str] = {}
        self._meshes: dict[int, Made] = {}
        self._made_mesh: Made | None = None

    def plain(self, kind: Name, shape: Sequence[int], parts: Sequence[Part]) -> Made:
        """Returns a plain tensor of these bytes, on the CPU."""
        content = tuple(parts)
        # An output layer that is the embedding lies once in a file, under two names.
        key = self._known.get((kind, content))
        if key is None:
            key = self._known[kind, content] = str(len(self.storages))
            self.storages.append((key, list(content)))
        # On the CPU whatever it was on: the GPU's number may not exist on the rank that loads it, and both FSDP and
        # the optimizers move what they load to where they need it.
        storage = Storage(kind, key, "cpu", math.prod(shape))
        return Made(_TENSOR, (storage, 0, tuple(shape), _strides(shape), False, Made(_ORDERED, ())))

    def after(self, node: Made, kind: Name, local: Sequence[int], parts: Sequence[Part]) -> Made:
        """Returns the DTensor `node` with the part of this rank."""
        func, cls, args, state = node.args
        slots = state[1] if isinstance(state, tuple) else state
        spec = slots["_spec"]
        mesh = spec.state["mesh"]
        if id(mesh) not in self._meshes:
            self._meshes[id(mesh)] = self._mesh(mesh)
        # Hashes of texts differ between processes; torch makes new ones for None.
        fields = {**spec.state, "mesh": self._meshes[id(mesh)]}
        fields |= {"_hash": None} if "_hash" in fields else {}
        changed = {
            **slots,
            "_local_tensor": self.plain(kind, local, parts),
            "_spec": replace(spec, state=fields),
        }
        # The wrapper's device is the part's, or torch would not move the part where it has to go.
        args = (*args[:6], Made(Name("torch", "device"), ("cpu",)), *args[7:])
        return Made(node.func, (func, cls, args, (None, changed) if isinstance(state, tuple) else changed))

    def new(
        self, device: str, kind: Name, shape: Sequence[int], local: Sequence[int], parts: Sequence[Part]
    ) -> Made:
        """Returns a DTensor that is divided along its first dimension, as torch 2.13 describes it.

        For a tensor that was saved whole, by one rank of FSDP1: it has no spec that could be changed.

        Args:
            device: type of the ranks' devices.
        """
        if self._made_mesh is None:
            axis = Made(_FLAT, (), new=True, has_state=True, state={"shape": (), "stride": ()})
            layout = Made(_LAYOUT, (), new=True, has_state=True, state={"axes": (axis,)})
            fields: dict[str, Any] = {
                "_device_type": device,
                "_layout": _layout(layout, self._ranks),
                "_rank_map": self._counted(self._ranks),
                "_mesh_dim_names": ("fsdp",),
                "_root_mesh": None,
                "_flatten_rank_map": tuple(range(self._ranks)),
                "_thread_id": None,
                "_flatten_mapping": {},
                "_dim_group_names": ["0"],
                "_rank": self._rank,
                "_coordinate_on_dim": (self._rank,),
                "_hash": None,
            }
            self._made_mesh = Made(_MESH, (), new=True, has_state=True, state=fields)
        dtype, strides = Name("torch", _TYPES[kind.name][1]), _strides(shape)
        size = tuple(shape)
        meta = Made(_META, (Made(Name("torch", "Size"), (size,)), strides, dtype), new=True)
        spec = {
            "mesh": self._made_mesh,
            "placements": (Made(_SHARD, (), new=True, has_state=True, state={"dim": 0}),),
            "tensor_meta": meta,
            "shard_order": (Made(_ORDER, (0, (0,)), new=True),),
            "use_strided_shard_as_shard_order": False,
            "_hash": None,
        }
        slots = {
            "_local_tensor": self.plain(kind, local, parts),
            "_spec": Made(_SPEC, (), new=True, has_state=True, state=spec),
        }
        layout = Made(Name("torch.serialization", "_get_layout"), ("torch.strided",))
        cpu = Made(Name("torch", "device"), ("cpu",))
        args = (_DTENSOR, dtype, size, strides, 0, layout, cpu, False)
        return Made(_SUBCLASS, (_WRAPPER, _DTENSOR, args, (None, slots)))

    def _mesh(self, mesh: Made) -> Made:
        ranks, rank = self._ranks, self._rank
        where = mesh.state.get("_coordinate_on_dim")
        fields: dict[str, Any] = {}
        for name, value in mesh.state.items():
            if name in _SAME_ON_ALL:
                fields[name] = value
            elif name in _RANK_LISTS:
                fields[name] = tuple(range(ranks))
            elif name in ("_rank_map", "mesh"):
                fields[name] = self._counted(ranks)
            elif name == "_layout":
                fields[name] = _layout(value, ranks)
            elif name == "_rank":
                fields[name] = rank
            elif name == "_coordinate_on_dim":
                fields[name] = type(where)([rank])
            elif name == "_hash":
                fields[name] = None
            elif name == "_dim_group_infos":
                fields[name] = [(tag, list(range(ranks)), group) for tag, _, group in value]
            else:
                raise PickleProblem(f"a mesh of ranks with {name}, of a torch that is not known here")
        return replace(mesh, state=fields)

    def _counted(self, ranks: int) -> Made:
        numbers = struct.pack(f"<{ranks}i", *range(ranks))
        return self.plain(_INT, (ranks,), [Part(len(numbers), data=numbers)])


def _layout(layout: Made, ranks: int) -> Made:
    match layout.state:
        case {"axes": (Made(state={"shape": _, "stride": _}) as axis,), **rest} if not rest:
            # torch 2.13 leaves out dimensions of one.
            shape, stride = ((ranks,), (1,)) if ranks > 1 else ((), ())
            return replace(layout, state={"axes": (replace(axis, state={"shape": shape, "stride": stride}),)})
        # torch 2.10 to 2.12 have a layout of one number, a tuple of it, or a torch.Size, and keep dimensions of one.
        case {"shape": int(), "stride": 1 | (1,) as stride, **rest} if not rest:
            return replace(layout, state={"shape": ranks, "stride": stride})
        case {"shape": (int(),), "stride": 1 | (1,) as stride, **rest} if not rest:
            return replace(layout, state={"shape": (ranks,), "stride": stride})
        case {
            "shape": Made(func=Name("torch", "Size"), args=((int(),),)) as size,
            "stride": (1,),
            **rest,
        } if not rest:
            return replace(layout, state={"shape": replace(size, args=((ranks,),)), "stride": (1,)})
    raise PickleProblem("a mesh of ranks with a layout of a torch that is not known here")


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns torch's strides of a contiguous tensor: a length of 0 counts as 1."""
    return tuple(math.prod(max(n, 1) for n in shape[at + 1 :]) for at in range(len(shape)))
