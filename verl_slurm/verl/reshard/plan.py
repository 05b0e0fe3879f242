"""Plans how a `global_step_N` of verl's FSDP engine is divided among another number of ranks. Pure.

A tensor is moved in one of three ways (`Move.becomes`):

* `dtensor`: divided among the ranks along one dimension, as FSDP2 has all of its parameters and moments, and FSDP1 its
  parameters on more than one rank;
* `plain`: whole in the file of every rank;
* `flat`: FSDP1's optimizer. It knows no single parameters: the parameters of one unit (a layer of the model, or all
  that is in no layer) lie behind one another in a flat one, which is divided in equal parts, the last one filled up
  with zeros. The optimizer does not say how long it is without that filling. The names and sizes of the model's
  parameters do, with the names of the units, which torch notes in the model's `_metadata`.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from verl_slurm.base.errors import ConfigError
from verl_slurm.verl.reshard.cuts import pieces, share
from verl_slurm.verl.reshard.tensors import Tensor
from verl_slurm.verl.reshard.torch_file import Part

Become = Literal["dtensor", "plain", "flat"]

_OUTPUT = "lm_head.weight"
_INDEX = re.compile(r"state\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The shards of one model.

    Attributes:
        role: `actor`, `critic`, or empty (SFT).
        engine: FSDP 1 or 2.
        parameters, moments: of each rank, the tensors of its model's and its optimizer's file.
        units: FSDP1: the modules that it wraps, by name, in the order of the model; the root is empty.
        num_groups, num_flat: groups of the optimizer's parameters, and parameters in all of them.
        device: type of the ranks' devices.
    """

    role: str
    engine: int
    parameters: tuple[tuple[Tensor, ...], ...]
    moments: tuple[tuple[Tensor, ...], ...]
    units: tuple[str, ...]
    num_groups: int
    num_flat: int
    device: str


@dataclass(frozen=True, kw_only=True)
class DataState:
    """The positions of SFT's data loaders.

    Attributes:
        count: of them: one for each group of ranks that gets the same data.
        samples: that each has given out in this epoch; None: no such number is kept.
    """

    count: int
    samples: int | None


@dataclass(frozen=True, kw_only=True)
class Described:
    """A whole step, as far as a plan depends on it; `data`: SFT alone."""

    step: Path
    ranks: int
    models: tuple[Model, ...]
    data: DataState | None


