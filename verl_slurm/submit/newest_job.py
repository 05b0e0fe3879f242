"""Which job a run has, or had last, by its journal. Pure, and quick to import: `list` needs no more of `record`."""

from collections.abc import Iterable
from typing import Literal

import msgspec

from verl_slurm.events import Event

__all__ = ["Submission", "newest_job"]

Cluster = Literal["slurm", "local"]


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """The job that a run has, or had last. Called by: submit, cli."""

    job_id: str
    cluster: Cluster
    host: str = ""
    """Where a local one was started."""
    time: str = ""


def newest_job(events: Iterable[Event], cluster: Cluster = "slurm", host: str = "") -> Submission | None:
    """As `last_job`, of a journal's last events. Pure.

    Args:
        cluster: of the job that had the word before the first of them; `host` likewise.

    Called by: record.last_job, submit.fleet, cli.runs.
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
