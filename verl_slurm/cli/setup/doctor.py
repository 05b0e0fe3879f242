"""`verl-slurm doctor`: finds what in this cluster would cost a run, before it does."""

import asyncio
from functools import partial
from pathlib import Path

import click
import msgspec

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.shipped import shipped
from verl_slurm.checks import Finding, bad, run_checks, worst
from verl_slurm.checks.cluster_rules import kill_wait_s
from verl_slurm.checks.fire_drill import fire_drill
from verl_slurm.cli.command_options import CONFIG, Number, Whole, command, flag, option
from verl_slurm.cli.show import render
from verl_slurm.config.load import load
from verl_slurm.config.schema import RunConfig
from verl_slurm.submit.check_list import CHECKS, Draft
from verl_slurm.submit.checks.slurm_answers import SlurmSays
from verl_slurm.submit.relative_paths import Places, absolute
from verl_slurm.submit.submission_plan import SubmissionPlan


@command("CONFIG PERMISSION UNFIT")
@option("--config", CONFIG, "The run it is for; default: the quick start's values.", "source")
@click.option("--partition", help="Instead of the configuration's slurm.partition.")
@option("--nodes", Whole(1, 10_000), "Instead of its distributed.nodes.")
@flag(
    "--fire-drill",
    "Queue a small job on as many nodes, warn it and end it for real: who gets which signal, are the nodes alike, "
    "do they reach one another, does it run again. Once it has started it takes about 20 s, and then as long as Slurm "
    "holds a requeued job back: 120 s, unless cred_expire in AuthInfo says otherwise.",
    "drill",
)
@click.option(
    "--preempt-by",
    metavar="PARTITION",
    help="With --fire-drill: end the job by a preemption, by a job of this partition that takes the drill's nodes for "
    "a second. What shares them with the drill is preempted, too.",
)
@option("--wait", Number(min=1.0), "Seconds to wait for the drill's job.", "wait_s", default=600.0)
def doctor(
    source: Path | None,
    partition: str | None,
    nodes: int | None,
    drill: bool,
    preempt_by: str | None,
    wait_s: float,
    as_json: bool,
) -> int:
    """Look at this cluster as a run will find it: Slurm's settings, deadlines, storage, keys.

    Each finding comes with its remedy. Nothing is queued without --fire-drill, and nothing stays behind.

    \b
    verl-slurm doctor
    verl-slurm doctor --config my.yaml --fire-drill
    """
    config, places = _config(source, partition, nodes)
    plan = SubmissionPlan(config=config, cluster="slurm", new_run=True)
    draft = Draft(plan=plan, written=config, places=places)
    if drill:
        draft.drill = partial(_drill, config, preempt_by, wait_s)
    results = run_checks(CHECKS, "doctor", draft)
    # Findings among others, not the end: the other answers are wanted, too.
    refused = [bad(check, error.one_line()) for check, error in results.refusals.items()]
    if results.left_out:
        remedy = f"left out, since they go by it: {', '.join(results.left_out)}"
        refused[-1] = msgspec.structs.replace(refused[-1], remedy=remedy)
    findings = results.findings + refused
    verdict = worst(findings)
    if as_json:
        render.json_value({"verdict": verdict, "findings": findings})
    else:
        for one in findings:
            render.finding(one.verdict, one.text, one.remedy)
    return ExitCode.UNFIT if verdict == "bad" else ExitCode.OK


def _config(source: Path | None, partition: str | None, nodes: int | None) -> tuple[RunConfig, Places]:
    overrides = [f"slurm.partition={partition}"] if partition else []
    if nodes is not None:
        overrides.append(f"distributed.nodes={nodes}")
        if source is None:
            # A rank for each node: the quick start's own number may not divide by them.
            overrides.append(f"distributed.dp_size={nodes}")
    source = source or Path(shipped("configs/quickstart.yaml"))
    places = Places(Path.cwd(), source)
    # Absolute as `submit` makes them, so that the same directories are tried.
    return absolute(load(source, overrides), places), places


def _drill(config: RunConfig, preempt_by: str | None, wait_s: float, says: SlurmSays) -> list[Finding]:
    bar, place = render.Bar(tells=True), Path(config.run_dir)
    # The run's directory need not exist yet, and the drill must lie where the nodes can write.
    while not place.is_dir():
        place = place.parent
    kill_s = kill_wait_s(says.conf)
    try:
        return asyncio.run(
            fire_drill(config, place, kill_s, preempt_by=preempt_by, wait_s=wait_s, show=bar.show)
        )
    finally:
        bar.close()
