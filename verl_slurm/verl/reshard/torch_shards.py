"""Plans how the shards of a step of verl's FSDP engine are divided, and divides them. The program of `dividing`:

    python -P -m verl_slurm.verl.reshard.torch_shards STEP RANKS

It says its plan, and reads from its standard input which directory it is to make; nothing there: it ends.

A shard is what one rank's `state_dict()` gives. Its tensors are of two forms: a DTensor, divided among the ranks along
one dimension or whole on each (all of FSDP2, and the parameters of FSDP1 on more than one rank); or a plain tensor,
whole in the file of every rank (a step counter, a buffer, everything on one rank of FSDP1).

FSDP1's optimizer knows no single parameters. Those of one unit (a layer of the model, or all that is in no layer) lie
one after the other in a flat one, which is divided in equal parts, the last one filled up with zeros. The optimizer
does not say how long it is without that filling. The names and sizes of the model's parameters do, with the names of
the units, which torch notes in the model's `_metadata`.

`extra_state` of a rank that stays is copied whole: its schedule and its generators. A new rank gets the schedule of
rank 0 and generators of its own. PPO's data.pt is copied byte for byte: verl's driver reads the data, and its position
does not depend on the ranks. SFT has a position for each data-parallel rank, counted in its own samples. That number
changes with the ranks, and the next step gets the rows that it would have got.

torch unpickles with `weights_only`, maps the files, and never has more than the tensors of one new file in memory.
"""

import ctypes
import errno
import json
import math
import os
import random
import re
import resource
import signal
import struct
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from verl_slurm.base.bounded import CONFIG, read_fd
from verl_slurm.base.errors import CheckpointCorrupt, VerlSlurmError
from verl_slurm.base.files import num_threads, open_new, write_file
from verl_slurm.base.tree import list_tree, open_below, open_directory
from verl_slurm.verl.reshard.dividing import (
    END,
    Answer,
    Divided,
    ReshardPlan,
    ReshardRefused,
    RolePlan,
    Worked,
    cannot,
)
from verl_slurm.verl.shards import identity_of
from verl_slurm.verl.step_copying import copy_files, how_to_copy
from verl_slurm.verl.step_layout import read_layout, shard_of

