"""Applies a plan: writes each new rank's files, tensor by tensor, straight from the ranges of the former files.

`extra_state` of a rank that stays is copied whole: its schedule and its generators. A new rank gets the schedule of
rank 0 and generators of its own (`generators`). PPO's data.pt is copied byte for byte: verl's driver reads the data,
and its position does not depend on the ranks. SFT has a position for each data-parallel rank, counted in its own
samples. That number changes with the ranks, and the next step gets the rows that it would have got. All other files
are copied.

The process holds the descriptions of all ranks' tensors, and a block of 4 MiB for each of its threads.
"""

import hashlib
import json
import os
import random
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from verl_slurm.base.bounded import CONFIG, read_fd
from verl_slurm.base.digest import num_threads
from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.base.files import write_file
from verl_slurm.base.tree import list_tree, open_below, open_directory
from verl_slurm.verl.copying import copy_files, how_to_copy
from verl_slurm.verl.layout import shard_of
from verl_slurm.verl.reshard.compare import compare_steps
from verl_slurm.verl.reshard.describe import FSDP_CONFIG, data_positions, opened, shard_name
from verl_slurm.verl.reshard.plan import Model, Move, ReshardPlan, RolePlan, cannot, local_shape, parts_of
from verl_slurm.verl.reshard.tensors import Builder, find_tensors, is_tensor, mapped
from verl_slurm.verl.reshard.torch_file import Part, TorchFile, read_range, write_torch_file
from verl_slurm.verl.reshard.torch_pickle import Made, Name, PickleProblem
from verl_slurm.verl.shards import identity_of

OnBytes = Callable[[int], None]


def apply_plan(plan: ReshardPlan, target: Path, on_bytes: OnBytes = lambda _: None) -> str:
    """Makes `target`, a new directory, and compares it with the step; returns the digest of all tensors put together.

    Nothing is made durable here: a commit does that. On an error `target` is left as far as it got.

    Args:
        on_bytes: told how many more bytes were written or compared, `work_bytes` in all; by several threads. An
            exception of its ends the work.

    Raises:
        CheckpointCorrupt: the ranks disagree about what they all hold, or the copy is not the same.
        ConfigError: a file is of a form that is not understood after all.
        OSError: the storage refused.
    """
    try:
        return _apply(plan, target, on_bytes)
    except PickleProblem as problem:
        raise cannot(plan.step, str(problem)) from None


def _apply(plan: ReshardPlan, target: Path, on_bytes: OnBytes) -> str:
    with open_directory(plan.step) as root:
        entries = [entry for entry in list_tree(root) if entry.kind == "file"]
        kept = {e.path: identity_of(e.info) for e in entries if _is_kept(e.path, plan)}
        copy_files(plan.step, target, kept, how_to_copy(plan.step, target.parent))
        for role in plan.roles:
            folder = target / role.model.role
            folder.mkdir(mode=0o700, exist_ok=True)
            _write_config(root, role.model, plan.after, folder)
            _write_shards(root, plan, role, "model", role.parameters, folder, on_bytes)
            _write_shards(root, plan, role, "optim", role.moments, folder, on_bytes)
            _write_extra(root, plan, role.model.role, folder)
        if plan.num_data is not None:
            _write_data(root, plan, target)
        return compare_steps(root, plan, target, on_bytes)


def work_bytes(plan: ReshardPlan) -> int:
    """Returns the bytes that `apply_plan` writes and compares."""
    moves = [move for role in plan.roles for move in (*role.parameters, *role.moments)]
    written = sum(
        prod(local_shape(move, plan.after, rank)) * move.tensor.itemsize
        for move in moves
        for rank in range(plan.after)
    )
    return written + 2 * plan.num_bytes


def _is_kept(path: str, plan: ReshardPlan) -> bool:
    """Returns whether a file is copied as it is."""
    # A step of SFT has data_N.pt; a file of that name in PPO's belongs to somebody else.
    data = plan.num_data is not None and path.startswith("data_") and path.endswith(".pt")
    return shard_of(path) is None and path.rpartition("/")[2] != FSDP_CONFIG and not data


def _write_config(root: int, model: Model, ranks: int, folder: Path) -> None:
    with open_below(root, f"{model.role}/{FSDP_CONFIG}".lstrip("/")) as fd:
        values = json.loads(read_fd(fd, CONFIG))
    write_file(
        folder / FSDP_CONFIG, json.dumps({**values, "world_size": ranks}, indent=4).encode(), durable=False
    )


def _write_shards(
    root: int,
    plan: ReshardPlan,
    role: RolePlan,
    kind: str,
    moves: Sequence[Move],
    folder: Path,
    on_bytes: OnBytes,
) -> None:
    with ExitStack() as opened:
        names = [shard_name(role.model.role, kind, plan.before, rank) for rank in range(plan.before)]
        fds = [opened.enter_context(open_below(root, name)) for name in names]
        _require_agreement(plan.step / names[0], moves, fds)
        template = TorchFile(fds[0])

        def write(rank: int) -> None:
            builder = Builder(rank, plan.after)
            coming = iter(moves)

            def see(path: str, node: Made) -> Made | None:
                if not is_tensor(node):
                    return None
                # In the order in which `find_tensors` saw them.
                return _moved(node, next(coming), builder, plan, role, fds, rank)

            value = mapped(template.value, see)
            path = folder / Path(shard_name("", kind, plan.after, rank)).name
            write_torch_file(path, value, builder.storages, template.small, on_bytes)

        with ThreadPoolExecutor(num_threads(), thread_name_prefix="reshard") as pool:
            # Through `list`, which raises the first error of any of them.
            list(pool.map(write, range(plan.after)))


