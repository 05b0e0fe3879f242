"""Carries out a prune plan; deletes what the plan names, and only while a good checkpoint is left.

A checkpoint is first renamed to a staging name, so a crash during removal leaves nothing that looks like a checkpoint
(`commit.sweep` finishes it).
"""

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.decide.retention import PrunePlan
from verl_slurm.checkpoint.format.info import Verdict
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.checkpoint.store.tree import open_own
from verl_slurm.checkpoint.store.verify import verify

__all__ = ["apply_prune"]


def apply_prune(
    paths: RunPaths,
    plan: PrunePlan,
    *,
    verifier: Callable[[Path], Verdict] = verify,
    epoch_check: Callable[[], None] = lambda: None,
) -> list[str]:
    """Removes what `plan` drops, oldest first; returns the names removed. Runs on rank 0.

    When the plan is not `assured`, the kept ones are verified from the newest on until one is good. If none is good,
    nothing is removed.

    Args:
        epoch_check: raises `Fenced` when this attempt no longer owns the run. It is called before each removal, because
            a plan that slept for a while may drop what a newer attempt resumes from.

    Raises:
        Fenced: by `epoch_check`; those before it are gone.
        ValueError: the plan names something that is no checkpoint (a bug of its maker).
        OSError: one could not be removed; those before it are gone, those after it are whole.
    """
    names = [item.name for item in reversed(plan.drop)]
    for name in [*names, *(item.name for item in plan.keep)]:
        if checkpoint_order(name) is None:
            raise ValueError(f"{name!r} is no checkpoint's name")
    if not names or not plan.keep:
        return []
    if not plan.assured and not any(verifier(paths.checkpoints / item.name).ok for item in plan.keep):
        return []
    removed = []
    with open_own(paths.run, paths.checkpoints) as folder:
        for name in names:
            doomed = paths.staging(paths.checkpoints / name, secrets.token_hex(8)).name
            epoch_check()
            try:
                os.rename(name, doomed, src_dir_fd=folder, dst_dir_fd=folder)  # noqa: TID251 - by descriptor
            except FileNotFoundError:
                continue
            os.fsync(folder)  # noqa: TID251 - by descriptor
            shutil.rmtree(doomed, dir_fd=folder)
            removed.append(name)
    return removed
