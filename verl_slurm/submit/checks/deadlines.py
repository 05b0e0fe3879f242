"""Checks before queueing that a save finishes in time, from Slurm's settings and the duration of a save.

The duration is that of this run's own saves. Before the first, it is the size of a checkpoint (if the model's files
tell it) divided by the write speed that its storage has just shown.

A guest saves at the end of a step. A warning may come when a step has just begun, so a whole step and the save after
it count. The session uses the same numbers to decide whether to wait (`loops.reach`).
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checks.cluster_rules import SaveTime, expected_save, judge_deadlines, measured_save
from verl_slurm.checks.storage_probe import PlaceReport, probe_place
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.files import read_history
from verl_slurm.journal.steps import last_steps
from verl_slurm.loops.reach import STEPS_LOOKED_AT, reach
from verl_slurm.submit.checks.preflight import SlurmSays
from verl_slurm.submit.checks.room import checkpoint_size

_WORTH_TRYING = 1 << 30
"""Bytes of a checkpoint from which the speed of storage may matter."""


def check_deadlines(
    config: RunConfig, paths: RunPaths, committed: Sequence[CheckpointInfo], slurm: SlurmSays
) -> tuple[list[str], list[str]]:
    """Returns what is good, and notes for the user."""
    save = save_time(config, paths, committed)
    findings = judge_deadlines(slurm.conf, slurm.partition, config, save, slurm.others)
    checked = [f"{finding.topic}: {finding.found}" for finding in findings if finding.verdict == "good"]
    notes = [f"{f.topic}: {f.found}; {f.remedy}" for f in findings if f.verdict != "good"]
    return checked, notes


def save_time(
    config: RunConfig,
    paths: RunPaths,
    committed: Sequence[CheckpointInfo],
    probe: Callable[[Path], PlaceReport] = probe_place,
) -> SaveTime | None:
    """Returns the time that a save of this run takes; None: unknown."""
    # What was measured in this run counts before anything that is expected of its storage.
    saving = measured_save(read_history(paths))
    size = checkpoint_size(config, committed)
    # Trying the storage writes 64 MiB: not for a state of which the speed hardly matters.
    if saving is None and size is not None and size[0] >= _WORTH_TRYING:
        report = probe(paths.checkpoints)
        saving = None if report.problem else expected_save(size[0], report.write_bytes_per_s)
    return _behind_a_step(paths, saving) if config.trainer.is_guest else saving


def _behind_a_step(paths: RunPaths, saving: SaveTime | None) -> SaveTime | None:
    """Returns the time of a whole step and a save; None: no step was measured yet."""
    rows = last_steps(paths, STEPS_LOOKED_AT)
    steps_s = [float(row["step_s"]) for row in rows if isinstance(row.get("step_s"), int | float)]
    # Without a measured step there is no time to compare with a deadline; a save alone would look too good.
    if not steps_s:
        return None
    save_s = None if saving is None else saving.seconds
    # As if the warning came at a step's beginning, by the numbers that the session itself will decide by.
    worst = reach(seconds_left=math.inf, running_s=0.0, steps_s=steps_s, save_s=save_s)
    save = "a save" if saving is None else f"a save of {saving.seconds:.1f} s ({saving.basis})"
    return SaveTime(
        seconds=worst.needed_s or 0.0,
        basis=f"with its margin: the end of a step, which takes up to {max(steps_s):.1f} s, and {save}",
    )
