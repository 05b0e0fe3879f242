"""Reads what the shards of a `global_step_N` hold, for a plan. Unpickles nothing, and reads no tensor."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from verl_slurm.base.bounded import CONFIG, read_fd
from verl_slurm.base.errors import CheckpointCorrupt, ConfigError, VerlSlurmError
from verl_slurm.base.tree import list_tree, open_below, open_directory
from verl_slurm.verl.layout import is_distributed, merge_command, read_layout
from verl_slurm.verl.reshard.plan import DataState, Described, Model, cannot
from verl_slurm.verl.reshard.tensors import Tensor, find_tensors, mapped
from verl_slurm.verl.reshard.torch_file import TorchFile
from verl_slurm.verl.reshard.torch_pickle import Made, PickleProblem, dump

FSDP_CONFIG = "fsdp_config.json"
_WRAPPED = "_fsdp_wrapped_module"
"""The name that FSDP1 gives to a module that it has wrapped."""
_SAMPLES = "samples_yielded"
_SEEDS = ("_base_seed", "_shared_seed")
"""Of the workers of a data loader; drawn by each rank for itself."""


_ROOM = 512 << 20
_PATIENCE_S = 600.0
_TOO_LARGE = 77
_OF_PREEMPTION = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)


def require_bounded(step: Path) -> None:
    """Requires that a process of limited memory can read what the shards of a step hold. A small file may describe
    gigabytes, and this process, a lead's too, has no limit.

    Its limit is on addresses: what it has at its start, the bytes that the files have on the disk, and 512 MiB. Other
    errors of it are left to `describe_step` in this process.

    Raises:
        ConfigError: it cannot.
    """
    argv = [sys.executable, "-P", "-m", "verl_slurm.verl.reshard.describe", str(step)]
    try:
        code = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE_S, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        found = f"no end after {_PATIENCE_S:g} s"
    else:
        if code in (0, 1) or -code in _OF_PREEMPTION:
            return
        found = (
            f"they take more memory than their own size and {_ROOM >> 20} MiB"
            if code == _TOO_LARGE
            else f"a process that read them was killed by {signal.Signals(-code).name}"
        )
    raise cannot(step, f"shards that are described by more than verl writes: {found}")


def _read_bounded(step: Path) -> int:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + _ROOM
    with open_directory(step) as root:
        for entry in list_tree(root):
            # Not the size alone: a hole has any.
            size += min(entry.info.st_size, entry.info.st_blocks * 512) if entry.kind == "file" else 0
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    size = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_AS, (size, hard))
    try:
        describe_step(step)
    except MemoryError:
        return _TOO_LARGE
    # Said again, in full, by the process that asked.
    except (VerlSlurmError, OSError):
        return 1
    return 0


class _Shape(msgspec.Struct):
    FSDP_version: int
    world_size: int


def describe_step(step: Path) -> Described:
    """Reads what the shards of a step hold.

    Raises:
        ConfigError: it is none of verl's FSDP engine, or of a form that cannot be divided anew.
        CheckpointCorrupt: files are missing or contradict each other.
        OSError: it cannot be read.
    """
    with open_directory(step) as root:
        names = [entry.path for entry in list_tree(root) if entry.kind == "file"]
        if is_distributed(names):
            raise ConfigError(
                "only checkpoints of verl's FSDP engine can be divided anew",
                where=step,
                found="a distributed checkpoint (Megatron, torchtitan)",
                remedy="begin a new run from its weights alone (optimizer, schedule and place in the data are lost): "
                f"`{merge_command(step, 'ppo', 'megatron')}`, then verl.actor_rollout_ref.model.path=MODEL_DIR",
            )
        layout = read_layout(names)
        if layout.problems or layout.world_size is None:
            raise CheckpointCorrupt(
                "the step is not whole",
                where=step,
                found="; ".join(str(problem) for problem in layout.problems[:3]) or "no shards",
            )
        try:
            return Described(
                step=step,
                ranks=layout.world_size,
                models=tuple(_describe_model(root, role, layout.world_size) for role in layout.roles),
                data=_describe_data(root, layout.num_data) if layout.entry == "sft" else None,
            )
        except PickleProblem as problem:
            raise cannot(step, str(problem), "shards of FSDP2 or FSDP1 on one mesh of all ranks") from None


def shard_name(role: str, kind: str, ranks: int, rank: int) -> str:
    """Names a shard, relative to the step."""
    return f"{role}/{kind}_world_size_{ranks}_rank_{rank}.pt".lstrip("/")


@contextmanager
def opened(root: int, name: str) -> Iterator[TorchFile]:
    """Yields a file of torch.save below the open directory `root`.

    Raises:
        PickleProblem, OSError: as `TorchFile`.
    """
    with open_below(root, name) as fd:
        yield TorchFile(fd)


def _describe_model(root: int, role: str, ranks: int) -> Model:
    where = f"{role}/{FSDP_CONFIG}".lstrip("/")
    with open_below(root, where) as fd:
        try:
            shape = msgspec.json.decode(read_fd(fd, CONFIG), type=_Shape)
        except (msgspec.MsgspecError, ValueError) as error:
            raise PickleProblem(f"{where}: {error}") from None
    if shape.FSDP_version not in (1, 2) or shape.world_size != ranks:
        raise PickleProblem(f"{where} says FSDP {shape.FSDP_version} on {shape.world_size} ranks")
    parameters = describe_shards(root, role, "model", ranks)
    moments = describe_shards(root, role, "optim", ranks)
    with opened(root, shard_name(role, "optim", ranks, 0)) as file:
        groups = file.value.get("param_groups") if isinstance(file.value, dict) else None
    if not isinstance(groups, list) or not all(isinstance(one, dict) for one in groups):
        raise PickleProblem(f"{role} has an optimizer without groups of parameters")
    with opened(root, shard_name(role, "model", ranks, 0)) as file:
        units = _units(file.value)
    with opened(root, shard_name(role, "extra_state", ranks, 0)) as file:
        # New ranks get one like it, so that each tensor in it must be understood.
        find_tensors(file)
        generators = file.value.get("rng") if isinstance(file.value, dict) else None
    devices = set(generators or {}) - {"cpu", "numpy", "random"}
    return Model(
        role=role,
        engine=shape.FSDP_version,
        parameters=parameters,
        moments=moments,
        units=units,
        num_groups=len(groups),
        num_flat=sum(len(one.get("params", ())) for one in groups),
        # verl names the state of the accelerator's generator by its type.
        device=min(devices, default="cpu"),
    )


def _units(value: Any) -> tuple[str, ...]:
    """Returns the modules that FSDP1 wraps, of the names of all modules that torch notes with a model's state."""
    noted = (
        value.state.get("_metadata") if isinstance(value, Made) and isinstance(value.state, dict) else None
    )
    names = [str(name) for name, _ in noted.pairs] if isinstance(noted, Made) else []
    wrapped = [name.removesuffix(_WRAPPED) for name in names if name.endswith(_WRAPPED)]
    return tuple(name.replace(f"{_WRAPPED}.", "").removesuffix(".") for name in wrapped)


