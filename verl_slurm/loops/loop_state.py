"""A loop's state: tensors by name, which our own saver takes, and for each rank a tree. Needs torch.

Objects with `state_dict` and `load_state_dict` are state (models, optimizers, schedulers, scalers, StatefulDataLoader,
samplers), and so is a `torch.Generator`. Their state consists of maps, lists, numbers, text and tensors. Anything else
is refused by name before the first step, because it could only be pickled, and a pickle runs code.

A tensor's name is its path in the tree (`model/layer.weight`), and a mark stands there in its place:

```
{_MARK: ["tensor", NAME]}         "array" for one of NumPy
{_MARK: ["tensor", NAME, DTYPE, SHAPE]}   of a type that no checkpoint has (`tensor_index.DTYPE_BYTES`): its bytes
{_MARK: ["tuple", [...]]}         a list would come back
{_MARK: ["int", "0x1f..."]}       of more than 64 bits, as NumPy's generators have
```

Tensors with the same bits on every rank are written once, of DTensors each rank writes its part, and all others are
each rank's own (`checkpoint.format.specification`). The rank's runtime state has the tree and the generators. Digests
decide which tensors are common, not the model's wrapper: a replica that has drifted, or batch statistics that each rank
has for itself, are kept for each rank as they are. TRL's trainers have such files in the Trainer's own directory.
"""

import hashlib
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from verl_slurm.base.errors import UNREADABLE, CheckpointCorrupt, ConfigError
from verl_slurm.checkpoint.format.specification import GUEST_DOMAINS, FileEntry
from verl_slurm.checkpoint.format.tensor_index import DTYPE_BYTES, TensorEntry
from verl_slurm.checkpoint.store.reader import CheckpointReader
from verl_slurm.loops.step_end import gather_entries
from verl_slurm.runtime_state.codec import encode
from verl_slurm.runtime_state.format import RuntimeState, runtime_state_name
from verl_slurm.save.ranks import rng
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.loader import read_runtime_state, read_tensors
from verl_slurm.save.ranks.rng import Generators
from verl_slurm.save.ranks.staging import Staging
from verl_slurm.save.ranks.tensors import Tensors
from verl_slurm.save.writer.file_sealing import seal_small
from verl_slurm.save.writer.protocol import Write, Written
from verl_slurm.save.writer.writing import write_small

MAX_TREE_BYTES = 64 << 20
"""A reader makes an object of every byte of a hostile tree. What is larger belongs into a tensor."""
_MARK = "__verl_slurm__"
_FRESH = "not stepped yet"
_PLAIN = (bool, int, float, type(None))


@runtime_checkable
class Stateful(Protocol):
    """An object that can be state."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state_dict: Any, /) -> object: ...


@dataclass
class Leaves:
    """The tensors of a tree, by name."""

    plain: dict[str, torch.Tensor] = field(default_factory=dict)
    sharded: dict[str, DTensor] = field(default_factory=dict)
    _names: dict[tuple[object, ...], str] = field(default_factory=dict)

    def name(self, tensor: torch.Tensor, path: str) -> str:
        """Adds a plain tensor; returns its name: of those that share memory, the first one's path."""
        # Tied weights are in a state dict under each of their names.
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        name = self._names.setdefault(memory, path) if tensor.numel() else path
        if name == path:
            self.require_new(path)
            self.plain[path] = tensor
        return name

    def require_new(self, path: str) -> None:
        """Refuses a path for the second time: `{"a/b": ..., "a": {"b": ...}}`."""
        if path in self.plain or path in self.sharded:
            raise ConfigError("a state has two tensors of one name", where=path)


