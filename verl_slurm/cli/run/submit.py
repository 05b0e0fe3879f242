"""`verl-slurm submit`: one run, or with --sweep many of one configuration."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec

from verl_slurm.base.errors import ConfigError, Fenced, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.shipped import shipped
from verl_slurm.cli.command_options import CONFIG, KEY_VALUE, Whole, command, flag, option
from verl_slurm.cli.run.watch import tell_until_end
from verl_slurm.cli.show import render
from verl_slurm.config.load import load
from verl_slurm.config.schema import RunConfig
from verl_slurm.dataset.fingerprint.data_record import Drift
from verl_slurm.runs.liveness import queued_jobs
from verl_slurm.slurm.batch import batch_script, sbatch_options
from verl_slurm.slurm.runner import telling
from verl_slurm.submit.checks.code_trees import TreesRead
from verl_slurm.submit.checks.model_and_reward import needs_building
from verl_slurm.submit.checks.ranks_environment import show_rank_environment
from verl_slurm.submit.executor import local_command, render_script
from verl_slurm.submit.submission_plan import SubmissionPlan, SweptRun, swept_runs

if TYPE_CHECKING:
    from verl_slurm.submit.submission import Confirm, SubmissionResult

_VERL = "verl_slurm.verl_words"


class _WithVerlWords(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # click drops `--` itself, and nothing would tell verl's words from ours.
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_VERL] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])


@command(
    "CONFIG DATA PERMISSION NO_SLURM SLURM_REFUSED SCHEMA DATASET_DRIFT CORRUPT NOT_FOUND FENCED NO_ROOM KEY",
    note="\n\nWith --wait: the run's own exit code.",
    cls=_WithVerlWords,
)
@click.argument("config", type=CONFIG)
@click.argument("overrides", type=KEY_VALUE, nargs=-1, metavar="[KEY=VALUE]... [-- VERL_KEY=VALUE...]")
@option(
    "--cluster",
    click.Choice(["auto", "slurm", "local"]),
    "auto: Slurm where its commands are installed, else this machine.",
    default="auto",
)
@flag("--wait", "Follow the run over its requeues and exit with its code.")
@flag("--dry-run", "Check, print the exact batch script; make nothing, and run nothing that CONFIG names.")
@flag("--prepare-only", "Make the run directory, queue nothing: for a script of sbatch/.")
@flag(
    "--sweep",
    "A run for each combination of values in words like seed=0,1,2, all below the run directory of CONFIG.",
)
@option(
    "--at-once",
    Whole(min=1, max=1000),
    "With --sweep: so many of them at the same time; Slurm holds the others back.",
)
@option(
    "--code",
    click.Choice(["run", "new"]),
    "If the program's code has changed since the run was submitted: go on with the run's copy, or take the new.",
)
@flag(
    "--force-resume",
    "Go on although the data has changed, or begin again although the run had a checkpoint; asks first.",
)
@flag("--yes", "Answer yes to the question of --force-resume.")
@click.pass_context
def submit(
    ctx: click.Context,
    config: Path,
    overrides: tuple[str, ...],
    cluster: Literal["auto", "slurm", "local"],
    wait: bool,
    dry_run: bool,
    prepare_only: bool,
    sweep: bool,
    at_once: int | None,
    code: Literal["run", "new"] | None,
    force_resume: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Check CONFIG, and start the run it describes.

    CONFIG is a YAML file, the directory of a run that is to go on, or the name of a shipped example (quickstart).
    KEY=VALUE words change single values, e.g. train.steps=50. Everything is checked before anything is queued: keys
    and types, model and data, write permission, the partition, and Slurm's own answer to the very script.

    Relative paths in CONFIG go by its directory; relative paths in KEY=VALUE words, and run_dir, by where you are.

    A run lives in its run directory. To submit the same configuration again goes on from the newest checkpoint
    that verifies; another configuration in the same directory is refused.

    \b
    verl-slurm submit quickstart
    verl-slurm submit my.yaml name=big slurm.partition=gpu distributed.nodes=4 distributed.dp_size=32
    verl-slurm submit runs/big slurm.time_limit_min=240     # go on, with more time
    verl-slurm submit verl_grpo -- trainer.total_epochs=3   # words for verl itself
    verl-slurm submit my.yaml --sweep --at-once 2 train.actor_lr=1e-6,3e-6 seed=0,1,2   # six runs
    """
    _refuse_combinations(ctx.params)
    verl = ctx.meta[_VERL]
    if sweep:
        return submit_sweep(
            config, overrides, verl, cluster=cluster, at_once=at_once, dry_run=dry_run, as_json=as_json
        )
    from verl_slurm.submit.submission import check_drift, plan_submission

    # In a dry run nothing is recorded, so no question is asked: the changes are shown.
    yes = yes or dry_run
    confirm = partial(_confirm, yes=yes) if force_resume else None
    bar = render.Bar()
    if not force_resume:  # which may ask: a bar would write over the question
        bar.show("checking the configuration, the inputs and Slurm")
    try:
        with telling(render.warning):
            plan = plan_submission(
                config,
                list(overrides),
                verl=verl,
                # A script of sbatch/ is for Slurm, which need not be on the machine that prepares.
                cluster="slurm" if prepare_only else cluster,
                ask_slurm=not prepare_only,
                code=code,
                dry_run=dry_run,
                begin_again=partial(_confirm_beginning, yes=yes) if force_resume else None,
            )
    finally:
        bar.close()
    plan.require_steps_to_do()
    if dry_run:
        check_drift(plan, confirm)
        _print_plan(plan, as_json)
        return ExitCode.OK
    return _carry_out(plan, confirm, prepare_only=prepare_only, wait=wait, as_json=as_json)


