"""`--requeue=expedite`: the job comes back at once, before all others, on nodes that are kept for it. Pure.

What Slurm's source has (25.11, job_mgr.c; release notes: "Expedited Requeue"), and what it means for a run of ours:

* a node is lost: requeued as ever, but eligible at once instead of after cred_expire (120 s), first in the queue, and
  the nodes that are left are kept for it. This is why it is asked for: in a full cluster a requeued job waits for days.
* `scontrol requeue`, a preemption with PreemptMode=REQUEUE: no 120 s; its place in the queue is as ever.
* while it waits so (JobState=EXPEDITING) its user cannot change it: neither a start time nor nodes to avoid.
* a batch process that leaves with an error is requeued if an Epilog failed; if none did, the job is HELD instead of
  FAILED, and up to 25.11.2 also one that leaves with 0. So a lead that ends for good says `Requeue=0` first
  (`SlurmAllocation.withdraw`), as before every end for good.

It takes a new enough sbatch and `SlurmctldParameters=enable_expedited_requeue`; without the latter the job is refused.
Both are read; no version is compared.
"""

from collections.abc import Mapping

__all__ = ["names_expedite", "offered"]


def names_expedite(sbatch_help: str) -> bool:
    """Whether this sbatch knows the option."""
    return "--requeue[=expedite]" in sbatch_help


def offered(sbatch_help: str, conf: Mapping[str, str]) -> bool:
    """Whether a job that asks for it is accepted.

    Args:
        sbatch_help: what `sbatch --help` prints.
        conf: `scontrol show config`.
    """
    words = {word.strip().lower() for word in conf.get("SlurmctldParameters", "").split(",")}
    return names_expedite(sbatch_help) and "enable_expedited_requeue" in words
