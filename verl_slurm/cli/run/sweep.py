"""`verl-slurm submit --sweep`: many runs of one configuration."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from verl_slurm.base.errors import ConfigError, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.cli.show import render
from verl_slurm.config.load import load
from verl_slurm.submit.checks.code import TreesRead
from verl_slurm.submit.plan import SubmissionPlan
from verl_slurm.submit.sweep import SweptRun, swept_runs


def submit_sweep(
    config: Path,
    words: Sequence[str],
    verl: Sequence[str],
    *,
    cluster: Literal["auto", "slurm", "local"],
    at_once: int | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Checks all runs, then queues them one after the other.

    Args:
        at_once: each run waits for the end of the one so many before it; None: none waits.

    Raises:
        ConfigError: the sweep, or a run of it, is refused; nothing was made.
        VerlSlurmError: of one run. Those before it are queued, and named.
    """
    from verl_slurm.submit.submission import carry_out

    runs = swept_runs(words)
    plans = _plans(config, runs, verl, cluster, dry_run=dry_run)
    if dry_run:
        if as_json:
            render.json_value([{"run_dir": str(plan.run_dir), "name": plan.config.name} for plan in plans])
            return ExitCode.OK
        render.warning(f"dry run: nothing is made or queued. Checked: {counted(len(plans), 'run')}")
        for plan in plans:
            render.line(str(plan.run_dir))
        return ExitCode.OK
    told: list[dict[str, object]] = []
    jobs: list[str] = []
    for number, plan in enumerate(plans):
        after = jobs[number - at_once] if at_once is not None and number >= at_once else ""
        try:
            done = carry_out(plan, after=after)
        except VerlSlurmError:
            queued = f"{len(jobs)} of {counted(len(plans), 'run')} queued"
            render.warning(f"{queued}: jobs {', '.join(jobs)}" if jobs else queued)
            raise
        jobs.append(done.job_id or "")
        told.append({"run_dir": done.run_dir, "job_id": done.job_id, "after": after or None})
        if not as_json:  # at once: each takes a second or two
            render.line(f"job {done.job_id}{f', after {after}' if after else ''}: {done.run_dir}")
    above = plans[0].run_dir.parent
    if as_json:
        render.json_value(told)
    else:
        render.fields(
            [
                ("queued", counted(len(told), "run")),
                ("follow them", f"verl-slurm watch {shell_word(above)}"),
                ("their state", f"verl-slurm list {shell_word(above)}"),
            ]
        )
    return ExitCode.OK


def _plans(
    config: Path,
    runs: Sequence[SweptRun],
    verl: Sequence[str],
    cluster: Literal["auto", "slurm", "local"],
    *,
    dry_run: bool,
) -> list[SubmissionPlan]:
    from verl_slurm.submit.submission import plan_submission

    plans: list[SubmissionPlan] = []
    trees: TreesRead = {}  # read once, so that all runs have the same code
    for number, run in enumerate(runs):
        written = load(config, run.words, verl, complete=True)
        # Below the directory that the configuration names: so they are a group to `list` and `watch`.
        above = Path(written.run_dir.replace("{name}", written.name))
        if (above / "run.yaml").exists():
            raise ConfigError(
                "a sweep needs a directory of its own",
                where="run_dir",
                found=f"the run {above}",
                remedy="give it another name=, or another run_dir=",
            )
        name = f"{written.name}-{run.label}"[:64]
        own = [f"name={name}", f"run_dir={above / run.label}"]
        words = [*run.words, *own]
        plan = plan_submission(config, words, verl=verl, cluster=cluster, trees=trees, dry_run=dry_run)
        if plan.done:
            render.warning(f"{plan.run_dir} is not queued: {plan.done}")
        else:
            plans.append(plan)
        if number == 0 and plan.cluster != "slurm":
            raise ConfigError(
                "a sweep needs Slurm",
                where="--sweep",
                found="this machine alone, which would train all runs at the same time",
                remedy="submit them one by one with --cluster local --wait",
            )
    if not plans:
        raise ConfigError("nothing is left to do in any run of the sweep", remedy="raise train.steps")
    return plans
