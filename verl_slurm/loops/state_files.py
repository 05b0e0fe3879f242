"""A loop's state on disk: the directory `guest/` of a checkpoint (`checkpoint.format.specification`). Needs torch.

```
guest/rank_0003.pt      one per rank: {"tree", "own", "rng", "step"}; its marks stand for tensors elsewhere (`states`)
guest/common.pt         rank 0: path → tensor, of those that are the same on every rank
guest/sharded/          torch.distributed.checkpoint: `.metadata` and `__3_0.distcp`, where there are DTensors
```

TRL's trainers have such a directory inside of the Trainer's own, `guest/trl/` (`trl_state`).

All is read from a checkpoint that was verified before (by the lead, or by `plain`). Without a key, verification finds
accidents alone. So the `.pt` files are read with `weights_only=True`. DCP's `.metadata`, a pickle, is read by
`sharded_files`, and only if this loop has DTensors. torch's dcp_to_torch_save turns `guest/sharded` into one file for
other tools; it unpickles.
"""

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from verl_slurm.base.errors import ConfigError
from verl_slurm.checkpoint.format.specification import FileEntry
from verl_slurm.loops.object_states import (
    Leaves,
    Objects,
    digests,
    join,
    misfit,
    settle,
    sharded_paths,
    split,
)
from verl_slurm.loops.sharded_files import ShardedFiles, TensorsOnly
from verl_slurm.loops.step_end import seal_own
from verl_slurm.save.ranks import rng
from verl_slurm.save.ranks.collective import Collective, RanksFailed
from verl_slurm.save.ranks.rng import Generators

_DIRECTORY = "guest"
_SHARDED = "sharded"
_COMMON = "common.pt"


def write_state(
    objects: Objects, work: Path, step: int, ranks: Collective, *, name: str = _DIRECTORY
) -> tuple[FileEntry, ...]:
    """Writes this rank's part of the state into `work/NAME`; returns what `seal_own` does. Collective.

    Args:
        work: a directory of the run, seen by all ranks.
        step: whole steps done.
        name: of an empty directory there.

    Raises:
        RanksFailed: some rank could not; on all ranks alike. So no collective call may be inside `together`.
    """
    directory = work / name
    # Each phase by itself in `together`: a rank that fails inside must not leave the others in a later collective.
    marked, leaves, found = ranks.together("taking the state", lambda: _taken(objects))
    alike = _alike(found, ranks)
    names = ranks.together(
        "writing the state", lambda: _write(directory, marked, leaves, alike, step, ranks.rank)
    )
    # Asked of all ranks: DCP's save is collective, and one rank may hold DTensors where another has none.
    if any(ranks.max([len(leaves.sharded)])):
        names += _write_sharded(directory, leaves, ranks)
    # Last: files are durable and hashed once all of them are written.
    return seal_own(work, lambda: [f"{name}/{file}" for file in names], ranks)


def _taken(objects: Objects) -> tuple[Any, Leaves, list[bytes]]:
    marked, leaves = split(objects.take())
    return marked, leaves, digests(leaves)


def _write(
    directory: Path, marked: Any, leaves: Leaves, alike: list[bool], step: int, rank: int
) -> list[str]:
    tree, common, own = settle(marked, leaves, alike)
    names = [_rank_file(rank)]
    # Generators per rank: they differ, and a resume has to continue each one.
    torch.save(
        {"tree": tree, "own": own, "rng": rng.to_tensors(rng.capture()), "step": step}, directory / names[0]
    )
    # The same bits on every rank, so one copy: DDP would otherwise write the model once per rank.
    if rank == 0 and common:
        names.append(_COMMON)
        torch.save(common, directory / _COMMON)
    return names


def _write_sharded(directory: Path, leaves: Leaves, ranks: Collective) -> list[str]:
    """Writes the sharded tensors. Collective; DCP reports one rank's error to all ranks."""
    place = directory / _SHARDED
    try:
        writer = FileSystemWriter(place, sync_files=False)  # `seal` does that
        save_sharded(dict(leaves.sharded), storage_writer=writer, process_group=ranks.group)
    except CheckpointException as error:
        raise _failed("writing the sharded state failed", error) from error
    # DCP names its files by rank, so each rank makes its own durable; `.metadata` is written by rank 0.
    mine = sorted(path.name for path in place.glob(f"__{ranks.rank}_*.distcp"))
    return [f"{_SHARDED}/{name}" for name in [*mine, *([".metadata"] if ranks.rank == 0 else [])]]


