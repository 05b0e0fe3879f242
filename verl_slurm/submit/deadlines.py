"""Will a save be done in time? Said before anything is queued: from Slurm's settings and from what a save takes.

What it takes is what this run's saves took; before its first, the size of a checkpoint (where the model's files tell
it) at the speed that its storage was just seen to write with.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from verl_slurm.checkpoint.info import CheckpointInfo
from verl_slurm.config.schema import RunConfig
from verl_slurm.doctor.cluster_rules import judge_deadlines
from verl_slurm.doctor.places import PlaceReport, probe_place
from verl_slurm.doctor.save_time import SaveTime, expected_save, measured_save
from verl_slurm.events import read_events
from verl_slurm.paths import RunPaths
from verl_slurm.submit.preflight import SlurmSays
from verl_slurm.submit.room import checkpoint_size

__all__ = ["check_deadlines", "save_time"]

_WORTH_TRYING = 1 << 30
"""Bytes of a checkpoint from which it may matter how fast storage is."""


def check_deadlines(
    config: RunConfig, paths: RunPaths, committed: Sequence[CheckpointInfo], slurm: SlurmSays
) -> tuple[list[str], list[str]]:
    """What is good, and what the user should know.

    Called by: submit.submission.
    """
    save = save_time(config, paths, committed)
    findings = judge_deadlines(slurm.conf, slurm.partition, config, save)
    checked = [f"{finding.topic}: {finding.found}" for finding in findings if finding.verdict == "good"]
    notes = [f"{f.topic}: {f.found}; {f.remedy}" for f in findings if f.verdict != "good"]
    return checked, notes


def save_time(
    config: RunConfig,
    paths: RunPaths,
    committed: Sequence[CheckpointInfo],
    probe: Callable[[Path], PlaceReport] = probe_place,
) -> SaveTime | None:
    """What a save of this run takes; None: nobody can know.

    Called by: check_deadlines, cli.doctor.
    """
    measured = measured_save(read_events(paths))
    size = checkpoint_size(config, committed)
    if measured is not None or size is None or size[0] < _WORTH_TRYING:
        return measured
    report = probe(paths.checkpoints)
    return None if report.problem else expected_save(size[0], report.write_bytes_per_s)
