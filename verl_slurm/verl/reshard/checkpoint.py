"""Makes a checkpoint of another number of ranks out of a checkpoint of a run, or out of a step of plain verl.

```
verify     every byte of the source against its manifest; a step of plain verl against torch.save's CRC-32s
plan       by torch in a process of the ranks' Python (`dividing`)
divide     by the same one, once there is room, into a staging directory, and compared there
commit     sealed and renamed like any save (`checkpoint.store.commit`)
verify     every byte of the result
```

The source is read and never changed. The result keeps its name, its step and all files beside verl's own directory
(tracker, positions in the data, configuration) byte for byte. metadata.json says what it was made of.

A start (`prepare_ranks`) makes such a copy of the checkpoint that it resumes from, in RUN/resharded/checkpoints, where
no search for a state to resume from looks. A later start with as many ranks uses it again if it still verifies, and the
first one that does not resume from it removes it.
"""

import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from verl_slurm.base import bounded
from verl_slurm.base.errors import CheckpointCorrupt, ConfigError, NoRoom, VerlSlurmError
from verl_slurm.base.fence import require_attempt
from verl_slurm.base.files import fsync_path, write_file
from verl_slurm.base.paths import CHECKPOINT_NAME, RunPaths
from verl_slurm.base.tree import files_below, names_in
from verl_slurm.checkpoint.decide.storage import need_of_next
from verl_slurm.checkpoint.format.specification import MANIFEST, Manifest, Topology, guest_directory
from verl_slurm.checkpoint.store.commit import StagingDirectory, begin, commit, seal, sweep
from verl_slurm.checkpoint.store.medium import room_for
from verl_slurm.checkpoint.store.verify import read_manifest, verify
from verl_slurm.config.load import load_own
from verl_slurm.config.schema import RunConfig
from verl_slurm.verl.reshard.dividing import (
    Division,
    OnBytes,
    RanksPython,
    ReshardPlan,
    ranks_python,
    start_division,
    this_python,
)
from verl_slurm.verl.shards import judge_step
from verl_slurm.verl.step_layout import is_distributed, merge_command, read_layout
from verl_slurm.verl.tracker import tracker_file

RECORD = "resharded"
"""The key in metadata.json."""
_METADATA = "metadata.json"


@dataclass(frozen=True, kw_only=True)
class DivisionSource:
    """What is divided anew.

    Attributes:
        directory: a checkpoint of a run, or a `global_step_N` of plain verl.
        manifest: None: plain verl's.
    """

    directory: Path
    step: Path
    manifest: Manifest | None


@dataclass(frozen=True, kw_only=True)
class Made:
    """The result; `tensors`: digest of all tensors put together, the same before and after."""

    path: Path
    tensors: str
    num_bytes: int
    num_files: int


def open_source(directory: Path, on_bytes: OnBytes = lambda _: None) -> DivisionSource:
    """Verifies every byte of a checkpoint of a run, or of a step of plain verl.

    Raises:
        CheckpointCorrupt: it does not verify.
        ConfigError: another loop than verl's saved it.
    """
    if not (directory / MANIFEST).exists():
        judged = judge_step(directory, on_bytes=on_bytes)
        # What is beyond our judgement is not called damaged: the plan refuses it with its reason.
        if not judged.ok and any(problem.kind != "version" for problem in judged.problems):
            raise CheckpointCorrupt(
                "the step is not whole",
                where=directory,
                found=judged.one_line(),
                remedy="reshard one that is: `verl-slurm adopt DIR --dry-run` judges all of them",
            )
        return DivisionSource(directory=directory, step=directory, manifest=None)
    remedy = "reshard one that does (`verl-slurm verify RUN`)"
    manifest = verify(directory).require("the checkpoint does not verify", directory, remedy)
    return source_of(directory, manifest)


def source_of(directory: Path, manifest: Manifest) -> DivisionSource:
    """Returns a verified checkpoint as a source. Raises ConfigError if another loop than verl's saved it."""
    if manifest.guest == "verl":
        step = directory / guest_directory("verl", manifest.step)
        return DivisionSource(directory=directory, step=step, manifest=manifest)
    if manifest.guest == "loop":
        raise ConfigError(
            "only checkpoints of verl can be divided anew",
            where=directory,
            found="one of verl_slurm.run",
            remedy=f"go on with distributed.dp_size={manifest.world_size}",
        )
    raise ConfigError(
        "this checkpoint need not be divided anew",
        where=directory,
        found="one of trainer.backend: native",
        expected="one of verl",
        remedy="submit its run with another distributed.dp_size: any number of ranks reads it",
    )