def load_state(
    objects: Objects,
    checkpoint: Path,
    ranks: Collective,
    *,
    name: str = _DIRECTORY,
    written_by: int | None = None,
) -> Generators:
    """Restores the state of a verified checkpoint into `objects`; returns the generators', for `rng.restore`.
    Collective.

    Args:
        checkpoint: the `work` of `write_state`, in its place in the checkpoint.
        written_by: number of ranks; default: as many as now.

    Raises:
        RanksFailed: it does not fit the objects of some rank, or another number of ranks wrote it and each had state
            of its own.
    """
    directory, before = checkpoint / name, written_by or ranks.world_size
    if before != ranks.world_size:
        ranks.first_does("reading the state", lambda: _require_same(directory, before))
    # A rank that was not there has no file. By now all files say the same.
    file = directory / _rank_file(ranks.rank if ranks.rank < before else 0)
    mine, common, sharded = ranks.together("reading the state", lambda: _read_all(objects, directory, file))
    # As in `write_state`: all ranks enter DCP's collective load, or none.
    if any(ranks.max([len(sharded)])):
        reader = ranks.together("reading the state", lambda: ShardedFiles(directory / _SHARDED))
        try:
            # Our reader and planner: DCP's own unpickle `.metadata` and bytes, and the checkpoint may be another
            # user's.
            load_sharded(sharded, storage_reader=reader, planner=TensorsOnly(), process_group=ranks.group)
        except CheckpointException as error:
            raise _failed("reading the sharded state failed", error) from error
    ranks.together(
        "loading the state",
        lambda: objects.put_back(join(mine["tree"], common, mine["own"], sharded)),
    )
    generators = rng.from_tensors(mine["rng"])
    return generators if ranks.rank < before else _another_stream(generators, ranks.rank)


def _require_same(directory: Path, written_by: int) -> None:
    """Refuses state that each rank has for itself: there is no telling which rank of another number gets it."""
    first: Any = None
    for rank in range(written_by):
        saved = _read(directory / _rank_file(rank))
        first = first or saved
        if saved["own"] or saved["tree"] != first["tree"]:
            objects = saved["tree"].keys() | first["tree"].keys()
            names = [name for name in objects if saved["tree"].get(name) != first["tree"].get(name)]
            raise ConfigError(
                "the checkpoint has state that differs from rank to rank",
                where=directory / _rank_file(rank),
                found=", ".join(sorted({*saved["own"], *names})[:5]),
                expected="the same on every rank, for another number of ranks",
                remedy=f"go on with {written_by} ranks, or make it a function of the step and the rank",
            )


def _another_stream(generators: Generators, rank: int) -> Generators:
    """Returns generators of a rank that was not there when `generators` were saved: numbers that no rank has drawn."""
    seed = hashlib.sha256(b"".join(generators[name] for name in ("python", "torch")))
    rng.seed_all(int.from_bytes(seed.digest(), "big"), rank)
    return rng.capture()


def _read_all(objects: Objects, directory: Path, file: Path) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Reads this rank's file, the common tensors, and the live sharded tensors, into which DCP reads."""
    mine = _read(file)
    # Names are compared before anything is loaded: half a state in the live objects could not be taken back.
    saved = set(mine["tree"])
    if saved != set(objects.names):
        raise misfit(directory, ", ".join(objects.names), ", ".join(sorted(saved)))
    common = _read(directory / _COMMON) if (directory / _COMMON).exists() else {}
    # DCP reads into existing DTensors, so a fresh optimizer needs its state tensors first.
    _, leaves = split(objects.take(as_target=True))
    wanted = list(sharded_paths(mine["tree"]))
    if absent := [path for path in wanted if path not in leaves.sharded]:
        raise misfit(absent[0], "no sharded tensor", "one")
    return mine, common, {path: leaves.sharded[path] for path in wanted}


def _failed(what: str, error: BaseException) -> RanksFailed:
    failed = RanksFailed(what, found=str(error)[:500])
    # As `together` fills it, so that callers can treat DCP's failures like the others.
    failed.kinds = frozenset({type(error).__name__})
    return failed


def _alike(digests: list[bytes], ranks: Collective) -> list[bool]:
    # What all ranks have, rank 0 has as well: each says which of its digests it lacks, and no rank hears all of them.
    first = msgspec.msgpack.decode(ranks.share(msgspec.msgpack.encode(digests), source=0), type=list[bytes])
    # A digest includes the path, so a set is enough: a tensor is common if every rank has the same one at that place.
    mine = set(digests)
    lacking = ranks.max([digest not in mine for digest in first]) if first else []
    common = {digest for digest, lacks in zip(first, lacking, strict=True) if not lacks}
    return [digest in common for digest in digests]


def _rank_file(rank: int) -> str:
    return f"rank_{rank:04d}.pt"


def _read(path: Path) -> Any:
    # Not mapped: an optimizer keeps the tensors that it gets, and the file will be pruned under it.
    return torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251 - weights alone are no program
