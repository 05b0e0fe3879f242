"""Saves and loads a loop's state as our own saver does: tensors by name, and for each rank a tree. Needs torch.

```
DOMAIN/        tensors with the same bits on every rank, written once, and DTensors, of which each rank writes its part
DOMAIN/own/    all others, by rank: `0003/model/layer.weight`
runtime_state.rank_0003.msgpack.zst   one per rank: step, generators, and as `loop.tree` the rest (`object_states`)
```

Digests decide which tensors are common, not the model's wrapper. So a replica that has drifted, or batch statistics
that each rank has for itself, are kept for each rank as they are.

TRL's trainers have such files inside of the Trainer's own directory (`trl_state`).
"""

import hashlib
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from verl_slurm.base.errors import UNREADABLE, CheckpointCorrupt, ConfigError
from verl_slurm.checkpoint.format.specification import GUEST_DOMAINS, FileEntry
from verl_slurm.checkpoint.store.reader import CheckpointReader
from verl_slurm.loops.object_states import Leaves, Objects, join, misfit, sharded_names, split
from verl_slurm.loops.step_end import gather_entries
from verl_slurm.runtime_state.codec import encode
from verl_slurm.runtime_state.format import RuntimeState, runtime_state_name
from verl_slurm.save.ranks import rng
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.loader import read_index, read_runtime_state, read_tensors
from verl_slurm.save.ranks.rng import Generators
from verl_slurm.save.ranks.staging import Staging
from verl_slurm.save.ranks.tensors import Tensors
from verl_slurm.save.writer.metadata_files import seal_small, write_small
from verl_slurm.save.writer.protocol import Write, Written

MAX_TREE_BYTES = 64 << 20
"""A reader makes an object of every byte of a hostile tree. What is larger belongs into a tensor."""


def taken(objects: Objects) -> tuple[bytes, Leaves]:
    """Returns the tree of the objects' state, as it will lie in a file, and its tensors: they share memory with the
    training.

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

    Args:
        step: whole steps done.

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
    """Writes this rank's state below a directory of a framework, durable when it returns. Collective.

    Args:
        directory: seen by all ranks.
        domain: an empty directory in it.

    Returns:
        The entries of all ranks' files on rank 0, relative to `directory`; nothing on the others.

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
        near: as in `save.ranks.loader.load_tensors`.

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
    # They are read into the existing DTensors, so a fresh optimizer needs its state tensors first.
    _, leaves = split(objects.take(as_target=True))
    wanted = sharded_names(tree)
    if absent := sorted(wanted - leaves.sharded.keys()):
        raise misfit(absent[0], "no sharded tensor", "one")
    shared: Tensors = {name: leaves.sharded[name] for name in sorted(wanted)}
    own = f"{domain}/own"
    entries = {at: read_index(reader, at).tensors for at in (domain, own)}
    # New ones, not views of the file: an optimizer keeps the tensors that it gets, and the file is pruned one day.
    plain = {
        at: {
            name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            for name, entry in entries[at].items()
            if name not in shared and (at == domain or name.startswith(f"{rank:04d}/"))
        }
        for at in (domain, own)
    }
    return {domain: shared | plain[domain], own: plain[own]}


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
    names = {name.partition("/")[2] for name in read_index(reader, f"{domain}/own").tensors}
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
    tree, leaves = taken(objects)
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