def _moved(
    node: Made, move: Move, builder: Builder, plan: ReshardPlan, role: RolePlan, fds: Sequence[int], rank: int
) -> Made:
    tensor = move.tensor
    local, parts = local_shape(move, plan.after, rank), parts_of(move, fds, plan.after, rank)
    if move.becomes != "dtensor":
        return builder.plain(tensor.kind, local, parts)
    if tensor.is_dtensor:
        return builder.after(node, tensor.kind, local, parts)
    return builder.new(role.model.device, tensor.kind, tensor.shape, local, parts)


def _require_agreement(where: Path, moves: Sequence[Move], fds: Sequence[int]) -> None:
    """Requires that a tensor that is whole on every rank has the same bits on all of them."""
    for move in moves:
        if move.before > 1 or move.tensor.dim is not None:
            continue
        size = move.tensor.num_bytes
        for rank in range(1, len(fds)):
            pairs = zip(
                read_range(fds[0], move.offsets[0], size),
                read_range(fds[rank], move.offsets[rank], size),
                strict=True,
            )
            if any(ours != theirs for ours, theirs in pairs):
                raise CheckpointCorrupt(
                    "the ranks disagree about a tensor that all of them hold",
                    where=where,
                    found=f"{move.tensor.path} differs between rank 0 and rank {rank}",
                    remedy="reshard an older checkpoint, or go on with the number of ranks that saved it",
                )


def _write_extra(root: int, plan: ReshardPlan, role: str, folder: Path) -> None:
    for rank in range(plan.after):
        path = folder / Path(shard_name("", "extra_state", plan.after, rank)).name
        source = shard_name(role, "extra_state", plan.before, rank if rank < plan.before else 0)
        with opened(root, source) as file:
            if rank < plan.before:
                size = os.fstat(file.fd).st_size
                write_file(path, b"".join(read_range(file.fd, 0, size)), durable=False)
            else:
                value, storages = _with_own_generators(file, rank)
                write_torch_file(path, value, storages, file.small)


def _with_own_generators(file: TorchFile, rank: int) -> tuple[Any, list[tuple[str, list[Part]]]]:
    """Returns rank 0's extra state with generators of another rank."""
    builder = Builder(rank, 1)
    tensors, _ = find_tensors(file)
    states = {one.path: b"".join(read_range(file.fd, one.offset, one.num_bytes)) for one in tensors}
    seed = seed_of(states.get("rng.cpu", b""), rank)
    coming = iter(tensors)

    def see(path: str, node: Made) -> Made | None:
        if not is_tensor(node):
            return None
        tensor = next(coming)
        data = states[tensor.path]
        if path.startswith("rng."):
            data = torch_state(seed, len(data)) or data
        return builder.plain(tensor.kind, tensor.shape, [Part(len(data), data=data)])

    value = mapped(file.value, see)
    generators = value.get("rng") if isinstance(value, dict) else None
    if isinstance(generators, dict):
        if "random" in generators:
            generators["random"] = python_state(seed)
        match generators.get("numpy"):
            case ("MT19937", Made(state=tuple(state)) as array, _, _, _):
                words, position = numpy_state(seed)
                text = Made(Name("_codecs", "encode"), (words.decode("latin1"), "latin1"))
                array = replace(array, state=(*state[:4], text))
                generators["numpy"] = ("MT19937", array, position, 0, 0.0)
    return value, builder.storages


def _write_data(root: int, plan: ReshardPlan, target: Path) -> None:
    assert plan.num_data is not None
    there = [name for name in os.listdir(root) if name.startswith("data_") and name.endswith(".pt")]
    for rank in range(plan.num_data):
        own = f"data_{rank}.pt"
        with opened(root, own if own in there else "data_0.pt") as file:
            value = file.value
            if plan.samples is not None:
                _, value = data_positions(value, plan.samples)
            write_torch_file(target / own, value, [], file.small)


_WORDS = 624
_CPU = struct.Struct(f"<Q i i Q {_WORDS}Q ddd i 4x f ? 3x")
_DEVICE = struct.Struct("<Qq")


def seed_of(state: bytes, rank: int) -> int:
    """Returns the seed of a new rank, 64 bits.

    Args:
        state: of rank 0's generator on the CPU.
    """
    return int.from_bytes(hashlib.sha256(state + b"|reshard|%d" % rank).digest()[:8], "little")


def torch_state(seed: int, like: int) -> bytes | None:
    """Returns the state of a generator of torch; None: there is none of `like` bytes that is known here."""
    if like == _CPU.size:
        return _CPU.pack(seed, 1, 1, 0, *_twister(seed), 0.0, 0.0, 0.0, 0, 0.0, False)
    return _DEVICE.pack(seed, 0) if like == _DEVICE.size else None


def numpy_state(seed: int) -> tuple[bytes, int]:
    """Returns the words of NumPy's legacy generator, and the position in them."""
    return struct.pack(f"<{_WORDS}I", *_twister(seed)), _WORDS


def python_state(seed: int) -> tuple[Any, ...]:
    """Returns `random.getstate()` after `random.seed(seed)`."""
    return random.Random(seed).getstate()  # noqa: S311 - verl's own use of it


def _twister(seed: int) -> list[int]:
    """Returns the words of an MT19937 after its seeding with the lower 32 bits of `seed` (Knuth's, of 2002)."""
    words = [seed & 0xFFFFFFFF]
    for at in range(1, _WORDS):
        words.append((1812433253 * (words[-1] ^ (words[-1] >> 30)) + at) & 0xFFFFFFFF)
    return words
