"""What is known of a run's jobs, read from its journal and its status file."""

from typing import Any

import msgspec

from verl_slurm.checkpoint.catalog import list_checkpoints
from verl_slurm.config.load import load_resolved
from verl_slurm.errors import UNREADABLE, NotFound
from verl_slurm.events import read_events
from verl_slurm.exit_codes import ExitCode
from verl_slurm.paths import RunPaths
from verl_slurm.runtime_state.segment import HEAD_BYTES
from verl_slurm.submit.plan import Cluster

__all__ = [
    "Submission",
    "has_begun",
    "has_ended",
    "last_job",
    "read_status",
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


_STATUS: dict[str, type] = {
    **dict.fromkeys(("epoch", "generation", "restarts", "step", "steps", "index"), int),
    **dict.fromkeys(
        ("state", "job_id", "phase", "last_checkpoint", "last_checkpoint_time", "cause", "updated"), str
    ),
    "metrics": dict,
}


def require_run(paths: RunPaths) -> RunPaths:
    """Refuse a directory that is not a run.

    Raises:
        NotFound: it has no run.yaml.
    """
    if not paths.run_yaml.is_file():
        load_resolved(paths.run_yaml)  # says so
    return paths


def read_status(paths: RunPaths) -> dict[str, Any]:
    """The daemon's snapshot, or an empty one where no daemon ever ran. Replaced atomically, so always whole.

    It informs, nothing depends on it: a value that is not of its type is left out.
    """
    try:
        status = msgspec.json.decode(paths.status.read_bytes(), type=dict[str, Any])
    except (FileNotFoundError, *UNREADABLE):
        return {}
    return {key: value for key, value in status.items() if isinstance(value, _STATUS.get(key, object))}


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


def last_job(paths: RunPaths) -> Submission:
    """The newest job of the run, whoever submitted it.

    Raises:
        NotFound: the run was never submitted.
    """
    cluster: Cluster = "slurm"
    host = ""
    found: Submission | None = None
    followed: set[str] = set()
    for event in read_events(paths):
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
    if found is None:
        raise NotFound(
            "the run has no job yet",
            where=paths.root,
            remedy=f"verl-slurm submit {paths.run_yaml}",
        )
    return found
