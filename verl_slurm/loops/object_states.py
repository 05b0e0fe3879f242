"""Turns the state of a loop's objects into tensors by name and a plain tree, and restores them from both. Needs torch.

Objects with `state_dict` and `load_state_dict` are state (models, optimizers, schedulers, scalers, StatefulDataLoader,
samplers), and so is a `torch.Generator`. Their state consists of maps, lists, numbers, text and tensors. Anything else
is refused by name before the first step, because it could only be pickled, and a pickle runs code.

A tensor's name is its path in the tree (`model/layer.weight`), and a mark stands there in its place:

```
{_MARK: ["tensor", NAME]}         also of an array ("array") and of a DTensor ("sharded")
{_MARK: ["tensor", NAME, DTYPE, SHAPE]}   of a type that no checkpoint has (`tensor_index.DTYPE_BYTES`): its bytes
{_MARK: ["tuple", [...]]}         a list would come back
{_MARK: ["int", "0x1f..."]}       of more than 64 bits, as NumPy's generators have
```
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from verl_slurm.base.errors import ConfigError
from verl_slurm.checkpoint.format.tensor_index import DTYPE_BYTES

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
    """The objects of a loop's state, by the names that the loop gave.

    Args:
        named: objects by name; None: left out.

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


def sharded_names(tree: Any) -> set[str]:
    """Returns the names of the DTensors that a tree of `split` has marks of."""
    if isinstance(tree, dict) and (mark := tree.get(_MARK)):
        return {mark[1]} if mark[0] == "sharded" else sharded_names(mark[1])
    if isinstance(tree, dict | list):
        values = tree.values() if isinstance(tree, dict) else tree
        return set().union(*map(sharded_names, values))
    return set()


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
        return {_MARK: ["sharded", path]}
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
    """Refuses two keys that give the same path: 1 and `1`."""
    names = [str(key) for key in value]
    # Exact types: any other key would need its class at the resume.
    strange = [key for key in value if type(key) not in (str, int)]
    if strange or len(set(names)) != len(names) or _MARK in names:
        raise ConfigError("a state has keys that cannot be saved", where=path, found=strange or names[:5])