def _refuse_combinations(given: dict[str, Any]) -> None:
    if given["at_once"] is not None and not given["sweep"]:
        raise click.UsageError("--at-once is for a --sweep: a run alone is one job.")
    if given["sweep"] and any(given[name] for name in ("wait", "prepare_only", "force_resume", "code")):
        raise click.UsageError("--sweep goes with neither --wait, --prepare-only, --code nor --force-resume.")
    if given["prepare_only"] and (given["wait"] or given["cluster"] == "local"):
        other = "--wait" if given["wait"] else "--cluster local"
        raise click.UsageError(f"--prepare-only queues nothing: it does not go with {other}.")


def _carry_out(
    plan: SubmissionPlan, confirm: "Confirm | None", *, prepare_only: bool, wait: bool, as_json: bool
) -> int:
    from verl_slurm.submit.submission import carry_out

    for note in plan.notes:
        render.warning(note)
    if needs_building(plan.config):
        render.warning("building the built-in model, once; this takes half a minute")
    paths = RunPaths(plan.run_dir)
    # Before the job exists: --wait tells what is written from here on, and not the run's former ends.
    offset = paths.events.stat().st_size if paths.events.exists() else 0
    with telling(render.warning):
        done = carry_out(plan, prepare_only=prepare_only, confirm_drift=confirm)
    # The plan's own notes come first and were shown before anything was made.
    for note in done.notes[len(plan.notes) :]:
        render.warning(note)
    _say(plan, done, as_json=as_json)
    # The answer stands by now, so a script has the job's id even if the waiting is interrupted.
    if wait and done.job_id is not None:
        return tell_until_end(paths, offset, as_json=as_json)
    return ExitCode.OK


def _say(plan: SubmissionPlan, done: "SubmissionResult", *, as_json: bool) -> None:
    is_prepared = done.job_id is None
    sbatch = _sbatch_words(plan) if is_prepared else []
    if as_json:
        facts = msgspec.to_builtins(done) | {"inputs": dict(plan.inputs), "trains": plan.trains}
        render.json_value(facts | ({"sbatch": sbatch} if is_prepared else {}))
        return
    if is_prepared:
        for name, taken in (*plan.inputs, ("trains", plan.trains)):
            # Beside the output, which is the command for the next line of a script.
            render.warning(f"{name}: {taken}")
        render.line(f"prepared {done.run_dir}; submit it with")
        render.line(shlex.join(sbatch))
        return
    where = "on Slurm" if done.cluster == "slurm" else "on this machine"
    kind = "a new run" if done.new_run else "goes on"
    rows: list[tuple[str, object]] = [
        ("job", f"{done.job_id} {where}, {_nodes(plan.config)}, {kind}"),
        ("trains", plan.trains),
        *plan.inputs,
        *(("code", line) for line in plan.code.lines()),
        ("run directory", done.run_dir),
    ]
    for name, verb in (("follow it", "watch"), ("its state", "status"), ("end it", "cancel")):
        rows.append((name, f"verl-slurm {verb} {shell_word(done.run_dir)}"))
    render.fields([*rows, ("changed", ", ".join(done.changed))])


def _print_plan(plan: SubmissionPlan, as_json: bool) -> None:
    ranks = show_rank_environment(plan.config)
    text = render_script(plan) if plan.cluster == "slurm" else local_command(plan) + "\n"
    if as_json:
        names = ("cluster", "new_run", "resumes_from", "trains", "notes")
        facts = {name: getattr(plan, name) for name in names} | {
            "run_dir": str(plan.run_dir),
            "inputs": dict(plan.inputs),
            "code": plan.code.record.trees,
            "checked": _checked(plan),
            "script": text,
            "rank_environment": ranks,
        }
        render.json_value(facts)
        return
    # All but the script goes to standard error, so that standard output is the script byte for byte.
    told = [*plan.notes, "dry run: nothing is made or queued. Checked:"]
    told += [f"  good  {what}" for what in _checked(plan)]
    told += [f"trains  {plan.trains}", _beginning(plan), f"run directory {plan.run_dir}"]
    if ranks:
        told += ["each node, before its ranks start:", *(f"  {part}" for part in ranks.split("\n"))]
    where = "without Slurm; on this machine it is started by"
    told.append(f"{'the batch script' if plan.cluster == 'slurm' else where}:")
    for part in told:
        render.warning(part)
    for part in text.rstrip("\n").split("\n"):
        render.line(part)


def _checked(plan: SubmissionPlan) -> list[str]:
    return [*plan.checked, *(["the data is that of the first start"] if plan.begun else [])]


