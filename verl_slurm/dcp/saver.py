"""Live tensors and runtime states of all ranks into one committed checkpoint. Collective.

Order: rank 0 begins → all write (torch.distributed.checkpoint, then the runtime state) → all seal their own
files → rank 0 gathers the entries and commits. Each stage is entered only when every rank has done the one
before; where one rank failed, all raise `RanksFailed` and the staging directory is removed.
`checkpoint/format.py` specifies what lies there in the end.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from verl_slurm.checkpoint.commit import Staging, abort, begin, commit, seal
from verl_slurm.checkpoint.format import FileEntry, Manifest, Topology
from verl_slurm.dcp.collective import Collective, alone_on_purpose, ranks_failed
from verl_slurm.dcp.tensors import Tensors
from verl_slurm.paths import RunPaths
from verl_slurm.runtime_state.codec import encode
from verl_slurm.runtime_state.format import RuntimeState, runtime_state_name

__all__ = ["Contents", "Provenance", "SavedCheckpoint", "save"]

_Entries = list[FileEntry]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What one rank brings to a save.

    Attributes:
        domains: `actor`, `critic`, `optimizer` → tensors (`dcp.tensors`), the same names on every rank.
        runtime: this rank's state.
        texts: further files by name; those of rank 0 are written, the other ranks' may be empty.
    """

    domains: Mapping[str, Tensors]
    runtime: RuntimeState
    texts: Mapping[str, bytes]


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What the manifest says of where a checkpoint comes from; the same for all saves of one incarnation."""

    epoch: int
    parent: str | None
    schema_id: str
    dataset_fingerprint: str
    frozen: Mapping[str, str]
    topology: Topology


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A committed checkpoint; `num_bytes` over all ranks."""

    name: str
    seconds: float
    num_bytes: int


class _Committed(msgspec.Struct, frozen=True):
    """What rank 0 tells the others."""

    name: str
    seconds: float
    num_bytes: int


def save(
    paths: RunPaths,
    contents: Contents,
    provenance: Provenance,
    ranks: Collective,
    *,
    epoch_check: Callable[[], None],
) -> SavedCheckpoint:
    """Write and commit a checkpoint at the position that `contents.runtime` names.

    Args:
        epoch_check: raises `Fenced` when this incarnation no longer owns the run; asked by rank 0.

    Returns:
        The same on every rank, once it is durable.

    Raises:
        RanksFailed: some rank failed, on every rank alike; nothing is left of the attempt. Where rank 0 was
            fenced off, `Fenced` is among its `kinds`.

    Called by: trainer.saving, on every rank at a safe point.
    """
    started = time.monotonic()
    staging: Staging | None = None

    def first() -> bytes:
        nonlocal staging
        staging = begin(paths, contents.runtime.step, contents.runtime.safe_point)
        return staging.directory.name.encode()

    try:
        name = ranks.on_first("starting the save", first).decode()
        directory = paths.checkpoints / name
        _write_tensors(directory, contents.domains, ranks)
        mine = ranks.together("writing the checkpoint", lambda: _write_own(directory, contents, ranks.rank))
        entries = [
            entry
            for part in ranks.gather(msgspec.msgpack.encode(mine))
            for entry in msgspec.msgpack.decode(part, type=_Entries)
        ]

        def last() -> bytes:
            assert staging is not None
            seconds = time.monotonic() - started
            manifest = _manifest(staging.final.name, contents.runtime, provenance, entries, seconds)
            final = commit(staging, manifest, epoch_check=epoch_check)
            seconds = time.monotonic() - started
            return msgspec.msgpack.encode(_Committed(final.name, seconds, manifest.num_bytes))

        done = msgspec.msgpack.decode(ranks.on_first("committing the checkpoint", last), type=_Committed)
    except BaseException:
        if staging is not None:
            abort(staging)
        raise
    return SavedCheckpoint(name=done.name, seconds=done.seconds, num_bytes=done.num_bytes)


def _write_tensors(directory: Path, domains: Mapping[str, Tensors], ranks: Collective) -> None:
    for domain, tensors in domains.items():
        try:
            with alone_on_purpose():
                dcp_save(
                    dict(tensors),
                    # `seal` makes everything durable; DCP's own fsync would only do it twice.
                    storage_writer=FileSystemWriter(directory / domain, sync_files=False, overwrite=False),
                    process_group=ranks.group,
                    no_dist=ranks.group is None,
                )
        except CheckpointException as error:
            raise ranks_failed(f"writing {domain}", error.failures) from error


def _write_own(directory: Path, contents: Contents, rank: int) -> _Entries:
    """Write this rank's small files and seal all that it wrote."""
    files = dict(contents.texts) if rank == 0 else {}
    files[runtime_state_name(rank)] = encode(contents.runtime)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    shards = [
        path.relative_to(directory).as_posix()
        for domain in contents.domains
        for path in (directory / domain).glob(f"__{rank}_*.distcp")
    ]
    if rank == 0:
        shards += [f"{domain}/.metadata" for domain in contents.domains]
    return seal(directory, sorted([*files, *shards]))


def _manifest(
    name: str, runtime: RuntimeState, provenance: Provenance, entries: _Entries, seconds: float
) -> Manifest:
    return Manifest(
        name=name,
        step=runtime.step,
        safe_point=runtime.safe_point,
        phase=runtime.phase,
        epoch=provenance.epoch,
        parent=provenance.parent,
        schema_id=provenance.schema_id,
        dataset_fingerprint=provenance.dataset_fingerprint,
        world_size=runtime.world_size,
        topology=provenance.topology,
        files=tuple(entries),
        frozen=dict(provenance.frozen),
        created_utc=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        save_seconds=round(seconds, 3),
    )