_ROOM = 512 << 20
_M_ARENA_MAX = -8  # malloc.h of glibc
_FSDP_CONFIG = "fsdp_config.json"
_MADE_BY = np.zeros(0).__reduce__()[0]
_GENERATORS = [
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    # By its place in NumPy 2 and 1.
    (_MADE_BY, "numpy._core.multiarray._reconstruct"),
    (_MADE_BY, "numpy.core.multiarray._reconstruct"),
]
"""What the state of NumPy's generator is made of, in `extra_state`."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)
_WRAPPED = "_fsdp_wrapped_module"
"""The name that FSDP1 gives to a module that it has wrapped."""
_OUTPUT = "lm_head.weight"
_INDEX = re.compile(r"state\.(\d{1,9})\.")
_SAMPLES = "samples_yielded"
_SEEDS = ("_base_seed", "_shared_seed")
"""Of the workers of a data loader; drawn by each rank for itself."""


class Unclear(ValueError):
    """A step of a form that cannot be divided. Args: what was found, and what could be divided."""


class ValueSlot(NamedTuple):
    """Where a value is kept in what a file holds: `holder[key]`."""

    path: str
    holder: Any
    key: Any

    @property
    def value(self) -> Any:
        return self.holder[self.key]


@dataclass
class DividedTensor:
    """One tensor of all ranks that saved, and what becomes of it.

    Attributes:
        slot: in rank 0's file.
        parts: each rank's own, on the CPU.
        shape: of the whole tensor; of one of FSDP1's flat parameters without the filling.
        dim: along which it is divided; None: whole on every rank.
        mesh: rank 0's; None: a plain tensor.
        new_dim, new_dtensor: the same for the new ranks: along what it is divided, and whether as a DTensor.
    """

    slot: ValueSlot
    parts: list[torch.Tensor]
    shape: tuple[int, ...]
    dim: int | None
    mesh: DeviceMesh | None
    is_flat: bool = False
    new_dim: int | None = None
    new_dtensor: bool = False

    @property
    def form(self) -> tuple[object, ...]:
        """Returns what all ranks agree on."""
        return (self.slot.path, self.shape, self.dim, self.mesh is None, self.parts[0].dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.parts[0].element_size()

    def new_shape(self, after: int, rank: int) -> tuple[int, ...]:
        """Returns the shape of the part that `rank` of `after` gets."""
        if self.is_flat:
            return (-(-self.shape[0] // after),)
        if self.new_dim is None:
            return self.shape
        begin, end = share(self.shape[self.new_dim], after, rank)
        return (*self.shape[: self.new_dim], end - begin, *self.shape[self.new_dim + 1 :])

    def new_part(self, after: int, rank: int) -> torch.Tensor:
        """Returns that part, new and on the CPU."""
        # Not on a GPU, whose number may not exist on the rank that loads it. Both FSDP and the optimizers move what
        # they load to where they need it.
        if self.new_dim is None:
            return self.parts[0].clone() if self.dim is None else torch.cat(self.parts, self.dim)
        begin, end = share(self.shape[self.new_dim], after, rank)
        pieces, at = [], 0
        for part in self.parts:
            first, last = max(begin - at, 0), min(end - at, part.shape[self.new_dim])
            at += part.shape[self.new_dim]
            pieces.append(part.narrow(self.new_dim, first, last - first) if first < last else part[:0])
        if self.is_flat:
            # Zeros, as FSDP1 itself fills up: their gradient is always 0.
            pieces.append(self.parts[0].new_zeros(self.new_shape(after, rank)[0] - (end - begin)))
        kept = [piece for piece in pieces if piece.numel()]
        return torch.cat(kept, self.new_dim) if kept else self.parts[0].new_empty(self.new_shape(after, rank))


@dataclass
class Shards:
    """The files of one kind of all ranks.

    Attributes:
        value: what rank 0's file holds.
        rest: digest of it without the tensors.
    """

    kind: Literal["model", "optim"]
    value: Any
    rest: bytes
    tensors: list[DividedTensor]

    def new_bytes(self, after: int, rank: int) -> int:
        """Returns the bytes of tensors in the new file of a rank."""
        return sum(math.prod(t.new_shape(after, rank)) * t.parts[0].element_size() for t in self.tensors)


@dataclass
class Role:
    """One model of a step; `device`: the type of the ranks' devices."""

    name: str
    engine: int
    kinds: list[Shards]
    device: str


@dataclass
class DividedStep:
    """A step that is to be divided among `after` ranks.

    Attributes:
        root: its open directory.
        data: data loader states of SFT from now on, and what each has given out (None: no such number is kept).
    """

    root: int
    path: Path
    names: list[str]
    before: int
    after: int
    roles: list[Role]
    data: tuple[int, int | None] | None


