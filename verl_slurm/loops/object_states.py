"""Turns the state of a loop's objects into a plain tree, and restores them from it. Needs torch.

Objects with `state_dict` and `load_state_dict` are state (models, optimizers, schedulers, scalers, StatefulDataLoader,
samplers), and so is a `torch.Generator`. The tree consists of maps, lists, numbers, text and tensors. Anything else is
refused by name before the first step, because it could only be pickled, and a pickle runs code.

A tree is split for disk: a mark replaces each tensor, which goes to one of three files. `sharded`: a DTensor (FSDP2,
tensor parallel), of which each rank has a part. `common`: the same bits on every rank, written once. `own`: all others.
Digests decide which tensors are common, not the model's wrapper. So a replica that has drifted, or batch statistics
that each rank has for itself, are kept for each rank as they are.
"""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from verl_slurm.base.errors import ConfigError

_MARK = "__verl_slurm__"
"""Key of a map that stands for a tensor elsewhere: {_MARK: `common`, `own` or `sharded`, `path`: ...}."""
_FRESH = "not stepped yet"
_PLAIN = (bool, int, float, type(None))


@runtime_checkable
class Stateful(Protocol):
    """An object that can be state."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state_dict: Any, /) -> object: ...


@dataclass
class Leaves:
    """The tensors of a tree, by path (`model/layer.weight`)."""

    plain: dict[str, torch.Tensor] = field(default_factory=dict)
    sharded: dict[str, DTensor] = field(default_factory=dict)


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
    """Returns a tree with marks in place of its tensors, and the tensors.

    Raises:
        ConfigError: it holds something that would have to be pickled.
    """
    leaves = Leaves()
    return _mark(tree, "", leaves), leaves


def digests(leaves: Leaves) -> list[bytes]:
    """Returns the digest of each plain tensor, in the order of their paths: place, type, shape and bits."""
    return [_digest(path, tensor) for path, tensor in sorted(leaves.plain.items())]


def settle(marked: Any, leaves: Leaves, alike: Sequence[bool]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Returns the tree whose marks say in which file each plain tensor is, and the tensors for `common` and for `own`.

    Args:
        alike: in the order of `digests`, which of them are the same on every rank.
    """
    files: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    # The order of `digests`: both sort by path, so flag and tensor belong together.
    for (path, tensor), is_common in zip(sorted(leaves.plain.items()), alike, strict=True):
        files[0 if is_common else 1][path] = _detached(tensor)
    common, own = files
    return _say_where(marked, common), common, own


def sharded_paths(marked: Any) -> Iterator[str]:
    """Lists the paths of the marks that stand for a DTensor."""
    if isinstance(marked, dict) and marked.get(_MARK) == "sharded":
        yield marked["path"]
    elif isinstance(marked, dict | list | tuple):
        for value in marked.values() if isinstance(marked, dict) else marked:
            yield from sharded_paths(value)


def join(marked: Any, common: Mapping[str, Any], own: Mapping[str, Any], sharded: Mapping[str, Any]) -> Any:
    """Rebuilds the tree.

    Raises:
        ConfigError: a mark has no tensor: the objects are now sharded in another way.
    """
    files = {"common": common, "own": own, "sharded": sharded}
    if isinstance(marked, dict):
        if _MARK not in marked:
            return {key: join(value, common, own, sharded) for key, value in marked.items()}
        found = files.get(marked[_MARK], {}).get(marked["path"])
        if found is None:
            raise misfit(marked["path"], f"nothing in {marked[_MARK]}")
        # Restored as it was given: a state_dict that had an array may call NumPy's methods on it.
        return found.numpy() if marked.get("numpy") else found
    if isinstance(marked, list):
        return [join(value, common, own, sharded) for value in marked]
    if isinstance(marked, tuple):
        return tuple(join(value, common, own, sharded) for value in marked)
    return marked


def _mark(value: Any, path: str, leaves: Leaves) -> Any:
    """Replaces tensors by marks, and interns texts. A pickle stores a repeated text object in few bytes, so without
    interning the same state would have other bytes in a process that has loaded it.
    """
    # Before Tensor, of which DTensor is a subclass: its digest and its file would hold this rank's part alone.
    if isinstance(value, DTensor):
        leaves.sharded[path] = value
        return {_MARK: "sharded", "path": path}
    if isinstance(value, torch.Tensor):
        leaves.plain[path] = value
        return {_MARK: "plain", "path": path}
    # An array of objects can be stored by a pickle alone. A copy: `from_numpy` shares memory, and may be read-only.
    if isinstance(value, np.ndarray) and value.dtype.hasobject is False:
        leaves.plain[path] = torch.from_numpy(value.copy())
        return {_MARK: "plain", "path": path, "numpy": True}
    # `weights_only=True` refuses NumPy's scalars at the resume.
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, str):
        return sys.intern(str(value))
    # Exact types: a subclass of int or float would be pickled by its class.
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        _require_keys(value, path)
        return {
            (sys.intern(key) if isinstance(key, str) else key): _mark(
                inner, f"{path}/{key}" if path else str(key), leaves
            )
            for key, inner in value.items()
        }
    # Exact types: a named tuple would need its class at the resume.
    if type(value) in (list, tuple):
        marked = [_mark(inner, f"{path}/{at}", leaves) for at, inner in enumerate(value)]
        return marked if isinstance(value, list) else tuple(marked)
    raise ConfigError(
        "a state holds what cannot be saved without a pickle",
        where=path,
        found=type(value).__name__,
        expected="maps, lists, numbers, text and tensors",
        remedy="leave it out of state_dict(), or turn it into one of these",
    )


def _require_keys(value: Mapping[Any, Any], path: str) -> None:
    """Refuses two keys that give the same path: 1 and `1`, or a key with a slash in it."""
    names = [str(key) for key in value]
    # Exact types, as for values: any other key would need its class at the resume.
    strange = [key for key in value if type(key) not in (str, int)]
    if strange or len(set(names)) != len(names) or _MARK in names:
        raise ConfigError("a state has keys that cannot be saved", where=path, found=strange or names[:5])


def _say_where(marked: Any, common: Iterable[str]) -> Any:
    """Replaces `plain` by `common` or `own`."""
    if isinstance(marked, dict):
        if marked.get(_MARK) == "plain":
            return marked | {_MARK: "common" if marked["path"] in common else "own"}
        return {key: _say_where(value, common) for key, value in marked.items()}
    if isinstance(marked, list):
        return [_say_where(value, common) for value in marked]
    if isinstance(marked, tuple):
        return tuple(_say_where(value, common) for value in marked)
    return marked


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor on the CPU, with no more of its storage than it uses: `torch.save` writes whole storages."""
    here = tensor.detach().cpu().contiguous()
    # A view into a large flat buffer would bring the whole buffer along.
    return here.clone() if here.untyped_storage().nbytes() != here.nbytes else here


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
