"""Prepares the checkpoint that a start resumes from for the number of ranks that it has.

```
RUN/checkpoints/step_000120/             of 2 ranks: as it was saved, and what counts
RUN/resharded/checkpoints/step_000120/   the same state for 3 ranks, made at the start; verl reads this one
```

The copy is a checkpoint like any, and no search for a state to resume from looks there. A later start with as many
ranks uses it again if it still verifies. It is removed at the first start that does not resume from it: by then the run
has saved a newer checkpoint with its new number of ranks.
"""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from verl_slurm.base import bounded
from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.fence import require_attempt
from verl_slurm.base.paths import CHECKPOINT_NAME, RunPaths
from verl_slurm.base.tree import names_in
from verl_slurm.checkpoint.format.specification import Manifest
from verl_slurm.checkpoint.store.commit import begin, sweep
from verl_slurm.checkpoint.store.verify import read_manifest, verify
from verl_slurm.config.schema import RunConfig
from verl_slurm.verl.reshard.checkpoint import (
    RECORD,
    Made,
    plan_source,
    require_room,
    source_of,
    write_checkpoint,
)
from verl_slurm.verl.reshard.dividing import OnBytes, RanksPython, ranks_python


def prepare_start(
    config: RunConfig,
    contained: Callable[..., list[str]],
    paths: RunPaths,
    attempt: int,
    manifest: Manifest | None,
    on_bytes: OnBytes,
) -> Made | None:
    """Does the work of `prepare_ranks` for all ranks of a run, by their own Python, on a node of the job.

    Args:
        contained: `containers.runtimes.contained_argv`.
    """
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
    """Divides a verified checkpoint of the run among `ranks` ranks, unless it is of so many, or was divided before.

    Runs at a start, when the attempt owns the run and no rank runs yet.

    Args:
        manifest: of the checkpoint to resume from; None: the run begins from nothing.
        python: of the ranks.
        on_bytes: told how many more bytes were written or compared, and 0 twice in a second. An exception of its ends
            the work.

    Returns:
        What was made; None: nothing had to be.

    Raises:
        ConfigError: it cannot be divided so.
        NoRoom: the copy does not fit.
        Fenced: a newer attempt owns the run.
        CheckpointCorrupt, OSError: as `checkpoint.write_checkpoint`.
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
    plan = plan_source(source, ranks, python, on_bytes)
    require_room(source, plan, divided.checkpoints)
    staging = begin(divided, wanted.step, wanted.safe_point)
    owned = partial(require_attempt, paths, attempt)
    try:
        return write_checkpoint(source, plan, staging, python, attempt_check=owned, on_bytes=on_bytes)
    except BaseException:
        shutil.rmtree(staging.directory, ignore_errors=True)
        raise


def _is_divided(directory: Path, source: Manifest, ranks: int) -> bool:
    """Returns whether a directory says that it was made of this checkpoint, for so many ranks."""
    try:
        manifest = read_manifest(directory)
        data = bounded.read_regular(directory / "metadata.json", bounded.RECORD)
        record = bounded.decode_json(data, _Metadata, bounded.RECORD).resharded
    except (OSError, ValueError, VerlSlurmError):
        return False
    return record is not None and (manifest.world_size, record.digest) == (ranks, source.digest)


class _Record(msgspec.Struct, frozen=True):
    digest: str = ""


class _Metadata(msgspec.Struct, frozen=True):
    resharded: _Record | None = None


assert RECORD in _Metadata.__struct_fields__
