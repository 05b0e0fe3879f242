"""Compares two steps of different numbers of ranks: each tensor, put together, must have the same bits.

The new shards are read as any others are. Of the plan nothing is used but the length of flat parameters.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import sha256
from math import prod
from pathlib import Path

from verl_slurm.base.digest import num_threads
from verl_slurm.base.errors import CheckpointCorrupt
from verl_slurm.base.tree import open_below, open_directory
from verl_slurm.verl.reshard.describe import describe_shards, shard_name
from verl_slurm.verl.reshard.plan import ReshardPlan
from verl_slurm.verl.reshard.tensors import Tensor
from verl_slurm.verl.reshard.torch_file import read_range
from verl_slurm.verl.reshard.torch_pickle import PickleProblem

OnBytes = Callable[[int], None]


def compare_steps(root: int, plan: ReshardPlan, target: Path, on_bytes: OnBytes) -> str:
    """Requires that each tensor, put together, has the same bits before and after; returns the digest of all.

    Args:
        root: the open directory of the step that the plan is of.
        target: the step that was made.

    Raises:
        CheckpointCorrupt: they differ.
        PickleProblem: `target` is of a form that is not understood.
    """
    whole = sha256()
    with open_directory(target) as made:
        for role in plan.roles:
            name, model = role.model.role, role.model
            for kind, moves, former in (
                ("model", role.parameters, model.parameters),
                ("optim", role.moments, model.moments),
            ):
                shards = describe_shards(made, name, kind, plan.after)
                if [one.path for one in shards[0]] != [one.path for one in former[0]]:
                    raise _differs(target / name, f"other tensors in {kind}")
                with ExitStack() as opened:
                    old = _open_all(opened, root, name, kind, plan.before)
                    new = _open_all(opened, made, name, kind, plan.after)
                    jobs: list[tuple[list[Tensor], list[int], int | None]] = []
                    for at, move in enumerate(moves):
                        length = move.tensor.shape[0] if move.becomes == "flat" else None
                        jobs.append(([shard[at] for shard in former], old, length))
                        jobs.append(([shard[at] for shard in shards], new, length))
                    # All of the pool's work is done before the files are closed.
                    with ThreadPoolExecutor(num_threads(), thread_name_prefix="compare") as pool:
                        digests = list(pool.map(lambda job: _digest(job[0], job[1], job[2], on_bytes), jobs))
                for move, was, now in zip(moves, digests[::2], digests[1::2], strict=True):
                    if was != now:
                        raise _differs(target / name, f"{kind}: {move.tensor.path}")
                    whole.update(was)
    return whole.hexdigest()


def _open_all(opened: ExitStack, root: int, role: str, kind: str, ranks: int) -> list[int]:
    return [
        opened.enter_context(open_below(root, shard_name(role, kind, ranks, rank))) for rank in range(ranks)
    ]


def _digest(shards: Sequence[Tensor], fds: Sequence[int], length: int | None, on_bytes: OnBytes) -> bytes:
    """Returns the digest of one tensor put together: path, type, shape and bits.

    Args:
        shards: the tensor of each rank.
        length: of a flat parameter without the filling of its last part.
    """
    first = shards[0]
    shape = first.shape if length is None else (length,)
    found = sha256(f"{first.path}|{first.kind.name}|{shape}|".encode())
    left = prod(shape) * first.itemsize
    for block in _whole(shards, fds, 0 if length is not None else first.dim):
        found.update(block[:left])
        if any(block[left:]):
            # The lengths would be wrong, and with them the place of each number.
            raise PickleProblem(f"{first.path} is filled up with other numbers than 0")
        on_bytes(min(left, len(block)))
        left -= min(left, len(block))
    return found.digest()


def _whole(shards: Sequence[Tensor], fds: Sequence[int], dim: int | None) -> Iterator[bytes]:
    """Yields the bytes of a tensor put together."""
    first = shards[0]
    if dim is None:
        yield from read_range(fds[0], first.offset, first.num_bytes)
        return
    inner = prod(first.local[dim + 1 :]) * first.itemsize
    for outer in range(prod(first.local[:dim])):
        for shard, fd in zip(shards, fds, strict=True):
            size = shard.local[dim] * inner
            yield from read_range(fd, shard.offset + outer * size, size)


def _differs(where: Path, found: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        "the divided checkpoint is not the same as the one it was made of",
        where=where,
        found=found,
        remedy="nothing was kept of it; the source is as it was. Report it",
    )