def share(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """Returns begin and end of the rows of `rank`, of `length` on `ranks`, as `torch.chunk` and FSDP divide them: all
    have ceil(length / ranks) rows, except that the last ones may have fewer, or none."""
    rows = -(-length // ranks)
    return min(rank * rows, length), min((rank + 1) * rows, length)


# ---- what a file holds


def _load(root: int, name: str, allowed: Sequence[Any] = ()) -> Any:
    """Maps a file of torch.save, which may name `allowed` besides torch's own. Raises Unclear for another."""
    with open_below(root, name) as fd, torch.serialization.safe_globals(list(allowed)):
        try:
            # With `weights_only` torch makes tensors, and calls nothing that is not named above or by itself.
            return torch.load(  # noqa: TID251
                f"/proc/self/fd/{fd}", map_location="cpu", weights_only=True, mmap=True
            )
        except (MemoryError, OSError):
            raise
        # torch's unpickler fails in any way on a pickle that is cut off or made up.
        except Exception as error:  # noqa: BLE001
            text = str(error)
            if "allocate memory" in text or "bad_alloc" in text:
                raise MemoryError from None
            named = re.search(r"GLOBAL (\S+)", text)
            why = f"it names {named[1]}" if named else f"{type(error).__name__}: {text.partition(chr(10))[0]}"
            raise Unclear(f"{name} is not read: {why[:300]}") from None


def _look_into(value: Any, spared: Collection[str] = ()) -> tuple[list[ValueSlot], bytes]:
    """Returns where a value has tensors or keys of `spared`, and a digest of all else. Raises Unclear."""
    slots: list[ValueSlot] = []
    known: dict[int, bytes] = {}

    def walk(value: Any, slot: ValueSlot) -> bytes:
        if isinstance(value, torch.Tensor) or (type(slot.key) is str and slot.key in spared):
            if not isinstance(slot.holder, dict | list):
                raise Unclear(f"{slot.path} is a tensor in a tuple")
            slots.append(slot)
            return b"tensor"
        # By identity: a few bytes can say a list of two times the same list, forty times over.
        if id(value) not in known:
            known[id(value)] = sha256(
                b"|".join([type(value).__name__.encode(), *inner(value, slot.path)])
            ).digest()
        return known[id(value)]

    def inner(value: Any, path: str) -> Iterator[bytes]:
        if type(value) in _PLAIN:
            yield repr(value).encode(errors="surrogatepass")
        elif type(value) in (dict, OrderedDict):
            for key, one in value.items():
                if type(key) not in _PLAIN:
                    raise Unclear(f"{path} has a {type(key).__name__} for a key")
                yield repr(key).encode(errors="surrogatepass")
                yield walk(one, ValueSlot(f"{path}.{key}".lstrip("."), value, key))
            if type(value) is OrderedDict:
                yield walk(vars(value), ValueSlot(path, None, None))
        elif type(value) in (list, tuple, torch.Size):
            for at, one in enumerate(value):
                yield walk(one, ValueSlot(f"{path}.{at}", value, at))
        else:
            raise Unclear(f"{path} is a {type(value).__module__}.{type(value).__name__}")

    try:
        return slots, walk(value, ValueSlot("", None, None))
    except RecursionError:
        raise Unclear("nested too deeply") from None


def _read_shards(root: int, role: str, kind: Literal["model", "optim"], ranks: int) -> Shards:
    """Reads what the files of all ranks hold. Of those after the first the parts alone are kept."""
    shards: Shards | None = None
    for rank in range(ranks):
        value = _load(root, shard_name(role, kind, ranks, rank))
        slots, rest = _look_into(value)
        tensors = [_spread(slot, rank, ranks) for slot in slots]
        shards = shards or Shards(kind, value, rest, tensors)
        if (rest, [one.form for one in tensors]) != (shards.rest, [one.form for one in shards.tensors]):
            raise Unclear(f"{kind} of rank {rank} holds other things than that of rank 0")
        for first, one in zip(shards.tensors, tensors, strict=True):
            first.parts += one.parts if rank else []
    assert shards is not None
    for one in shards.tensors:
        parts = [part.to("meta") for part in one.parts]
        together = parts[0].shape if one.dim is None else torch.cat(parts, one.dim).shape
        if one.shape != together:
            raise Unclear(f"{one.slot.path} has parts of {list(together)} together, {list(one.shape)} in all")
    return shards


def _spread(slot: ValueSlot, rank: int, ranks: int) -> DividedTensor:
    """Returns a tensor with the part of one rank."""
    tensor, path = slot.value, slot.path
    dim, mesh, local = None, None, tensor
    if type(tensor) is DTensor:
        dim, mesh, local = _dim(tensor, path, rank, ranks), tensor.device_mesh, tensor.to_local()
    if type(local) is not torch.Tensor:
        raise Unclear(f"{path} is a {type(local).__module__}.{type(local).__name__}")
    if local.layout is not torch.strided or local.device.type != "cpu" or local.is_quantized:
        raise Unclear(f"{path} is a tensor of {local.layout} on {local.device}, {local.dtype}")
    if not local.is_contiguous():
        raise Unclear(f"{path} is not contiguous")
    return DividedTensor(slot, [local], tuple(tensor.shape), dim, mesh)


def _dim(tensor: DTensor, path: str, rank: int, ranks: int) -> int | None:
    """Returns the dimension along which a DTensor is divided."""
    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.ndim != 1 or len(placements) != 1:
        shown = " x ".join(map(str, mesh.mesh_dim_names or ["?"] * mesh.ndim))
        raise Unclear(
            f"{path} lies on a mesh of {shown}: replicas of shards (fsdp_size) or tensor parallelism"
        )
    if mesh.mesh.tolist() != list(range(ranks)) or tuple(mesh.get_coordinate() or ()) != (rank,):
        raise Unclear(f"{path} lies on a mesh that does not hold all {ranks} ranks in order")
    [placement] = placements
    if type(placement) is Replicate:
        return None
    # Not a subclass, which divides in another way.
    if type(placement) is not Shard or not 0 <= placement.dim < tensor.ndim:
        raise Unclear(f"{path} is divided by {placement}")
    return placement.dim


def shard_name(role: str, kind: str, ranks: int, rank: int) -> str:
    """Names a shard, relative to the step."""
    return f"{role}/{kind}_world_size_{ranks}_rank_{rank}.pt".lstrip("/")


# ---- what a step holds


class _Shape(msgspec.Struct):
    FSDP_version: int
    world_size: int


def read_step(root: int, path: Path, after: int) -> DividedStep:
    """Reads what the shards of a step hold, and plans what becomes of them. Needs `torch.no_grad`.

    Raises:
        Unclear: it cannot be divided so.
        OSError: it cannot be read.
    """
    names = [entry.path for entry in list_tree(root) if entry.kind == "file"]
    layout = read_layout(names)
    before = layout.world_size or 0
    roles = [_read_role(root, name, before, after) for name in layout.roles]
    data = _plan_data(root, before, layout.num_data, after) if layout.entry == "sft" else None
    return DividedStep(root, path, names, before, after, roles, data)


def _read_role(root: int, name: str, before: int, after: int) -> Role:
    where = f"{name}/{_FSDP_CONFIG}".lstrip("/")
    with open_below(root, where) as fd:
        try:
            shape = msgspec.json.decode(read_fd(fd, CONFIG), type=_Shape)
        except (msgspec.MsgspecError, ValueError) as error:
            raise Unclear(f"{where}: {error}") from None
    if shape.FSDP_version not in (1, 2) or shape.world_size != before:
        raise Unclear(f"{where} says FSDP {shape.FSDP_version} on {shape.world_size} ranks")
    model, optimizer = (_read_shards(root, name, kind, before) for kind in ("model", "optim"))
    is_first = shape.FSDP_version == 1
    for one in (*model.tensors, *optimizer.tensors):
        one.new_dim, one.new_dtensor = one.dim, one.mesh is not None
        # On one rank FSDP1 divides nothing and saves plain tensors; on more it wants DTensors.
        if is_first and after == 1:
            one.new_dim, one.new_dtensor = None, False
    if is_first and before == 1:
        for one in model.tensors:
            one.new_dim, one.new_dtensor = (0, True) if one.shape else (None, False)
    if is_first:
        _set_lengths(optimizer, _flat_lengths(name, before, model, optimizer))
    generators = _generators(_load(root, shard_name(name, "extra_state", before, 0), _GENERATORS))
    # verl names the state of the accelerator's generator by its type.
    device = min(set(generators) - {"cpu", "numpy", "random"}, default="cpu")
    return Role(name, shape.FSDP_version, [model, optimizer], device)


def _generators(extra: Any) -> dict[str, Any]:
    found = extra.get("rng") if isinstance(extra, dict) else None
    return found if isinstance(found, dict) else {}


def _flat_index(tensor: DividedTensor) -> int | None:
    """Returns the number of the flat parameter that a tensor of FSDP1's optimizer belongs to."""
    match = _INDEX.match(tensor.slot.path)
    return int(match[1]) if match is not None and tensor.parts[0].ndim == 1 else None


def _set_lengths(optimizer: Shards, lengths: Sequence[int]) -> None:
    for one in optimizer.tensors:
        if (at := _flat_index(one)) is not None:
            one.shape, one.dim, one.new_dim, one.is_flat = (lengths[at],), 0, 0, True


def _flat_lengths(role: str, ranks: int, model: Shards, optimizer: Shards) -> list[int]:
    """Returns the length of each of FSDP1's flat parameters, in the optimizer's order."""
    groups = optimizer.value.get("param_groups") if isinstance(optimizer.value, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise Unclear(f"{role} has an optimizer without groups of parameters")
    count = sum(len(group.get("params", ())) for group in groups)
    parts: dict[int, set[int]] = defaultdict(set)
    for one in optimizer.tensors:
        if (at := _flat_index(one)) is not None:
            parts[at] |= {len(part) for part in one.parts}
    for lengths in _candidates(model, ranks):
        # Of each unit the optimizer has a part of this length on every rank, if it has stepped at all.
        fits = all(at < len(lengths) and found == {-(-lengths[at] // ranks)} for at, found in parts.items())
        if fits and len(groups) == 1 and count == len(lengths):
            return lengths
    raise Unclear(
        f"{role} has an optimizer of {count} flat parameters in {len(groups)} groups, whose lengths are not those of "
        "the units that it wraps",
        "FSDP1 without use_orig_params; or FSDP2 (strategy: fsdp2)",
    )


def _candidates(model: Shards, ranks: int) -> Iterator[list[int]]:
    """Yields the lengths of the flat parameters, with and without an output layer that is the embedding."""
    wrapped = [name for name in getattr(model.value, "_metadata", {}) if str(name).endswith(_WRAPPED)]
    # In the order of the model; the root is empty. torch lists a module's own parameters before those of the modules
    # in it, so the order of the names counts.
    units = [
        str(name).removesuffix(_WRAPPED).replace(f"{_WRAPPED}.", "").removesuffix(".") for name in wrapped
    ]
    if "" not in units:
        return

    def unit_of(path: str) -> str:
        return max((unit for unit in units if not unit or path.startswith(f"{unit}.")), key=len)

    lengths = dict.fromkeys(units, 0)
    for one in model.tensors:
        # A buffer is plain beside DTensors, and in no flat parameter.
        if ranks == 1 or one.mesh is not None:
            lengths[unit_of(one.slot.path)] += math.prod(one.shape)
    yield [length for length in lengths.values() if length]
    # Such a layer has two names in the model's file, and its numbers are in the flat parameter once.
    for one in model.tensors:
        if one.slot.path == _OUTPUT:
            lengths[unit_of(_OUTPUT)] -= math.prod(one.shape)
            yield [length for length in lengths.values() if length]


def _read_data(root: int, name: str) -> tuple[Any, list[ValueSlot], bytes]:
    """Returns the state of a data loader, where it has numbers of samples given out, and a digest of the rest."""
    value = _load(root, name)
    slots, rest = _look_into(value, (_SAMPLES, *_SEEDS))
    for slot in slots:
        # It would be some generator's or the data set's own, whose meaning for other ranks is not known.
        if isinstance(slot.value, torch.Tensor):
            raise Unclear(f"{name} holds a tensor: {slot.path}")
    return value, [slot for slot in slots if slot.key == _SAMPLES and type(slot.value) is int], rest


def _plan_data(root: int, before: int, count: int, after: int) -> tuple[int, int | None]:
    """Returns the number of SFT's data loader states, and what each has given out; None: no such number is kept."""
    read = [_read_data(root, f"data_{rank}.pt") for rank in range(count)]
    samples = {slot.value for _, slots, _ in read for slot in slots}
    # Each loader gives out every D-th row of one order, so all are at the same place after each step.
    if len({rest for _, _, rest in read}) > 1 or len(samples) > 1:
        raise Unclear("the data loaders of the ranks are at different places")
    # More ranks than states: groups of ranks share the sequences of a batch (ulysses), in groups of the same size.
    together = before // count
    if after % together:
        raise Unclear(
            f"{after} ranks, of which {together} share a sequence (ulysses)", f"a multiple of {together}"
        )
    wanted = after // together
    if not samples:
        return wanted, None
    total = samples.pop() * count
    if total % wanted:
        raise Unclear(
            f"{total} samples given out in this epoch, and {wanted} data loaders",
            "a number of ranks by which data.train_batch_size can be divided",
        )
    return wanted, total // wanted


def plan_of(step: DividedStep) -> ReshardPlan:
    """Returns what is to be done."""
    roles = []
    for role in step.roles:
        tensors = [one for shards in role.kinds for one in shards.tensors]
        roles.append(
            RolePlan(
                role=role.name,
                engine=role.engine,
                num_tensors=len(tensors),
                num_divided=sum(one.new_dtensor or one.is_flat for one in tensors),
                num_bytes=sum(one.num_bytes for one in tensors),
            )
        )
    every = [shards for role in step.roles for shards in role.kinds]
    return ReshardPlan(
        before=step.before,
        after=step.after,
        roles=tuple(roles),
        num_data=None if step.data is None else step.data[0],
        written_bytes=sum(one.new_bytes(step.after, rank) for one in every for rank in range(step.after)),
        largest_bytes=max(one.new_bytes(step.after, 0) for one in every),
    )


# ---- the new files


def _save(path: Path, value: Any) -> None:
    """Writes a new file, 0600. Not durable: a commit seals it."""
    with os.fdopen(open_new(path), "wb") as file:
        torch.save(value, file)


def _mesh(former: DeviceMesh | None, device: str, ranks: int, rank: int) -> DeviceMesh:
    """Returns the mesh of ranks as `rank` has it, without a process group."""
    names = ("fsdp",) if former is None else former.mesh_dim_names
    kind = device if former is None else former.device_type
    made = DeviceMesh(kind, torch.arange(ranks), mesh_dim_names=names, _init_backend=False, _rank=rank)
    # FSDP1 gathers by the group of this name: that of all ranks.
    made._dim_group_names = getattr(former, "_dim_group_names", ["0"])
    return made


def _as_dtensor(tensor: DividedTensor, part: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    whole = torch.empty(tensor.shape, device="meta")
    placement: Placement = Replicate() if tensor.new_dim is None else Shard(tensor.new_dim)
    meta = TensorMeta(whole.shape, whole.stride(), part.dtype)
    # Not `from_local`, which moves the part to the mesh's devices.
    spec = DTensorSpec(mesh, (placement,), tensor_meta=meta)
    return DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _write_shards(shards: Shards, role: Role, after: int, folder: Path) -> Iterator[int]:
    """Writes the files of one kind; yields the bytes of each."""
    former = next((one.mesh for one in shards.tensors if one.mesh is not None), None)
    for rank in range(after):
        mesh, known = _mesh(former, role.device, after, rank), dict[Any, torch.Tensor]()
        for one in shards.tensors:
            # An output layer that is the embedding lies once in a file, under two names.
            key = (*one.form[1:], *(part.data_ptr() for part in one.parts))
            if key not in known or not one.num_bytes:
                known[key] = one.new_part(after, rank)
            new = _as_dtensor(one, known[key], mesh) if one.new_dtensor else known[key]
            one.slot.holder[one.slot.key] = new
        _save(folder / shard_name("", shards.kind, after, rank), shards.value)
        for one in shards.tensors:  # before the next file's are made
            one.slot.holder[one.slot.key] = None
        yield shards.new_bytes(after, rank)


def _write_extra(step: DividedStep, role: str, folder: Path) -> None:
    for rank in range(step.after):
        path = folder / shard_name("", "extra_state", step.after, rank)
        if rank < step.before:
            name = shard_name(role, "extra_state", step.before, rank)
            with open_below(step.root, name) as fd, open(os.dup(fd), "rb") as former:
                write_file(path, former.read(), durable=False)
        else:
            extra = _load(step.root, shard_name(role, "extra_state", step.before, 0), _GENERATORS)
            _renew(_generators(extra), rank)
            _save(path, extra)


def _renew(generators: dict[str, Any], rank: int) -> None:
    """Gives a new rank generators of its own: the same each time, and no two ranks alike."""
    # A copy of another rank's would draw the same noise on both.
    state = generators.get("cpu")
    first = bytes(state.tolist()) if isinstance(state, torch.Tensor) else b""
    seed = int.from_bytes(sha256(first + b"|reshard|%d" % rank).digest()[:8], "little")
    for name, former in generators.items():
        if name == "random":
            generators[name] = random.Random(seed).getstate()  # noqa: S311 - verl's own use of it
        elif name == "numpy":
            generators[name] = np.random.RandomState(seed & 0xFFFFFFFF).get_state()
        elif name == "cpu":
            generators[name] = torch.Generator().manual_seed(seed).get_state()
        # A GPU's: seed and offset. torch makes none where no GPU is.
        elif isinstance(former, torch.Tensor) and former.numel() == 16:
            generators[name] = torch.frombuffer(
                bytearray(struct.pack("<Qq", seed, 0)), dtype=torch.uint8
            ).clone()


def _write_data(step: DividedStep, count: int, samples: int | None, target: Path) -> None:
    for rank in range(count):
        own = f"data_{rank}.pt"
        value, slots, _ = _read_data(step.root, own if own in step.names else "data_0.pt")
        for slot in slots:
            slot.holder[slot.key] = samples
        _save(target / own, value)


# ---- whether they hold the same


def _digest(tensor: DividedTensor, where: Path, on_bytes: Callable[[int], None]) -> bytes:
    """Returns the digest of a tensor put together: path, type, shape and bits."""
    path = tensor.slot.path
    head = f"{path}|{tensor.parts[0].dtype}|{tensor.shape}|".encode()
    copies = [tensor.parts] if tensor.dim is not None else [[part] for part in tensor.parts]
    digests = []
    for parts in copies:
        whole, remaining = sha256(head), math.prod(tensor.shape)
        for piece in _in_order(parts, tensor.dim or 0):
            numbers = piece.reshape(-1)
            whole.update(numbers[:remaining].view(torch.uint8).numpy().data)
            if numbers[remaining:].view(torch.uint8).any():
                # The lengths would be wrong, and with them the place of each number.
                raise Unclear(f"{path} is filled up with other numbers than 0")
            remaining -= min(remaining, len(numbers))
        digests.append(whole.digest())
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise CheckpointCorrupt(
            "the ranks disagree about a tensor that all of them hold",
            where=where,
            found=f"{path} differs between rank 0 and rank {other}",
            remedy="reshard an older checkpoint, or go on with the number of ranks that saved it",
        )
    on_bytes(tensor.num_bytes)
    return digests[0]


def _in_order(parts: Sequence[torch.Tensor], dim: int) -> Iterator[torch.Tensor]:
    """Yields the pieces of a tensor in the order of its numbers."""
    if dim == 0:
        yield from parts
        return
    for rows in zip(*parts, strict=True):  # one row of each part, which needs little memory
        yield torch.cat(rows, dim - 1)


def _digests(tensors: Sequence[DividedTensor], where: Path, on_bytes: Callable[[int], None]) -> list[bytes]:
    with ThreadPoolExecutor(num_threads(), thread_name_prefix="compare") as pool:
        return list(pool.map(lambda one: _digest(one, where, on_bytes), tensors))


def divide(step: DividedStep, target: Path, on_bytes: Callable[[int], None]) -> str:
    """Makes `target`, a new directory, and returns the digest of all tensors put together.

    Args:
        step: its tensors are gone afterwards.
        on_bytes: told how many more bytes were written or compared; by several threads.

    Raises:
        CheckpointCorrupt: the ranks disagree about what they all hold, or the copy is not the same.
        Unclear: a flat parameter is filled up with other numbers than 0.
        OSError: the storage refused.
    """
    whole, after = sha256(), step.after
    entries = [
        entry for entry in list_tree(step.root) if entry.path in step.names and _is_kept(entry.path, step)
    ]
    kept = {entry.path: identity_of(entry.info) for entry in entries}
    copy_files(step.path, target, kept, how_to_copy(step.path, target.parent))
    for role in step.roles:
        folder = target / role.name
        folder.mkdir(mode=0o700, exist_ok=True)
        with open_below(step.root, f"{role.name}/{_FSDP_CONFIG}".lstrip("/")) as fd:
            values = json.loads(read_fd(fd, CONFIG))
        config = json.dumps({**values, "world_size": after}, indent=4).encode()
        write_file(folder / _FSDP_CONFIG, config, durable=False)
        _write_extra(step, role.name, folder)
        for shards in role.kinds:
            before = _digests(shards.tensors, step.path / role.name, on_bytes)
            for num_bytes in _write_shards(shards, role, after, folder):
                on_bytes(num_bytes)
            # As they lie there now, read like any others; of the plan the length of flat parameters alone is used.
            with open_directory(target) as made:
                new = _read_shards(made, role.name, shards.kind, after)
            if len(new.tensors) != len(shards.tensors) or new.rest != shards.rest:
                raise _differs(folder, f"other tensors in {shards.kind}")
            for one, former in zip(new.tensors, shards.tensors, strict=True):
                if former.is_flat:
                    one.shape, one.dim, one.is_flat = former.shape, 0, True
            for one, was, now in zip(
                shards.tensors, before, _digests(new.tensors, folder, on_bytes), strict=True
            ):
                if was != now:
                    raise _differs(folder, f"{shards.kind}: {one.slot.path}")
                whole.update(was)
    if step.data is not None:
        _write_data(step, *step.data, target)
    return whole.hexdigest()


def _is_kept(path: str, step: DividedStep) -> bool:
    """Returns whether a file is copied as it is."""
    # A step of SFT has data_N.pt; a file of that name in PPO's belongs to somebody else.
    is_data = step.data is not None and path.startswith("data_") and path.endswith(".pt")
    return shard_of(path) is None and path.rpartition("/")[2] != _FSDP_CONFIG and not is_data


def _differs(where: Path, found: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        "the divided checkpoint is not the same as the one it was made of",
        where=where,
        found=found,
        remedy="nothing was kept of it; the source is as it was. Report it",
    )


# ---- the program


def _limit_memory(num_bytes: int) -> None:
    """Limits the addresses of this process to what it has now, and so much more."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = now + num_bytes
    resource.setrlimit(
        resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
    )


def _work(path: Path, after: int, say: Callable[[Answer], None]) -> None:
    with open_directory(path) as root:
        # A small file may describe gigabytes. Not the size alone: a hole has any.
        infos = [entry.info for entry in list_tree(root) if entry.kind == "file"]
        _limit_memory(sum(min(info.st_size, info.st_blocks * 512) for info in infos) + _ROOM)
        step = read_step(root, path, after)
        plan = plan_of(step)
        say(plan)
        # The other side says it once it knows that there is room.
        target = os.fsdecode(sys.stdin.buffer.read())
        if not target:
            return
        # The new files are mapped when they are compared, and one of them is in memory while it is written.
        _limit_memory(plan.written_bytes + plan.largest_bytes + _ROOM)
        say(Divided(tensors=divide(step, Path(target), lambda num_bytes: say(Worked(num_bytes=num_bytes)))))


def _refusal(error: VerlSlurmError) -> ReshardRefused:
    facts = {name: getattr(error, name) for name in ("what", "where", "found", "expected", "remedy")}
    shown: dict[str, Any] = {name: None if value is None else str(value) for name, value in facts.items()}
    return ReshardRefused(exit_code=int(error.exit_code), **shown)


def main(argv: Sequence[str]) -> None:
    """Writes the answers to standard output, which nothing else is printed to."""
    lines = os.dup(1)
    os.dup2(2, 1)
    path, after = Path(argv[0]), int(argv[1])
    # The first process of a container gets no signal that it has no handler for.
    signal.signal(END, lambda *_: os._exit(1))

    def say(answer: Answer) -> None:
        os.write(lines, msgspec.json.encode(answer) + b"\n")

    # Each thread of torch's own, and each arena of malloc's, would take 64 MiB of addresses, and no less time.
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    try:
        with torch.no_grad():
            _work(path, after, say)
    except Unclear as error:
        say(_refusal(cannot(path, *error.args)))
    except VerlSlurmError as error:
        say(_refusal(error))
    except MemoryError:
        resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)
        found = f"they take more memory than their own size and {_ROOM >> 20} MiB"
        say(_refusal(cannot(path, f"shards that are described by more than verl writes: {found}")))
    except OSError as error:
        place = None if error.filename is None else str(error.filename)
        say(ReshardRefused(errno=error.errno or errno.EIO, what=error.strerror or str(error), where=place))
    # At once: gigabytes of small objects take long to free.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