def python_for(source: DivisionSource, contained: Callable[..., list[str]]) -> RanksPython:
    """Returns the Python of the ranks of the checkpoint's run; of any other checkpoint that of this process.

    Raises:
        ConfigError, PermissionRefused: the run's configuration does not load, or could be another user's.
    """
    run = RunPaths(source.directory.parent.parent)
    if source.directory.parent != run.checkpoints or not run.run_yaml.is_file():
        return this_python
    return partial(ranks_python, load_own(run.run_yaml), contained)


def division_of(
    source: DivisionSource, ranks: int, python: RanksPython, **how: Any
) -> AbstractContextManager[Division]:
    """Plans the same state on `ranks` ranks. Errors as `require_fsdp`; all else as `start_division`."""
    require_fsdp(source, ranks)
    return start_division(source.step, ranks, python, **how)


def require_fsdp(source: DivisionSource, ranks: int) -> None:
    """Requires by the names of the files that it is a step of FSDP for another number of ranks.

    Raises:
        ConfigError: it is none.
        CheckpointCorrupt: files are missing or contradict each other.
        OSError: it cannot be read.
    """
    step = source.step
    names = [*files_below(step)]
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
    if ranks == layout.world_size:
        raise ConfigError(
            "the checkpoint is of this number of ranks already",
            where=step,
            found=ranks,
            remedy="nothing has to be done: verl reads it as it is",
        )