class Objects:
    """The objects of a loop's state, by the names that the loop gave; None is left out.

    Raises:
        ConfigError: something that has no state, or an optimizer of sharded parameters without its model.
    """

    def __init__(self, named: Mapping[str, object]) -> None:
        # None is left out, so `run(scheduler=None)` works where a loop has its scheduler behind a switch.
        self._objects = {name: thing for name, thing in named.items() if thing is not None}
        for name, thing in self._objects.items():
            # A class has the methods, too, and no state: `isinstance` with a runtime protocol accepts it.
            if not isinstance(thing, Stateful | torch.Generator) or isinstance(thing, type):
                raise ConfigError(
                    "no state can be taken of this",
                    where=f"verl_slurm.run({name}=...)",
                    found=type(thing).__name__,
                    expected="an object with state_dict() and load_state_dict(), or a torch.Generator",
                    remedy="for data: torchdata's StatefulDataLoader, a sampler with both methods, or a seed from the "
                    "step (docs/guests.md)",
                )
        self._models = [thing for thing in self._objects.values() if isinstance(thing, nn.Module)]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._objects))

    def take(self, *, as_target: bool = False) -> dict[str, Any]:
        """Returns name → state, tensors as they are: they share memory with the training.

        Args:
            as_target: to be loaded into. A sharded optimizer that has not stepped yet gets artificial state for that,
                which counts as a step of it: do not use this on one that will train without a load.
        """
        # Sorted: neither paths nor files depend on the order in which the program names its objects.
        return {name: self._state_of(thing, name, as_target) for name, thing in sorted(self._objects.items())}

    def put_back(self, state: Mapping[str, Any]) -> None:
        """Restores the objects. `state` has the names of `take`.

        Raises:
            ConfigError: an object does not accept it, for instance because the model has changed.
        """
        for name, thing in sorted(self._objects.items()):
            try:
                self._put(thing, name, state[name])
            # What torch raises for missing keys and other shapes. As a ConfigError it ends the run: a restart finds
            # the same.
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                raise misfit(name, f"{type(error).__name__}: {error}") from error

    def _put(self, thing: object, name: str, state: Any) -> None:
        if isinstance(thing, torch.Generator):
            thing.set_state(state["state"])
        elif isinstance(thing, Optimizer) and _is_sharded(thing):
            from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

            if _FRESH in state:
                # `take(as_target=True)` has given it artificial state; with it the first real step would count as the
                # second.
                thing.state.clear()
                thing.load_state_dict(state[_FRESH])
                return
            set_optimizer_state_dict(self._model_of(thing, name), thing, state)
        else:
            assert isinstance(thing, Stateful)
            thing.load_state_dict(state)

    def _state_of(self, thing: object, name: str, as_target: bool) -> Any:
        if isinstance(thing, torch.Generator):
            return {"state": thing.get_state()}
        if isinstance(thing, Optimizer) and _is_sharded(thing):
            # torch's get_optimizer_state_dict steps the optimizer once to create its state, so it is not called here.
            if not thing.state and not as_target:
                return {_FRESH: thing.state_dict()}
            from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

            return get_optimizer_state_dict(self._model_of(thing, name), thing)
        assert isinstance(thing, Stateful)
        return thing.state_dict()

    def _model_of(self, optimizer: Optimizer, name: str) -> nn.Module:
        # By identity: torch's functions for sharded optimizers name state by the model's parameter names.
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model in self._models:
            if mine & {id(p) for p in model.parameters()}:
                return model
        raise ConfigError(
            "an optimizer of sharded parameters comes without its model",
            where=f"verl_slurm.run({name}=...)",
            expected="its model as well",
            remedy="verl_slurm.run(model=model, optimizer=optimizer)",
        )


def _is_sharded(optimizer: Optimizer) -> bool:
    return any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])


def misfit(where: object, found: object, expected: object = None) -> ConfigError:
    """Returns the error that these objects are not those of the run that wrote the checkpoint."""
    return ConfigError(
        "the checkpoint does not fit these objects",
        where=where,
        found=found,
        expected=expected,
        remedy="give verl_slurm.run the objects of the run that wrote it, built alike, by the same names",
    )


def split(tree: Any) -> tuple[Any, Leaves]:
    """Returns a tree of plain data with marks in place of its tensors, and the tensors.

    Raises:
        ConfigError: it holds something that would have to be pickled.
    """
    leaves = Leaves()
    return _marked(tree, "", leaves), leaves


