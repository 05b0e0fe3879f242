"""From a checked config to what is asked of the cluster. Pure: reads no disk, asks no Slurm.

Three choices of the batch script carry the design (measured, Slurm 22.05 and 24.11):

* `--signal=B:USR1@N` warns the batch process alone. Without `B:` every process of every step gets the
  signal, and whatever has no handler dies of it.
* the last line is `exec python ...`: Python becomes the batch process, and gets the signal itself.
* `trap ''` in front of it: a warning in the half second before the daemon listens is ignored instead of
  killing the shell, and an ignored signal stays ignored over `exec`.
"""

import re
from pathlib import Path
from typing import Literal

import msgspec

from verl_slurm.config.layout import LAYOUT_KEYS, require_same_step
from verl_slurm.config.load import differences
from verl_slurm.config.schema import RunConfig
from verl_slurm.errors import ConfigError

__all__ = [
    "Cluster",
    "SubmissionPlan",
    "may_change",
    "refuse_changes",
    "sbatch_options",
    "sbatch_parameters",
    "unwanted_environment",
]

Cluster = Literal["slurm", "local"]

# What may differ between the submissions of one run: it does not touch what is computed.
_FREE_SECTIONS = ("slurm.", "daemon.", "observability.", "checkpoint.", "train.eval_")
_FREE_KEYS = {"rollout.max_logprob_gap", "rollout.gpu_memory_utilization"}

# Variables that sbatch reads before the script (man sbatch, INPUT ENVIRONMENT VARIABLES), so that a
# forgotten SBATCH_NO_REQUEUE would silently beat our `--requeue`; and those of a job that we are inside of,
# which srun in the new job would take for its own.
_SBATCH_VARIABLE = re.compile(r"SBATCH_.+|SLURM_.+|SLURMD_.+|PMI_.+|PMIX_.+|PMI2_.+|SUBMITIT_.+")
_KEEP = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT", "SLURM_CONF_SERVER"}
_KEEP_UNLESS_SET = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_CLUSTERS": "clusters",
}


class SubmissionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that is decided before anything is made.

    Called by: submission, executor.
    """

    config: RunConfig
    """Paths absolute; builtin: names already replaced, except in a dry run."""
    run_dir: Path
    cluster: Cluster
    new_run: bool
    begun: bool = False
    """The run has a checkpoint or rollouts; until then any of its keys may change."""
    resumes_from: str | None = None
    """Its newest committed checkpoint."""
    checked: tuple[str, ...] = ()
    """What was looked at and found good."""
    notes: tuple[str, ...] = ()
    """What the user should know, e.g. that the local executor was chosen."""


def sbatch_parameters(config: RunConfig) -> dict[str, object]:
    """Keyword arguments of submitit's `SlurmExecutor.update_parameters`."""
    slurm = config.slurm
    additional: dict[str, object] = {"signal": f"B:USR1@{slurm.signal_lead_s}", "requeue": True}
    if slurm.account is not None:
        additional["account"] = slurm.account
    if slurm.qos is not None:
        additional["qos"] = slurm.qos
    # False means "not given": submitit would write `--exclusive=False`.
    additional |= {option: value for option, value in slurm.extra.items() if value is not False}
    parameters: dict[str, object] = {
        "job_name": config.name,
        "time": slurm.time_limit_min,
        "nodes": config.distributed.nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": slurm.cpus_per_node,
        "use_srun": False,
        "stderr_to_stdout": True,
        "setup": ["trap '' USR1 TERM CONT"],
        "additional_parameters": additional,
    }
    if slurm.partition is not None:
        parameters["partition"] = slurm.partition
    if slurm.gpus_per_node:
        parameters["gpus_per_node"] = slurm.gpus_per_node
    if slurm.mem_mb_per_node:
        parameters["mem"] = f"{slurm.mem_mb_per_node}MB"
    return parameters


def sbatch_options(config: RunConfig) -> list[str]:
    """The same, as command-line options for a hand-written batch script (`sbatch/multi_node.sbatch`)."""
    parameters = sbatch_parameters(config)
    additional = parameters.pop("additional_parameters")
    assert isinstance(additional, dict)
    for inner in ("use_srun", "stderr_to_stdout", "setup"):
        del parameters[inner]
    options = {name.replace("_", "-"): value for name, value in (parameters | additional).items()}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in sorted(options.items())]


def unwanted_environment(names: list[str], config: RunConfig) -> list[str]:
    """Variables to leave behind when submitting."""
    given = {"account": config.slurm.account, "partition": config.slurm.partition, "qos": config.slurm.qos}
    chosen = {option for option, value in given.items() if value is not None} | set(config.slurm.extra)
    kept = _KEEP | {name for name, option in _KEEP_UNLESS_SET.items() if option not in chosen}
    return [name for name in names if _SBATCH_VARIABLE.fullmatch(name) and name not in kept]


def may_change(key: str) -> bool:
    """Whether `key` may differ between two submissions of one run."""
    return key.startswith(_FREE_SECTIONS) or key in _FREE_KEYS


def refuse_changes(
    old: RunConfig, new: RunConfig, run_dir: Path, *, begun: bool = True, steps_done: int = 0
) -> list[str]:
    """Compare the config of an existing run with the one submitted now.

    Args:
        old: that of the run.
        new: that submitted now.
        run_dir: for the error.
        begun: the run has something to lose; otherwise every key may change.
        steps_done: `train.steps` may change to this and more.

    Returns:
        The keys that changed, all of them such that may.

    Raises:
        ConfigError: a key changed that decides what is computed; all of them are listed.
    """
    changes = differences(old, new)
    if not begun:
        return [key for key, _, _ in changes]
    resharded = old.distributed.axes != new.distributed.axes
    if resharded:
        require_same_step(old, new, where=run_dir / "run.yaml")
    fixed = [
        f"{key}: {before!r} -> {after!r}"
        for key, before, after in changes
        if not may_change(key)
        and not (key in LAYOUT_KEYS and (resharded or key == "distributed.nodes"))
        and not (key == "train.steps" and _may_stop_at(after, steps_done))
    ]
    if fixed:
        steps = f", train.steps to {steps_done} or more"
        raise ConfigError(
            "the run exists with another configuration",
            where=run_dir / "run.yaml",
            found="; ".join(fixed),
            expected="the same values (only slurm, daemon, observability, checkpoint and the shape of the ranks may "
            f"change{steps})",
            remedy="choose another name or run_dir for a new run, or take the changes back",
        )
    return [key for key, _, _ in changes]


def _may_stop_at(steps: object, steps_done: int) -> bool:
    return isinstance(steps, int) and steps >= steps_done