@dataclass(frozen=True, kw_only=True)
class Move:
    """One tensor on its way.

    Attributes:
        tensor: as rank 0 has it; `shape` and `dim` are those of the whole.
        before: ranks among which it is divided; 1: each has all of it.
        offsets: in the file of each rank that saved.
        becomes: see the module.
        dim: along which it is divided from now on; None: not.
    """

    tensor: Tensor
    before: int
    offsets: tuple[int, ...]
    becomes: Become
    dim: int | None


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """The moves of one model's tensors, in the order in which its shards have them."""

    model: Model
    parameters: tuple[Move, ...]
    moments: tuple[Move, ...]

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all tensors, each counted once."""
        return sum(move.tensor.num_bytes for move in (*self.parameters, *self.moments))

    @property
    def num_divided(self) -> int:
        return sum(move.becomes != "plain" for move in (*self.parameters, *self.moments))


@dataclass(frozen=True, kw_only=True)
class ReshardPlan:
    """What `reshard.apply_plan` does.

    Attributes:
        before, after: ranks.
        kept, new: ranks that keep their generators' state, and those that get one of their own.
        num_data: data loader states of SFT; None: PPO, whose one state does not depend on the ranks.
        samples: that each of those has given out; None: nothing to change.
    """

    step: Path
    before: int
    after: int
    roles: tuple[RolePlan, ...]
    kept: int
    new: int
    num_data: int | None
    samples: int | None

    @property
    def num_bytes(self) -> int:
        return sum(role.num_bytes for role in self.roles)


def plan_reshard(step: Described, ranks: int) -> ReshardPlan:
    """Plans the same state on `ranks` ranks.

    Raises:
        ConfigError: it cannot be divided so; the reason and a way out.
    """
    if ranks == step.ranks:
        raise ConfigError(
            "the checkpoint is of this number of ranks already",
            where=step.step,
            found=ranks,
            remedy="nothing has to be done: verl reads it as it is",
        )
    num_data, samples = _plan_data(step, ranks)
    return ReshardPlan(
        step=step.step,
        before=step.ranks,
        after=ranks,
        roles=tuple(_plan_role(step, model, ranks) for model in step.models),
        kept=min(step.ranks, ranks),
        new=max(0, ranks - step.ranks),
        num_data=num_data,
        samples=samples,
    )


def local_shape(move: Move, after: int, rank: int) -> tuple[int, ...]:
    """Returns the shape of the part that `rank` of `after` gets."""
    shape = move.tensor.shape
    if move.becomes == "flat":
        return (-(-shape[0] // after),)
    if move.dim is None:
        return shape
    begin, end = share(shape[move.dim], after, rank)
    return (*shape[: move.dim], end - begin, *shape[move.dim + 1 :])


def parts_of(move: Move, fds: Sequence[int], after: int, rank: int) -> list[Part]:
    """Returns the bytes of the part that `rank` of `after` gets, of the open files of the ranks that saved."""
    tensor, size = move.tensor, move.tensor.itemsize
    dim = tensor.dim if move.dim is None else move.dim
    if dim is None:
        return [Part(tensor.num_bytes, fds[0], move.offsets[0])]
    # One that becomes whole is that of the only rank.
    among = (after, rank) if move.dim is not None else (1, 0)
    found = [
        Part(count * size, fds[source], move.offsets[source] + start * size)
        for source, start, count in pieces(tensor.shape, dim, move.before, *among)
    ]
    if move.becomes == "flat":
        missing = (local_shape(move, after, rank)[0] * size) - sum(part.num_bytes for part in found)
        # Zeros, as FSDP1 itself fills up: their gradient is always 0.
        found += [Part(missing, data=bytes(missing))] if missing else []
    return found


def _plan_role(step: Described, model: Model, ranks: int) -> RolePlan:
    flat = model.engine == 1
    parameters = tuple(_move(at, model.parameters, flat, ranks) for at in range(len(model.parameters[0])))
    if not flat:
        moments = tuple(_move(at, model.moments, False, ranks) for at in range(len(model.moments[0])))
        return RolePlan(model=model, parameters=parameters, moments=moments)
    numels = _flat_lengths(step, model)
    moments = tuple(_flat_move(at, model.moments, numels) for at in range(len(model.moments[0])))
    return RolePlan(model=model, parameters=parameters, moments=moments)


def _move(at: int, shards: Sequence[Sequence[Tensor]], flat: bool, ranks: int) -> Move:
    """Plans a tensor that is whole, or a DTensor."""
    tensor = shards[0][at]
    dim: int | None = tensor.dim
    becomes: Become = "dtensor" if tensor.is_dtensor else "plain"
    # On one rank FSDP1 divides nothing and saves plain tensors; on more it wants DTensors.
    if flat and ranks == 1:
        dim, becomes = None, "plain"
    elif flat and len(shards) == 1 and tensor.shape:
        dim, becomes = 0, "dtensor"
    return Move(
        tensor=tensor,
        before=1 if tensor.dim is None else tensor.ranks,
        offsets=tuple(shard[at].offset for shard in shards),
        becomes=becomes,
        dim=dim,
    )


def _flat_move(at: int, shards: Sequence[Sequence[Tensor]], numels: Sequence[int]) -> Move:
    tensor = shards[0][at]
    before, offsets = 1, tuple(shard[at].offset for shard in shards)
    match = _INDEX.match(tensor.path)
    if len(tensor.shape) != 1 or match is None:
        return Move(tensor=tensor, before=before, offsets=offsets, becomes="plain", dim=None)
    whole = replace(tensor, shape=(numels[int(match[1])],), dim=0, ranks=len(shards))
    return Move(tensor=whole, before=len(shards), offsets=offsets, becomes="flat", dim=0)


def _flat_lengths(step: Described, model: Model) -> list[int]:
    """Returns the length of each of FSDP1's flat parameters, in the optimizer's order.

    Raises:
        ConfigError: the model's parameters do not give the lengths that the optimizer has.
    """
    parts: dict[int, set[int]] = defaultdict(set)
    for tensor in model.moments[0]:
        match = _INDEX.match(tensor.path)
        if match is not None and len(tensor.shape) == 1:
            parts[int(match[1])].add(tensor.shape[0])
    for lengths in _candidates(model) if "" in model.units else ():
        # Of each unit the optimizer has a part of this length on every rank, if it has stepped at all.
        expected = [-(-length // step.ranks) for length in lengths]
        fits = all(at < len(lengths) and found == {expected[at]} for at, found in parts.items())
        if fits and model.num_groups == 1 and model.num_flat == len(lengths):
            return lengths
    raise cannot(
        step.step / model.role,
        f"an optimizer of {model.num_flat} flat parameters in {model.num_groups} groups, whose lengths are not those "
        "of the units that it wraps",
        "FSDP1 without use_orig_params; or FSDP2 (strategy: fsdp2)",
    )


def _candidates(model: Model) -> Iterator[list[int]]:
    """Yields the lengths of the flat parameters, with and without an output layer that is the embedding."""
    whole = len(model.parameters) == 1
    # torch lists a module's own parameters before those of the modules in it, so the order of the names counts.
    units = dict.fromkeys(model.units, 0)
    for one in model.parameters[0]:
        # A buffer is plain beside DTensors, and in no flat parameter.
        if whole or one.is_dtensor:
            units[_unit_of(one.path, model.units)] += one.numel
    tied = next((one for one in model.parameters[0] if one.path == _OUTPUT), None)
    yield [numel for numel in units.values() if numel]
    # Such a layer has two names in the model's file, and its numbers are in the flat parameter once.
    if tied is not None:
        units[_unit_of(_OUTPUT, model.units)] -= tied.numel
        yield [numel for numel in units.values() if numel]


def _unit_of(path: str, units: Sequence[str]) -> str:
    """Returns the innermost unit that a parameter is in."""
    return max((unit for unit in units if not unit or path.startswith(f"{unit}.")), key=len)


def _plan_data(step: Described, ranks: int) -> tuple[int | None, int | None]:
    """Returns the number of data loader states, and what each has given out.

    Raises:
        ConfigError: the data cannot be divided among so many.
    """
    if step.data is None:
        return None, None
    # More ranks than states: groups of ranks share the sequences of a batch (ulysses), in groups of the same size.
    together = step.ranks // step.data.count
    if ranks % together:
        raise cannot(
            step.step,
            f"{ranks} ranks, of which {together} share a sequence (ulysses)",
            f"a multiple of {together}",
        )
    count = ranks // together
    if step.data.samples is None:
        return count, None
    total = step.data.samples * step.data.count
    if total % count:
        raise cannot(
            step.step,
            f"{total} samples given out in this epoch, and {count} data loaders",
            "a number of ranks by which data.train_batch_size can be divided",
        )
    return count, total // count


def cannot(where: Path, found: str, expected: str | None = None) -> ConfigError:
    """Returns the refusal of a checkpoint that cannot be divided anew."""
    return ConfigError(
        "the checkpoint cannot be divided among another number of ranks",
        where=where,
        found=found,
        expected=expected,
        remedy="go on with the number of ranks that saved it, or begin a new run from its weights: docs/verl.md",
    )
