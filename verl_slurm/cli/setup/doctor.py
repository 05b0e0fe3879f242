"""`verl-slurm doctor`: finds what in this cluster would cost a run, before it does."""

import asyncio
from pathlib import Path

import click

from verl_slurm.base.errors import NotFound, SlurmMissing, SlurmRefused, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.keys import load_keys
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.shipped import shipped
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checks import Finding, bad, good, warn, worst
from verl_slurm.checks.bad_nodes import folder, recall
from verl_slurm.checks.cluster_rules import judge_cluster
from verl_slurm.checks.storage_probe import judge_place, probe_place
from verl_slurm.cli.command_options import CONFIG, Number, Whole, command, flag, option
from verl_slurm.cli.show import render
from verl_slurm.config.load import load
from verl_slurm.config.schema import RunConfig
from verl_slurm.slurm.slurm_client import SlurmClient
from verl_slurm.submit.checks.model_and_reward import absolute
from verl_slurm.submit.checks.preflight import partition_complaint
from verl_slurm.submit.relative_paths import Places


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
    config = _config(source, partition, nodes)
    findings = _look(config)
    try:
        findings += asyncio.run(_ask_slurm(config, drill, preempt_by, wait_s))
    # The findings about storage and keys are wanted, too, and may be what is asked for.
    except (NotFound, SlurmMissing, SlurmRefused) as error:
        findings.append(bad("Slurm", error.one_line(), "the checks that ask Slurm were left out"))
    verdict = worst(findings)
    if as_json:
        render.json_value({"verdict": verdict, "findings": findings})
    else:
        for one in findings:
            render.finding(one.verdict, f"{one.topic}: {one.found}", one.remedy)
    return ExitCode.UNFIT if verdict == "bad" else ExitCode.OK


def _config(source: Path | None, partition: str | None, nodes: int | None) -> RunConfig:
    overrides = [f"slurm.partition={partition}"] if partition else []
    if nodes is not None:
        overrides.append(f"distributed.nodes={nodes}")
        if source is None:
            # A rank for each node: the quick start's own number may not divide by them.
            overrides.append(f"distributed.dp_size={nodes}")
    source = source or Path(shipped("configs/quickstart.yaml"))
    # Absolute as `submit` makes them, so that the same directories are tried.
    return absolute(load(source, overrides), Places(Path.cwd(), source))


def _look(config: RunConfig) -> list[Finding]:
    # Tried, not read from tables of file systems: writes, renames, locks and modes on the very place.
    findings = judge_place("run_dir", probe_place(Path(config.run_dir)), must_outlive_node=True)
    for tier in config.tiers:
        # A bucket is no place of a file system; `verl-slurm tiers` asks it.
        if tier.path is not None:
            findings += judge_place(f"tier {tier.name}", probe_place(Path(tier.path)), must_outlive_node=True)
    if config.checkpoint.encryption is not None:
        try:
            load_keys(config.checkpoint.encryption)
            findings.append(good("key", "there, and closed to others"))
        # A finding among others, not the end: the other answers are wanted, too.
        except VerlSlurmError as error:
            findings.append(bad("key", error.one_line(), "see verl-slurm init --help"))
    return findings


async def _ask_slurm(config: RunConfig, drill: bool, preempt_by: str | None, wait_s: float) -> list[Finding]:
    from verl_slurm.submit.checks.deadlines import save_time

    client = SlurmClient()
    conf = await client.config()
    name = config.slurm.partition
    facts, *others = await client.partitions_of(name)
    paths = RunPaths(config.run_dir)
    committed = [info for info in list_checkpoints(paths) if info.kind == "committed"]
    # The duration of a save is the one that `submit` judges deadlines by.
    save = save_time(config, paths, committed)
    findings = judge_cluster(conf, facts, config, save, others)
    bad_nodes = recall(conf.get("ClusterName", ""))
    place = folder(conf.get("ClusterName", ""))
    findings += [
        warn("bad node", node.told, f"your runs avoid it; rm {shell_word(place / node.node)}.json ends that")
        for node in bad_nodes.nodes
    ]
    findings += [warn("bad node", problem, "this record is passed over") for problem in bad_nodes.problems]
    # Before the drill, since such a partition can never run its job.
    if complaint := partition_complaint(config, facts):
        return [
            *findings,
            bad("partition", f"{facts.name}: {complaint}", "another one, or other slurm settings"),
        ]
    if drill:
        from verl_slurm.checks.cluster_rules import kill_wait_s
        from verl_slurm.checks.fire_drill import fire_drill

        bar = render.Bar(tells=True)
        try:
            findings += await fire_drill(
                config,
                # The run's directory need not exist yet, and the drill must lie where the nodes can write.
                _existing(Path(config.run_dir)),
                kill_wait_s(conf),
                preempt_by=preempt_by,
                wait_s=wait_s,
                show=bar.show,
            )
        finally:
            bar.close()
    return findings


def _existing(place: Path) -> Path:
    while not place.is_dir():
        place = place.parent
    return place
