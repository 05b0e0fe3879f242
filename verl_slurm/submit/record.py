"""What is known of a run's jobs, read from its journal and its status file."""

from collections.abc import Iterable

import msgspec

from verl_slurm.checkpoint.catalog import list_checkpoints
from verl_slurm.config.load import load_resolved
from verl_slurm.errors import NotFound
from verl_slurm.events import Event, read_events
from verl_slurm.exit_codes import ExitCode
from verl_slurm.paths import RunPaths
from verl_slurm.runtime_state.segment import HEAD_BYTES
from verl_slurm.snapshot import read_status
from verl_slurm.submit.plan import Cluster

__all__ = [
    "Submission",
    "has_begun",
    "has_ended",
    "last_job",
    "newest_job",
    "require_run",
    "steps_done",
]


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """The job that a run has, or had last."""

    job_id: str
    cluster: Cluster
    host: str = ""
    """Where a local one was started."""
    time: str = ""


def require_run(paths: RunPaths) -> RunPaths:
    """Refuse a directory that is not a run.

    Raises:
        NotFound: it has no run.yaml.
    """
    if not paths.run_yaml.is_file():
        load_resolved(paths.run_yaml)  # says so
    return paths


def has_begun(paths: RunPaths) -> bool:
    """Whether the run has something that another configuration would spoil: a checkpoint, or rollouts.

    A checkpoint that is damaged or set aside counts too.
    """
    kinds = {info.kind for info in list_checkpoints(paths) if not info.name.startswith(".")}
    return bool(kinds & {"committed", "torn", "quarantined"}) or any(
        segment.stat().st_size > HEAD_BYTES for segment in paths.ledger.glob("*.ledger")
    )


def steps_done(paths: RunPaths) -> int:
    """Steps that are done or begun: what the run cannot stop short of any more."""
    done = max(int(read_status(paths).get("step") or 0), 0)
    for info in list_checkpoints(paths):
        if info.kind == "committed":
            # A trainer in the middle of a step never stops at that step's beginning.
            done = max(done, info.step + (1 if info.safe_point else 0))
    return done


def has_ended(paths: RunPaths, job: Submission) -> bool:
    """Whether the daemon of this job wrote down an end that is not a requeue."""
    ended = False
    for event in read_events(paths):
        if event.get("job_id") == job.job_id:
            ended = event["event"] == "ended" and event.get("exit_code") != ExitCode.REQUEUED
    return ended


def newest_job(events: Iterable[Event], cluster: Cluster = "slurm", host: str = "") -> Submission | None:
    """As `last_job`, of a journal's last events. Pure.

    Args:
        cluster: of the job that had the word before the first of them; `host` likewise.

    Called by: last_job, submit.fleet.
    """
    found: Submission | None = None
    followed: set[str] = set()
    for event in events:
        if event["event"] == "successor":
            followed.add(str(event.get("after")))
        elif str(event.get("job_id")) in followed:
            continue  # the last words of the job that another one follows
        # A lead says so too: a run may have been started by hand, through the sbatch template.
        if event["event"] in ("submitted", "successor", "started") and event.get("cluster") in (
            "slurm",
            "local",
        ):
            cluster, host = event["cluster"], str(event.get("host", ""))
        job_id = event.get("job_id")
        if isinstance(job_id, str) and job_id and (found is None or job_id != found.job_id):
            found = Submission(job_id=job_id, cluster=cluster, host=host, time=str(event.get("time", "")))
    return found


def last_job(paths: RunPaths) -> Submission:
    """The newest job of the run, whoever submitted it.

    Raises:
        NotFound: the run was never submitted.
    """
    found = newest_job(read_events(paths))
    if found is None:
        raise NotFound(
            "the run has no job yet",
            where=paths.root,
            remedy=f"verl-slurm submit {paths.run_yaml}",
        )
    return found