def require_room(source: DivisionSource, plan: ReshardPlan, where: Path) -> None:
    """Raises NoRoom if the result does not fit."""
    sizes = [info.st_size for info in files_below(source.step).values()]
    # What is whole on every rank, and the descriptions, grow with the ranks; all else stays.
    num_bytes = max(sum(sizes), plan.written_bytes)
    num_files = len(sizes) * max(1, -(-plan.after // plan.before))
    basis = f"{source.step.name} on {plan.after} ranks"
    room = room_for(where, need_of_next(num_bytes, num_files, basis=basis, margin=0.02))
    if room.enough is False:
        raise NoRoom(
            "there is no room for the divided checkpoint", where=where, found=room.reason, remedy="make some"
        )


def write_checkpoint(
    source: DivisionSource,
    division: Division,
    staging: StagingDirectory,
    *,
    attempt_check: Callable[[], None] = lambda: None,
    on_bytes: OnBytes = lambda _: None,
) -> Made:
    """Makes `staging`, an empty directory, a committed checkpoint and verifies it.

    Raises:
        CheckpointCorrupt: the result is not the same state, or does not verify.
        ConfigError, VerlSlurmError: as `Division.divide`.
        Fenced: by `attempt_check`.
        OSError: the storage refused. On any error `staging` is left for the caller to remove.
    """
    manifest, began = source.manifest, time.monotonic()
    assert manifest is not None
    directory, own = staging.directory, guest_directory("verl", manifest.step)
    plan, tensors = division.plan, division.divide(directory / own, on_bytes).tensors
    for entry in manifest.files:
        if not entry.path.startswith(f"{own}/"):
            # Verified moments ago, and small: configuration, schema, tracker, positions in the data.
            data = bounded.read_regular(source.directory / entry.path, bounded.RECORD)
            if entry.path == _METADATA:
                data = _with_record(data, manifest, plan, tensors)
            write_file(directory / entry.path, data, durable=False)
    made = msgspec.structs.replace(
        manifest,
        world_size=plan.after,
        topology=Topology(dp=plan.after),
        files=tuple(seal(directory, [*files_below(directory)])),
        created_utc=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        save_seconds=round(time.monotonic() - began, 3),
    )
    final = commit(staging, made, attempt_check=attempt_check)
    num_bytes = verify(final).require("the divided checkpoint does not verify", final).num_bytes
    return Made(path=final, tensors=tensors, num_bytes=num_bytes, num_files=len(made.files))


def _with_record(data: bytes, manifest: Manifest, plan: ReshardPlan, tensors: str) -> bytes:
    values = msgspec.json.decode(data, type=dict[str, object])
    values[RECORD] = {
        "ranks": plan.before,
        # Of the source: by it a start knows the result of an earlier one.
        "digest": manifest.digest,
        "tensors": tensors,
    }
    return msgspec.json.format(msgspec.json.encode(values), indent=1) + b"\n"


def write_step(
    source: DivisionSource, division: Division, directory: Path, on_bytes: OnBytes = lambda _: None
) -> Made:
    """Makes `directory`, which exists and is empty, a `trainer.default_local_dir` of verl with the step in it. Durable.

    Raises:
        CheckpointCorrupt: the result is not the same state, or not whole.
        ConfigError, VerlSlurmError: as `Division.divide`.
        OSError: the storage refused.
    """
    target = directory / source.step.name
    tensors = division.divide(target, on_bytes).tensors
    judged = judge_step(target)
    if not judged.ok:
        raise CheckpointCorrupt("the divided step is not whole", where=target, found=judged.one_line())
    for path in sorted(target.rglob("*"), reverse=True):
        fsync_path(path)
    fsync_path(target)
    for name, data in tracker_file(judged.step).items():
        write_file(directory / name, data)
    return Made(path=target, tensors=tensors, num_bytes=judged.num_bytes, num_files=len(judged.files))


def prepare_start(
    config: RunConfig,
    contained: Callable[..., list[str]],
    paths: RunPaths,
    attempt: int,
    manifest: Manifest | None,
    on_bytes: OnBytes,
) -> Made | None:
    """Does the work of `prepare_ranks` by the ranks' own Python, on a node of the job."""
    python = partial(ranks_python, config, contained, on_node=True)
    return prepare_ranks(paths, attempt, manifest, config.distributed.world_size, python, on_bytes)


def prepare_ranks(
    paths: RunPaths,
    attempt: int,
    manifest: Manifest | None,
    ranks: int,
    python: RanksPython,
    on_bytes: OnBytes = lambda _: None,
) -> Made | None:
    """Divides a verified checkpoint of the run among `ranks` ranks. Returns None if it is of so many, or was divided
    before.

    Runs at a start, when the attempt owns the run and no rank runs yet.

    Args:
        manifest: of the checkpoint to resume from; None: the run begins from nothing.
        on_bytes: told how many more bytes were written or compared, and 0 twice in a second. An exception of its ends
            the work.

    Raises:
        ConfigError: it cannot be divided so.
        NoRoom: the copy does not fit.
        Fenced: a newer attempt owns the run.
        CheckpointCorrupt, OSError: as `write_checkpoint`.
    """
    divided = paths.resharded
    wanted = manifest if manifest is not None and manifest.world_size != ranks else None
    require_attempt(paths, attempt)
    # Of a start that died while it was writing.
    sweep(divided)
    for name in names_in(paths.run, divided.checkpoints):
        if CHECKPOINT_NAME.fullmatch(name) and (wanted is None or name != wanted.name):
            shutil.rmtree(divided.checkpoints / name, ignore_errors=True)
    if wanted is None:
        return None
    source = source_of(paths.checkpoints / wanted.name, wanted)
    final = divided.checkpoints / wanted.name
    if _is_divided(final, wanted, ranks) and verify(final).ok:
        return None
    # Of another number of ranks, of another save of this step, or damaged; the source has all that was in it.
    shutil.rmtree(final, ignore_errors=True)
    staging = begin(divided, wanted.step, wanted.safe_point)
    try:
        with division_of(source, ranks, python, below=[staging.directory], on_bytes=on_bytes) as division:
            require_room(source, division.plan, divided.checkpoints)
            return write_checkpoint(
                source,
                division,
                staging,
                attempt_check=lambda: require_attempt(paths, attempt),
                on_bytes=on_bytes,
            )
    except BaseException:
        shutil.rmtree(staging.directory, ignore_errors=True)
        raise


def _is_divided(directory: Path, source: Manifest, ranks: int) -> bool:
    """Returns whether a directory says that it was made of this checkpoint, for so many ranks."""
    try:
        manifest = read_manifest(directory)
        data = bounded.read_regular(directory / _METADATA, bounded.RECORD)
        record = bounded.decode_json(data, _Metadata, bounded.RECORD).resharded
    except (OSError, ValueError, VerlSlurmError):
        return False
    return record is not None and (manifest.world_size, record.digest) == (ranks, source.digest)


class _Record(msgspec.Struct, frozen=True):
    digest: str = ""


class _Metadata(msgspec.Struct, frozen=True):
    resharded: _Record | None = None  # `RECORD`
