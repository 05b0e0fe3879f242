"""Finds or makes the run that takes over verl's existing checkpoints, and holds it meanwhile."""

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
    """Plans the run that `target` is or describes; makes nothing.

    Args:
        target: a run's directory, or a YAML file.
        overrides: `key=value` words, for a run that does not exist yet.

    Raises:
        ConfigError: its loop is not verl's; or overrides for an existing run, which `submit` is for.
        NotFound, DataError, PermissionRefused, NoRoom, Fenced: `submission.plan_submission`.
    """
    # As for a run that is only prepared: Slurm's verdict is asked for at submission.
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
    """Yields the run, made if it does not exist. While this holds, no job of it is alive and no other submit is at
    work.

    A run that was made stays if the work with it fails: it is then a prepared run.

    Raises:
        Fenced: it has a job, or another process holds it.
    """
    paths = RunPaths(plan.run_dir)
    if plan.new_run:
        carry_out(plan, prepare_only=True)
    require_run(paths)
    with only_submitter(paths):
        refuse_living(paths)
        yield paths, load_resolved(paths.run_yaml)
