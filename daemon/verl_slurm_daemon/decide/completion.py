"""Decides whether a run is done, so that a start has nothing to do and starts no ranks. Pure.

Slurm may start a job again that has ended well (23.02 to 25.11 do so after a preemption, docs/slurm-versions.md). The
tasks of a chain follow one another whatever became of the run.
"""

from verl_slurm.checkpoint.format.specification import Manifest
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.history import History


def nothing_left(
    config: RunConfig, manifest: Manifest | None, history: History, job_id: str, array: str | None
) -> str:
    """Returns why nothing is left to do after this checkpoint, which is verified; empty: something is.

    A guest's loop counts as done if this very job, or an earlier task of its `array`, ended well with this checkpoint,
    and no new submission came since.
    """
    if manifest is None:
        return ""
    if not config.trainer.is_guest:
        # A safe point lies within a step: the last one is then still to be finished.
        whole = manifest.safe_point == 0 and manifest.step >= config.train.steps
        return f"all {config.train.steps} steps are done: {manifest.name}" if whole else ""
    # The length of a guest's loop is known to its own program, which may have been changed since.
    if history.ended_well_with(manifest.name, job_id, array):
        return f"the loop has ended with {manifest.name}"
    return ""