def _beginning(plan: SubmissionPlan) -> str:
    if plan.new_run:
        return "a new run"
    if not plan.begun:
        return "the run exists and has not begun: it would start from the beginning with this configuration"
    if plan.begins_again:
        return f"the run begins again from step 0, as --force-resume says; it had a checkpoint: {plan.begins_again}"
    wanted = plan.config.checkpoint.resume_from
    if wanted is None:
        return "the run goes on from the beginning, as checkpoint.resume_from=null says"
    if wanted != "auto":
        return f"the run goes on from {wanted}, as checkpoint.resume_from says"
    if plan.resumes_from is None:
        return "the run goes on from step 0; it has no checkpoint yet, and uses what its ledger has"
    if plan.resume_read:
        return f"the run goes on from {plan.resumes_from}, its newest checkpoint that verifies"
    return f"the run goes on from {plan.resumes_from}, its newest checkpoint, if that verifies (not read: too large)"


def _sbatch_words(plan: SubmissionPlan) -> list[str]:
    # By its absolute path, which holds in every directory and for an installed package.
    template = shipped(f"sbatch/{batch_script(plan.config)}")
    return ["sbatch", *sbatch_options(plan.config), template, str(plan.run_dir)]


def _nodes(config: RunConfig) -> str:
    if not config.may_lose_nodes:
        return counted(config.all_nodes, "node")
    return f"{config.least_nodes} to {counted(config.all_nodes, 'node')}"


def _confirm(drift: Drift, *, yes: bool) -> bool:
    for kind, names in asdict(drift).items():
        for name in names:
            render.warning(f"data {kind}: {name}")
    render.warning(
        "of the pass under way rows may come again, or never; results differ from the first start's"
    )
    return yes or _ask("Go on with this data?")


def _confirm_beginning(trace: str, *, yes: bool) -> bool:
    render.warning(f"the run had a checkpoint and has none that can be used: {trace}")
    return yes or _ask("Begin again from step 0? All steps are done again")


def _ask(question: str) -> bool:
    # A script would wait for an answer without end.
    if not os.isatty(0):
        render.warning("no terminal to ask on: repeat with --yes to accept this")
        return False
    return click.confirm(question, err=True)


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
    """Checks all runs, then queues them one after the other; each waits for the end of the one `at_once` before it.

    Runs that live or are done are left alone, and those that live count for `at_once`.
    """
    from verl_slurm.submit.submission import carry_out

    runs = swept_runs(words)
    plans, living = _plans(config, runs, verl, cluster, dry_run=dry_run)
    for note in dict.fromkeys(note for plan in plans for note in plan.notes):
        render.warning(note)
    if dry_run:
        if not as_json:
            render.warning(f"dry run: nothing is made or queued. Checked: {counted(len(plans), 'run')}")
        rows = [{"run_dir": str(plan.run_dir), "name": plan.config.name} for plan in plans]
        render.answer(rows, *(row["run_dir"] for row in rows), as_json=as_json)
        return ExitCode.OK
    told: list[dict[str, object]] = []
    # The newest of each, as a run's own successor waits for its job.
    jobs = [job for run in living for job in queued_jobs(run)[-1:]] if at_once is not None else []
    for plan in plans:
        after = jobs[-at_once] if at_once is not None and len(jobs) >= at_once else ""
        try:
            with telling(render.warning):
                done = carry_out(plan, after=after)
        except (VerlSlurmError, KeyboardInterrupt):
            # Those before the refused, or interrupted, one are queued.
            queued = f"{len(told)} of {counted(len(plans), 'run')} queued"
            if told:
                queued += f": jobs {', '.join(str(row['job_id']) for row in told)}"
            render.warning(f"{queued}; the same line queues the rest")
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
) -> tuple[list[SubmissionPlan], list[RunPaths]]:
    """Returns the runs that have something to do, and those that live."""
    from verl_slurm.submit.submission import plan_submission

    plans: list[SubmissionPlan] = []
    living: list[RunPaths] = []
    trees: TreesRead = {}  # read once, so that all runs have the same code
    for run in runs:
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
        try:
            plan = plan_submission(config, words, verl=verl, cluster=cluster, trees=trees, dry_run=dry_run)
        except Fenced as error:
            if error.others:  # the run could not go on as it is asked to, if it did not live
                raise
            render.warning(f"not queued: {error.one_line()}")
            living.append(RunPaths(above / run.label))
            continue
        if plan.done:
            render.warning(f"{plan.run_dir} is not queued: {plan.done}")
        else:
            plans.append(plan)
        if plan.cluster != "slurm":
            raise ConfigError(
                "a sweep needs Slurm",
                where="--sweep",
                found="this machine alone, which would train all runs at the same time",
                remedy="submit them one by one with --cluster local --wait",
            )
    if not plans and living:
        folder = living[0].root.parent
        raise Fenced(
            "each run of the sweep that is not done has a job already",
            where=folder,
            remedy=f"`verl-slurm watch {shell_word(folder)}` follows them",
        )
    if not plans:
        raise ConfigError("nothing is left to do in any run of the sweep", remedy="raise train.steps")
    return plans, living
