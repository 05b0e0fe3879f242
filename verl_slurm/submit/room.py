"""Whether the run's file system has room for what the run is going to keep, asked before anything is queued.

Two cases, two answers. No room for a single checkpoint: refused, because such a job could train and never save.
Room for one, but not for all that is to be kept: a warning, because others may free room before it is needed, and
because the size is an estimate until the run has saved once. Quotas are not seen (`checkpoint/storage.py`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from verl_slurm.checkpoint.free_space import room_for
from verl_slurm.checkpoint.info import CheckpointInfo
from verl_slurm.checkpoint.storage import Need, Room, need_of_next
from verl_slurm.config.schema import RunConfig
from verl_slurm.errors import NoRoom
from verl_slurm.submit.model_files import num_parameters

__all__ = ["check_room", "num_to_come"]

_FILES_PER_RANK = 8
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_PER_PARAMETER = 6
"""Actor and critic, each with AdamW's two moments, all in the dtype of the model."""
_LEAST_KEPT = 2


def check_room(
    config: RunConfig,
    checkpoints: Path,
    committed: Sequence[CheckpointInfo],
    *,
    ask: Callable[[Path, Need], Room] = room_for,
) -> str:
    """Compare what is free with what is to come.

    Args:
        config: paths absolute.
        checkpoints: RUN/checkpoints; need not exist.
        committed: what lies there already, newest first.

    Returns:
        A warning, empty where there is none.

    Raises:
        NoRoom: not even one checkpoint fits.

    Called by: submit.submission.
    """
    if committed and committed[0].step >= config.train.steps:
        return ""  # it is done; nothing more is saved
    size = _size(config, committed)
    if size is None:
        return ""
    num_bytes, num_files, basis = size
    room = ask(checkpoints, need_of_next(num_bytes, num_files, basis=basis))
    if room.enough is False:
        raise NoRoom(
            "there is no room for a single checkpoint",
            where=checkpoints,
            found=room.reason,
            remedy="free some (verl-slurm prune RUN --dry-run shows what could go), or choose another run_dir",
        )
    count = num_to_come(config, len(committed))
    room = ask(checkpoints, need_of_next(num_bytes, num_files, copies=count, basis=basis))
    if room.enough is not False:
        return ""
    checkpoint = config.checkpoint
    besides = [("keep_every", checkpoint.keep_every), ("keep_best", checkpoint.keep_best)]
    for_ever = "".join(f" and {key}={value}" for key, value in besides if value)
    return (
        f"little room in {checkpoints}: {room.reason}; checkpoint.keep_last={checkpoint.keep_last}{for_ever} "
        f"keep so many, and one more while it is written"
    )


def num_to_come(config: RunConfig, present: int) -> int:
    """At most so many more checkpoints lie there at once, when `present` do already: at least one. Pure."""
    checkpoint = config.checkpoint
    for_ever = config.train.steps // checkpoint.keep_every if checkpoint.keep_every else 0
    return max(max(checkpoint.keep_last, _LEAST_KEPT) + for_ever + checkpoint.keep_best + 1 - present, 1)


def _size(config: RunConfig, committed: Sequence[CheckpointInfo]) -> tuple[int, int, str] | None:
    """(bytes, files, where that is known from) of one checkpoint; None: nobody knows."""
    if committed:
        newest = committed[0]
        return newest.num_bytes, newest.num_files, newest.name
    model = config.model.path
    parameters = None if model.startswith("builtin:") else num_parameters(Path(model))
    if parameters is None:
        return None
    num_bytes = parameters * _DTYPE_BYTES[config.model.dtype] * _PER_PARAMETER
    num_files = _FILES_PER_RANK * config.distributed.world_size
    return num_bytes, num_files, f"an estimate, {parameters / 1e6:.3g} million parameters"
