"""The run that takes over verl's existing checkpoints: found, or made from a configuration, and held meanwhile."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.load import load_resolved
from verl_slurm.config.schema import RunConfig
from verl_slurm.runs.record import require_run
from verl_slurm.submit.plan import SubmissionPlan
from verl_slurm.submit.submission import carry_out, only_submitter, plan_submission, refuse_living

__all__ = ["hold_run", "plan_run"]


def plan_run(target: Path, overrides: Sequence[str] = ()) -> SubmissionPlan:
    """All that can be said of the run that `target` is or describes; makes nothing.

    Args:
        target: a run's directory, or a YAML file.
        overrides: `key=value` words, for one that does not exist yet.

    Raises:
        ConfigError: its loop is not verl's; or an existing run and overrides, which `submit` is for.
        NotFound, DataError, PermissionRefused, NoRoom, Fenced: `submission.plan_submission`.
    """
    # As for a run that is only prepared: what Slurm thinks of it is asked when it is submitted.
    plan = plan_submission(target, list(overrides), cluster="slurm", ask_slurm=False)
    if plan.config.trainer.backend != "verl":
        raise ConfigError(
            "only a run of verl can take over checkpoints of verl",
            where=target,
            found=f"trainer.backend: {plan.config.trainer.backend}",
            expected="trainer.backend: verl",
            remedy="set it (and trainer.entry: ppo or sft), or leave the run out: then only the tracker is repaired",
        )
    return plan


@contextmanager
def hold_run(plan: SubmissionPlan) -> Iterator[tuple[RunPaths, RunConfig]]:
    """The run, made if it does not exist, with no job of it alive and no other submit at work while this holds.

    A run that was made stays when what is done with it fails: it is one that was prepared.

    Raises:
        Fenced: it has a job, or somebody else holds it.
    """
    paths = RunPaths(plan.run_dir)
    if plan.new_run:
        carry_out(plan, prepare_only=True)
    require_run(paths)
    with only_submitter(paths):
        refuse_living(paths)
        yield paths, load_resolved(paths.run_yaml)
