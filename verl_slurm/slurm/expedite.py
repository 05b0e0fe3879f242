"""`--requeue=expedite`: the job comes back at once, before all others, on nodes that are kept for it. Pure.

Slurm's source (25.11, job_mgr.c; release notes: "Expedited Requeue") means this for our runs:

* a node is lost: the job is requeued as before, but is eligible at once instead of after cred_expire (120 s). It is
  first in the queue, and the remaining nodes are kept for it. That is the purpose: in a full cluster a requeued job
  waits for days.
* `scontrol requeue`, a preemption with PreemptMode=REQUEUE: no 120 s; its place in the queue is unchanged.
* while it waits so (JobState=EXPEDITING) its user cannot change it: neither a start time nor nodes to avoid.
* a batch process that leaves with an error is requeued if an Epilog failed. Otherwise the job is HELD instead of
  FAILED, up to 25.11.2 even after exit code 0. So a lead that ends permanently sets `Requeue=0` first
  (`SlurmAllocation.withdraw`), as before every such end.

It needs a new enough sbatch and `SlurmctldParameters=enable_expedited_requeue`; without the latter the job is refused.
Both are read; no version is compared.
"""

from collections.abc import Mapping

__all__ = ["names_expedite", "offered"]


def names_expedite(sbatch_help: str) -> bool:
    """Returns whether this sbatch knows the option."""
    return "--requeue[=expedite]" in sbatch_help


def offered(sbatch_help: str, conf: Mapping[str, str]) -> bool:
    """Returns whether Slurm accepts a job that asks for it.

    Args:
        sbatch_help: what `sbatch --help` prints.
        conf: `scontrol show config`.
    """
    words = {word.strip().lower() for word in conf.get("SlurmctldParameters", "").split(",")}
    return names_expedite(sbatch_help) and "enable_expedited_requeue" in words