def describe_shards(root: int, role: str, kind: str, ranks: int) -> tuple[tuple[Tensor, ...], ...]:
    """Returns the tensors in the shard of each rank, all in the same order.

    Raises:
        PickleProblem: a shard is of a form that is not understood, or holds other things than that of rank 0.
    """
    found, digests = [], []
    for rank in range(ranks):
        with opened(root, shard_name(role, kind, ranks, rank)) as file:
            tensors, digest = find_tensors(file)
        found.append(tuple(tensors))
        digests.append(digest)
        odd = next((one for one in tensors if one.is_dtensor and one.ranks != ranks), None)
        if odd is not None:
            raise PickleProblem(f"{odd.path} is divided among {odd.ranks} of {ranks} ranks")
    if len(set(digests)) > 1:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise PickleProblem(f"{kind} of rank {other} holds other things than that of rank 0")
    return tuple(found)


def _describe_data(root: int, count: int) -> DataState:
    seen, samples = set(), set()
    for rank in range(count):
        with opened(root, f"data_{rank}.pt") as file:
            numbers, rest = data_positions(file.value)
        seen.add(dump(rest))
        samples.update(numbers)
    # Each loader gives out every D-th row of one order, so all are at the same place after each step.
    if len(seen) > 1 or len(samples) > 1:
        raise PickleProblem("the data loaders of the ranks are at different places")
    return DataState(count=count, samples=min(samples, default=None))


def data_positions(value: Any, samples: int | None = None) -> tuple[list[int], Any]:
    """Returns the numbers of samples given out in a data loader's state, and the rest of it.

    Args:
        samples: put in the place of each; None: the rest is without them, and without what each rank draws.
    """
    found: list[int] = []

    def walk(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(walk(one) for one in value)
        if not isinstance(value, dict):
            return value
        result = {}
        for key, one in value.items():
            if key == _SAMPLES and type(one) is int:
                found.append(one)
                result[key] = samples
            elif samples is not None or key not in _SEEDS:
                result[key] = walk(one)
        return result

    rest = walk(value)
    # A tensor in it would be some generator's or the data set's own, whose meaning for other ranks is not known.
    mapped(rest, lambda path, node: None)
    return found, rest


if __name__ == "__main__":
    # At once: gigabytes of small objects take long to free.
    os._exit(_read_bounded(Path(sys.argv[1])))
