"""Reads the facts about a run's jobs from its journal and its status file."""

from collections.abc import Mapping
from typing import Any

import msgspec

from verl_slurm.base.errors import NotFound
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.config.load import load_resolved
from verl_slurm.journal.files import read_events
from verl_slurm.journal.folds.jobs import Submission, newest_job
from verl_slurm.journal.status import read_status
from verl_slurm.runtime_state.segment import HEAD_BYTES

__all__ = [
    "has_begun",
    "last_job",
    "require_run",
    "steps_done",
    "with_cluster",
]


def require_run(paths: RunPaths) -> RunPaths:
    """Refuses a directory that is not a run.

    Raises:
        NotFound: it has no run.yaml.
    """
    if not paths.run_yaml.is_file():
        load_resolved(paths.run_yaml)  # raises if it is not
    return paths


def has_begun(paths: RunPaths) -> bool:
    """Returns whether the run has something that another configuration would spoil: a checkpoint, or rollouts.

    A checkpoint that is damaged or set aside counts too.
    """
    kinds = {info.kind for info in list_checkpoints(paths) if not info.name.startswith(".")}
    return bool(kinds & {"committed", "torn", "quarantined"}) or any(
        segment.stat().st_size > HEAD_BYTES for segment in paths.ledger.glob("*.ledger")
    )


def steps_done(paths: RunPaths) -> int:
    """Returns the steps that are done or begun: the run cannot end before them any more."""
    done = max(int(read_status(paths).get("step") or 0), 0)
    for info in list_checkpoints(paths):
        if info.kind == "committed":
            # A trainer in the middle of a step never stops at that step's beginning.
            done = max(done, info.step + (1 if info.safe_point else 0))
    return done


def last_job(paths: RunPaths) -> Submission:
    """Returns the newest job of the run, whoever submitted it.

    Raises:
        NotFound: the run was never submitted.
    """
    found = newest_job(read_events(paths))
    if found is None:
        raise NotFound(
            "the run has no job yet",
            where=paths.root,
            remedy=f"verl-slurm submit {paths.root}",
        )
    return with_cluster(found, read_status(paths))


def with_cluster(job: Submission, status: Mapping[str, Any]) -> Submission:
    """Returns the job with its Slurm cluster's name, which a journal of former versions leaves to the snapshot."""
    if job.slurm or status.get("job_id") != job.job_id:
        return job
    return msgspec.structs.replace(job, slurm=str(status.get("slurm") or ""))