def join(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Rebuilds what was given to `split`.

    Raises:
        ConfigError: a mark has no tensor.
    """
    if isinstance(tree, dict):
        if _MARK not in tree:
            return {key: join(value, tensors) for key, value in tree.items()}
        kind, what, *stored = tree[_MARK]
        if kind == "tuple":
            return tuple(join(value, tensors) for value in what)
        if kind == "int":
            return int(what, 0)
        if what not in tensors:
            raise misfit(what, "no such tensor")
        tensor = tensors[what]
        if stored:
            tensor = tensor.view(getattr(torch, stored[0])).reshape(stored[1])
        # Restored as it was given: a state_dict that had an array may call NumPy's methods on it.
        return tensor.numpy() if kind == "array" else tensor
    if isinstance(tree, list):
        return [join(value, tensors) for value in tree]
    return tree


def _marked(value: Any, path: str, leaves: Leaves) -> Any:
    # Before Tensor, of which DTensor is a subclass: each rank has a part of it.
    if isinstance(value, DTensor):
        if _dtype_name(value) not in DTYPE_BYTES:
            raise _refused(path, f"a DTensor of {value.dtype}")
        leaves.require_new(path)
        leaves.sharded[path] = value
        return {_MARK: ["tensor", path]}
    if isinstance(value, torch.Tensor):
        return _marked_tensor("tensor", value, path, leaves)
    if isinstance(value, np.ndarray):
        try:
            # A copy: `from_numpy` shares memory, and may be read-only.
            return _marked_tensor("array", torch.from_numpy(value.copy()), path, leaves)
        except (TypeError, ValueError):  # of objects, of text, of another byte order
            raise _refused(path, f"an array of {value.dtype}") from None
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return str(value)
    if type(value) is int and not -(2**63) <= value < 2**63:
        return {_MARK: ["int", hex(value)]}
    # Exact types: a subclass of int or float would come back as another type.
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        _require_keys(value, path)
        return {
            key: _marked(inner, f"{path}/{key}" if path else str(key), leaves) for key, inner in value.items()
        }
    # Exact types: a named tuple would need its class at the resume.
    if type(value) in (list, tuple):
        items = [_marked(inner, f"{path}/{at}", leaves) for at, inner in enumerate(value)]
        return items if isinstance(value, list) else {_MARK: ["tuple", items]}
    raise _refused(path, type(value).__name__)


def _marked_tensor(kind: str, tensor: torch.Tensor, path: str, leaves: Leaves) -> dict[str, Any]:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise _refused(path, f"a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}")
    stored = []
    if (dtype := _dtype_name(tensor)) not in DTYPE_BYTES:
        stored = [dtype, list(tensor.shape)]
        tensor = tensor.reshape(-1).view(torch.uint8)
    return {_MARK: [kind, leaves.name(tensor, path), *stored]}


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _refused(path: str, found: str) -> ConfigError:
    return ConfigError(
        "a state holds what cannot be saved without a pickle",
        where=path,
        found=found,
        expected="maps, lists, numbers, text and tensors",
        remedy="leave it out of state_dict(), or turn it into one of these",
    )


def _require_keys(value: Mapping[Any, Any], path: str) -> None:
    """Refuses keys that are neither text nor int, our mark, and two that give the same path: 1 and `1`."""
    names = [str(key) for key in value]
    # Exact types: any other key would need its class at the resume.
    strange = [key for key in value if type(key) not in (str, int)]
    if strange or len(set(names)) != len(names) or _MARK in names:
        raise ConfigError("a state has keys that cannot be saved", where=path, found=strange or names[:5])


def encode_state(objects: Objects) -> tuple[bytes, Leaves]:
    """Returns the tree of the state, as it will lie in a file, and its tensors, which share memory with the training.

    Raises:
        ConfigError: it cannot be saved.
    """
    tree, leaves = split(objects.take())
    data = msgspec.msgpack.encode(tree)
    if len(data) > MAX_TREE_BYTES:
        largest = max(tree, key=lambda name: len(msgspec.msgpack.encode(tree[name])))
        raise ConfigError(
            "a state has too many values that are no tensors",
            where=largest,
            found=f"{len(data)} bytes",
            expected=f"at most {MAX_TREE_BYTES}",
            remedy="have state_dict() return them as one tensor or array",
        )
    return data, leaves


def take_state(
    objects: Objects, step: int, ranks: Collective, *, domain: str = GUEST_DOMAINS[0]
) -> tuple[dict[str, Tensors], RuntimeState]:
    """Returns what a saver takes of this rank: tensors by domain and name, live ones, and the rest. Collective.

    Raises:
        RanksFailed: some rank has a state that cannot be saved.
    """
    tree, leaves, digests = ranks.together("taking the state", lambda: _digested(objects, ranks.world_size))
    common = common_of(digests, ranks)
    own = {path for path, digest in digests.items() if digest not in common}
    shared: Tensors = {path: tensor for path, tensor in leaves.plain.items() if path not in own}
    runtime = RuntimeState(
        rank=ranks.rank,
        world_size=ranks.world_size,
        step=step,
        phase="step_end",
        index=0,
        safe_point=0,
        rollout_offset=0,
        episode_id=0,
        kl_coef=0.0,
        # Generators per rank: they differ, and a resume has to continue each one.
        rng=rng.capture(),
        loop={"tree": np.frombuffer(tree, dtype=np.uint8)},
    )
    mine = {f"{ranks.rank:04d}/{path}": leaves.plain[path] for path in sorted(own)}
    return {domain: shared | leaves.sharded, f"{domain}/own": mine}, runtime


def write_state(
    objects: Objects, directory: Path, step: int, ranks: Collective, *, domain: str
) -> tuple[FileEntry, ...]:
    """Writes this rank's state into `domain`, an empty directory in that of a framework, which all ranks see. Durable
    when it returns the entries of all ranks' files, relative to `directory`, on rank 0. Collective.

    Raises:
        RanksFailed: some rank could not.
    """
    domains, runtime = take_state(objects, step, ranks, domain=domain)
    # For one save: what is saved beside a framework's own files is small, and other tensors each time.
    with closing(Staging(domains, ranks)) as staging:

        def write() -> list[FileEntry]:
            files = {f"{domain}/{runtime_state_name(ranks.rank)}": encode(runtime)}
            files |= staging.layout.indexes if ranks.rank == 0 else {}
            small = seal_small(files, None)
            write_small(directory, {entry.path: data for entry, data in small})
            request, answers = Future[Write](), list[Written]()
            request.set_result(Write(files=staging.layout.files, directories=(str(directory),)))
            staging.begin(request, answers.append).result()
            if answers[0].error is not None:
                raise OSError(answers[0].errno, answers[0].error)
            return [*(entry for entry, _ in small), *answers[0].files]

        return gather_entries(ranks.together("writing the state", write), ranks)


def load_state(
    objects: Objects,
    reader: CheckpointReader,
    ranks: Collective,
    *,
    domain: str = GUEST_DOMAINS[0],
    states: str = "",
    near: Path | None = None,
) -> Generators:
    """Restores the state of a verified checkpoint into `objects`; returns the generators', for `rng.restore`.
    Collective.

    Args:
        domain: of `take_state`, in its place in the checkpoint.
        states: the directory of the checkpoint that has the ranks' states; empty: its own.

    Raises:
        RanksFailed: it does not fit the objects of some rank, or another number of ranks wrote it and each had state
            of its own.
        CheckpointCorrupt: a DTensor is of another shape or type.
    """
    before = reader.manifest.world_size
    if before != ranks.world_size:
        ranks.first_does("reading the state", lambda: _require_same(reader, domain, states))
    # A rank that was not there has no file. By now all files say the same.
    rank = ranks.rank if ranks.rank < before else 0

    def prepare() -> tuple[Any, dict[str, Tensors], Generators]:
        saved = read_runtime_state(reader, rank, before, below=states)
        tree = _tree_of(saved, reader.directory)
        return tree, _targets(objects, tree, reader, domain, rank), saved.rng

    tree, targets, generators = ranks.together("reading the state", prepare)
    read_tensors(reader, targets, ranks, near=near)
    shared, mine = targets.values()
    found = shared | {name.partition("/")[2]: tensor for name, tensor in mine.items()}
    ranks.together("loading the state", lambda: objects.put_back(join(tree, found)))
    return generators if ranks.rank < before else _another_stream(generators, ranks.rank)


def _targets(
    objects: Objects, tree: Any, reader: CheckpointReader, domain: str, rank: int
) -> dict[str, Tensors]:
    """Returns what is to be filled: live DTensors, and new tensors on the CPU."""
    # Names are compared before anything is loaded: half a state in the live objects could not be taken back.
    if set(tree) != set(objects.names):
        raise misfit(reader.directory, ", ".join(objects.names), ", ".join(sorted(tree)))
    # Parts are read into the existing DTensors, so a fresh optimizer needs its state tensors first.
    _, leaves = split(objects.take(as_target=True))
    targets: dict[str, Tensors] = {}
    for at, rank_s in ((domain, ""), (f"{domain}/own", f"{rank:04d}/")):
        # New ones, not views of the file: an optimizer keeps the tensors that it gets, and the file is pruned one day.
        targets[at] = {
            name: live if (live := leaves.sharded.get(name)) is not None else _new(entry)
            for name, entry in reader.index(at).tensors.items()
            if name.startswith(rank_s)
        }
    return targets


def _new(entry: TensorEntry) -> torch.Tensor:
    return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))


def _tree_of(saved: RuntimeState, where: Path) -> Any:
    try:
        data = saved.loop["tree"].tobytes()
        if len(data) > MAX_TREE_BYTES:
            raise ValueError(f"{len(data)} bytes")
        return msgspec.msgpack.decode(data, type=dict[str, Any])
    except (KeyError, *UNREADABLE) as error:
        raise CheckpointCorrupt(
            "the state of a rank cannot be read",
            where=where / runtime_state_name(saved.rank),
            found=error,
            remedy="resume from an older checkpoint (verl-slurm list RUN)",
        ) from error


def _require_same(reader: CheckpointReader, domain: str, states: str) -> None:
    """Refuses state that each rank has for itself: there is no telling which rank of another number gets it."""
    num_ranks = reader.manifest.world_size
    names = {name.partition("/")[2] for name in reader.index(f"{domain}/own").tensors}
    first: dict[str, bytes] | None = None
    for rank in range(num_ranks):
        tree = _tree_of(read_runtime_state(reader, rank, num_ranks, below=states), reader.directory)
        # As bytes: then NaN equals itself.
        mine = {name: msgspec.msgpack.encode(value) for name, value in tree.items()}
        first = mine if first is None else first
        names |= {name for name, _ in mine.items() ^ first.items()}
    if names:
        raise ConfigError(
            "the checkpoint has state that differs from rank to rank",
            where=reader.directory,
            found=", ".join(sorted(names)[:5]),
            expected="the same on every rank, for another number of ranks",
            remedy=f"go on with {num_ranks} ranks, or make it a function of the step and the rank",
        )


def _another_stream(generators: Generators, rank: int) -> Generators:
    """Returns generators of a rank that was not there when `generators` were saved: numbers that no rank has drawn."""
    seed = hashlib.sha256(b"".join(generators[name] for name in ("python", "torch")))
    rng.seed_all(int.from_bytes(seed.digest(), "big"), rank)
    return rng.capture()


def _digested(objects: Objects, num_ranks: int) -> tuple[bytes, Leaves, dict[str, bytes]]:
    tree, leaves = encode_state(objects)
    # A rank alone has all in common with itself.
    digests = {path: _digest(path, tensor) for path, tensor in leaves.plain.items()} if num_ranks > 1 else {}
    return tree, leaves, digests


def _digest(path: str, tensor: torch.Tensor) -> bytes:
    """Returns the digest of place, type, shape and bits."""
    here = tensor.detach().cpu().contiguous()
    # Type and shape besides the bits: zeros of two shapes have the same bytes.
    head = f"{path}|{here.dtype}|{tuple(here.shape)}|{tensor.device.type}|".encode()
    found = hashlib.sha256(head)
    if here.numel():
        # As bytes: NumPy has no bfloat16 and no float8.
        found.update(here.reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()


def common_of(digests: dict[str, bytes], ranks: Collective) -> set[bytes]:
    """Returns the digests that every rank has. Collective."""
    # What all ranks have, rank 0 has as well: each says which of its digests it lacks, and no rank hears all of them.
    own = msgspec.msgpack.encode(list(digests.values()))
    first = msgspec.msgpack.decode(ranks.share(own, source=0), type=list[bytes])
    # A digest includes the path, so a set is enough: a tensor is common if every rank has the same one at that place.
    mine = set(digests.values())
    lacking = ranks.max([digest not in mine for digest in first]) if first else []
    return {digest for digest, lacks in zip(first, lacking, strict=True) if not lacks}
