"""Asks Slurm about a job before it is queued: whether it answers, whether a partition can ever run the job, whether a
save is in time, which nodes to stay away from, and what sbatch thinks of the very script (`sbatch --test-only`:
nothing is queued).

The duration of a save is that of this run's own saves; before the first, the size of a checkpoint divided by the
write speed that its storage has just shown. A guest saves at the end of a step, so a whole step counts as well.
"""

import asyncio
import math
import os
import re
import resource
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from verl_slurm.base.errors import ConfigError, NotFound, SlurmMissing, SlurmRefused
from verl_slurm.base.kernel_facts import file_system
from verl_slurm.base.one_line import counted
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.checks import Finding, good, skipped, warn
from verl_slurm.checks.bad_nodes import recall
from verl_slurm.checks.cluster_rules import SaveTime, expected_save, measured_save
from verl_slurm.checks.probe_command import run_to_end
from verl_slurm.checks.storage_probe import PlaceReport, probe_place
from verl_slurm.config.checks.options import OWN_OPTIONS
from verl_slurm.config.schema import BUILTIN, RunConfig, nodes_of_components
from verl_slurm.journal.files import read_history
from verl_slurm.journal.steps import last_steps
from verl_slurm.loops.reach import STEPS_LOOKED_AT, reach
from verl_slurm.slurm.batch import (
    asked_partition,
    obeyed_variables,
    submission_environment,
    unwanted_environment,
)
from verl_slurm.slurm.commands import NODE_LIST
from verl_slurm.slurm.facts import PartitionFacts
from verl_slurm.slurm.requeue_rules import sparable
from verl_slurm.slurm.runner import FULL, ROOM, slurm_words, takes_no_job, waiting_for
from verl_slurm.slurm.slurm_client import SlurmClient
from verl_slurm.submit.checks.run_directory import checkpoint_size
from verl_slurm.submit.relative_paths import value_of
from verl_slurm.submit.submission_plan import Cluster

# slurmctld plans the start of the job for this; on a large, full cluster that takes seconds.
_TIMEOUT_S = 20.0
_KEYS = (
    (r"\bgres\b|generic resource|trackable resource|\bTRES\b", "slurm.gpus_per_node"),
    (r"\baccount\b", "slurm.account"),
    (r"\bqos\b", "slurm.qos"),
    (r"time limit", "slurm.time_limit_min"),
    (r"\bmemory\b", "slurm.mem_mb_per_node"),
    (r"\bfeatures?\b|\bconstraint", "slurm.extra.constraint"),
    (r"\breservation", "slurm.extra.reservation"),
    (r"\blicenses?\b", "slurm.extra.licenses"),
    (r"\bpartition", "slurm.partition"),
    (r"processors|\bCPUs?\b", "slurm.cpus_per_node"),
    (r"node count|\bnodes?\b", "distributed.nodes"),
)
# No node has all of these: sbatch does not say which one is too much.
_OF_A_NODE = ("distributed.nodes", "slurm.cpus_per_node", "slurm.mem_mb_per_node", "slurm.gpus_per_node")
_REMEDIES = {
    "slurm.gpus_per_node": "`sinfo -o '%P %G'` shows the GPUs of each partition; slurm.gpus_per_node=0 asks for none",
    "slurm.extra.nodelist": "`sinfo -N` lists the nodes",
    "slurm.account": "`sacctmgr show assoc user=$USER` lists yours",
    "slurm.qos": "`sacctmgr show assoc user=$USER format=account,qos` lists yours",
    "slurm.time_limit_min": "`sinfo -o '%P %l'` shows the limits",
    "slurm.mem_mb_per_node": "`sinfo -o '%P %m'` shows what the nodes have, in MB",
    "slurm.cpus_per_node": "`sinfo -o '%P %c'` shows what the nodes have",
    "slurm.partition": "`sinfo -s` lists them",
    "distributed.nodes": "`sinfo -o '%P %D %c %m %G'` shows what there is",
}
# Options of `slurm.extra` that Slurm's words about a key may mean.
_IN_EXTRA = {
    "slurm.gpus_per_node": re.compile(r"gres|gpus|.*-per-gpu|gpus-per-.*|tres-.*"),
    "slurm.mem_mb_per_node": re.compile(r"mem|mem-per-.*"),
}
_VERDICT = re.compile(r"\bJob \d+ to start at\b")
# True now, and perhaps not when the job's turn comes: Slurm queues such a job.
_PASSES = re.compile(
    r"DOWN, DRAINED or reserved|nodes are busy|unavailable state|begin time|dependency", re.I
)
_NO_ANSWER = re.compile(
    r"contact slurm|socket timed out|communication|configuration source|fetch config", re.I
)
_VERDICT_OF = "sbatch --test-only"
# Bytes of a checkpoint from which the speed of storage may matter.
_WORTH_TRYING = 1 << 30
# File systems of one machine. Some are exported to others, which a look at this machine cannot tell.
_OF_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_OF_DISKS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay"}
# Slurm's name, the resource, the option of `ulimit`, and what a run needs at least.
_LIMITS = (
    ("CPU", resource.RLIMIT_CPU, "-t", math.inf),
    ("FSIZE", resource.RLIMIT_FSIZE, "-f", math.inf),
    ("AS", resource.RLIMIT_AS, "-v", math.inf),
    ("DATA", resource.RLIMIT_DATA, "-d", math.inf),
    ("NOFILE", resource.RLIMIT_NOFILE, "-n", 1024),
    ("NPROC", resource.RLIMIT_NPROC, "-u", 1024),
)
# GPUs of several nodes exchange by memory that is locked (InfiniBand, RoCE).
_OF_SEVERAL = (("MEMLOCK", resource.RLIMIT_MEMLOCK, "-l", math.inf),)


def choose_cluster(wanted: Literal["auto", "slurm", "local"]) -> tuple[Cluster, str]:
    """Returns the cluster, and a note for the user if it was chosen for them."""
    if wanted != "auto":
        return wanted, ""
    # The absence of the command alone decides. A Slurm that does not answer must not start the run on a login node.
    if shutil.which("sbatch") is None:
        return "local", "no Slurm here (no sbatch in PATH): the run starts on this machine (--cluster local)"
    return "slurm", ""


class SlurmSays(msgspec.Struct, frozen=True):
    """Slurm's answers to the questions before a job is queued."""

    conf: dict[str, str]
    """`scontrol show config`."""
    partition: PartitionFacts | None
    """The partition that the job goes to, or the first of several; None: none is named, and there is no default one,
    and a plug-in of the site may choose."""
    others: tuple[PartitionFacts, ...] = ()
    chooser: str = ""
    """The setting for plug-ins of the site that may choose the partition, if none is named; empty: nothing does."""

    @property
    def partitions(self) -> tuple[PartitionFacts, ...]:
        """Returns all partitions of which Slurm may take one."""
        return () if self.partition is None else (self.partition, *self.others)


def ask_slurm(config: RunConfig) -> SlurmSays:
    """Asks Slurm for its configuration and the partitions that the job may go to.

    Raises:
        ConfigError: `run_dir` has a character that sbatch changes.
        SlurmMissing: no commands, or no answer.
        SlurmRefused: the partition does not exist, or it is another cluster's.
    """
    # Seen on 22.05.8: of all printable characters sbatch's --output changes these alone.
    if found := set("%\\") & set(config.run_dir):
        raise ConfigError(
            "sbatch puts words of its own in place of %u and the like, and takes backslashes out",
            where="run_dir",
            found=config.run_dir,
            expected=f"a path without `{min(found)}`, for Slurm",
            remedy="choose another run_dir",
        )
    # All three: submitit needs sbatch and srun, and the lead starts its agents and requeues by the others.
    for program in ("sbatch", "srun", "scontrol"):
        if shutil.which(program) is None:
            raise SlurmMissing(
                "Slurm's commands are not here",
                where=program,
                remedy="load Slurm's module (e.g. `module load slurm`), or use --cluster local",
            )
    return asyncio.run(_ask(config))


async def _ask(config: RunConfig) -> SlurmSays:
    client = SlurmClient()
    name, chooser = asked_partition(os.environ, config), ""
    try:
        conf = await client.config()
        # Without a name the job goes to the default one, whose limits count then.
        _require_one_cluster(config, conf.get("ClusterName", ""))
        chooser = "" if name else _chooser(conf)
        several = await client.partitions_of(name)
    except SlurmMissing as error:
        raise SlurmMissing(
            "Slurm does not answer",
            found=error.found,
            remedy="see `scontrol ping` and SLURM_CONF; --cluster local runs on this machine",
        ) from None
    except NotFound as error:
        if chooser and name is None:
            return SlurmSays(conf, None, chooser=chooser)
        raise SlurmRefused(
            "no default partition" if name is None else "no such partition",
            where=error.where if name == config.slurm.partition else f"{error.where}, from SBATCH_PARTITION",
            remedy="`sinfo -s` lists them; set slurm.partition to one of them",
        ) from None
    return SlurmSays(conf, several[0], tuple(several[1:]), chooser)


def _chooser(conf: Mapping[str, str]) -> str:
    # Those of sbatch and those of slurmctld: both may change what is asked for.
    names = [
        name for name in ("CliFilterPlugins", "JobSubmitPlugins") if conf.get(name, "(null)") != "(null)"
    ]
    return ", ".join(f"{name}={conf[name]}" for name in names if conf[name])


def judge_partitions(config: RunConfig, says: SlurmSays) -> list[Finding]:
    """Returns those of several partitions that can never run this job, or start none now. SlurmRefused: none can."""
    several = says.partitions
    # What the site chooses, `sbatch --test-only` alone judges.
    site = f"the site's plug-ins may choose one ({says.chooser})"
    if not several:
        return [warn("slurm.partition", f"not set, and there is no default partition: {site}")]
    down = [
        warn("slurm.partition", f"{facts.name} is DOWN: no job starts there until it is UP")
        for facts in several
        if facts.state == "DOWN"
    ]
    complaints = {facts.name: said for facts in several if (said := partition_complaint(config, facts))}
    told = [f"{partition}: {said}" if len(several) > 1 else said for partition, said in complaints.items()]
    if complaints and says.chooser:
        found = f"not set, and the default one, {several[0].name}, cannot run this job ({told[0]}): {site}"
        return [warn("slurm.partition", found), *down]
    if len(complaints) == len(several):
        raise SlurmRefused(
            "the partition cannot run this job" if len(several) == 1 else "no partition can run this job",
            where=", ".join(complaints),
            found="; ".join(told),
            remedy="`scontrol show partition` says its limits; change the slurm section or take another one",
        )
    # Slurm takes such a job, and starts it in one of the others.
    return [*(warn("slurm.partition", f"the job cannot start in partition {said}") for said in told), *down]


def _require_one_cluster(config: RunConfig, here: str) -> None:
    """Refuses a job for another cluster than the one that answers."""
    # Nothing here could see a job of another cluster.
    wanted = {"slurm.extra.clusters": str(config.slurm.extra.get("clusters") or "")}
    obeyed = obeyed_variables(os.environ, config)
    shell = (obeyed.get("clusters"), "SLURM_CLUSTERS")
    wanted |= {name: os.environ.get(name, "") for name in shell if name}
    for where, names in wanted.items():
        if names and here and names != here:
            raise SlurmRefused(
                "the job is for another Slurm cluster than the one that answers here",
                where=where,
                found=names,
                expected=f"{here}, or one cluster that all of Slurm's commands ask",
                remedy=f"remove it; `export SLURM_CLUSTERS={names.partition(',')[0]}` has all of them ask that one",
            )


def partition_complaint(config: RunConfig, facts: PartitionFacts) -> str:
    """Returns why this partition can never run this job; empty: nothing speaks against it. Pure."""
    # Components of a heterogeneous job may go to another partition; sbatch --test-only judges those.
    nodes = nodes_of_components(config.least_nodes, config.services)[0]
    limit_s = config.slurm.time_limit_min * 60
    if not facts.takes_jobs:
        return f"its state is {facts.state}"
    if nodes > facts.total_nodes:
        return f"{counted(facts.total_nodes, 'node')} in it, {nodes} asked for"
    # Of the partition as a whole: which nodes are alike and free is for `sbatch --test-only` to say.
    cpus = nodes * config.slurm.cpus_per_node
    if cpus > facts.total_cpus:
        return f"{counted(facts.total_cpus, 'CPU')} in it, {nodes} x {config.slurm.cpus_per_node} asked for"
    if facts.max_nodes is not None and nodes > facts.max_nodes:
        return f"at most {counted(facts.max_nodes, 'node')} a job, {nodes} asked for"
    if facts.max_time_s is not None and limit_s > facts.max_time_s:
        return f"at most {facts.max_time_s // 60} min a job, {limit_s // 60} asked for"
    return ""


def shell_notes(config: RunConfig, conf: Mapping[str, str], environ: Mapping[str, str]) -> list[Finding]:
    """Returns what comes, or does not come, with the shell that submits. `conf`: `scontrol show config`."""
    obeyed = obeyed_variables(environ, config)
    notes = [warn(f"{option} {environ[name]}, from {name} of this shell") for option, name in obeyed.items()]
    if found := [
        name for name in unwanted_environment(sorted(environ), config) if name.startswith("SBATCH_")
    ]:
        notes.append(
            warn(f"{', '.join(found)}: not handed on to sbatch; the configuration decides (slurm.extra)")
        )
    # Slurm gives a job the soft limits of the shell, unless the site or the option says otherwise.
    said = str(config.slurm.extra.get("propagate", conf.get("PropagateResourceLimits", "ALL"))).upper()
    kept = conf.get("PropagateResourceLimitsExcept", "").upper().split(",") if said == "ALL" else []
    several = config.slurm.gpus_per_node > 0 and config.distributed.nodes > 1
    low = [
        f"{name} {soft} (ulimit {option})"
        for name, kind, option, least in _LIMITS + (_OF_SEVERAL if several else ())
        if (said == "ALL" or name in said.split(",")) and name not in kept and "ALL" not in kept
        if (soft := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY and soft < least
    ]
    if low:
        notes.append(
            warn(
                "limits of this shell come with the job",
                ", ".join(low),
                "raise them before you submit, or set slurm.extra={propagate: NONE}",
            )
        )
    return notes


def place_notes(config: RunConfig, conf: Mapping[str, str]) -> list[Finding]:
    """Returns the paths that the job's nodes may not see as this machine does. `conf`: `scontrol show config`."""
    places = {"run_dir": config.run_dir}
    if not config.trainer.is_guest:
        places |= {"model.path": config.model.path, "data.root": config.data.root}
    # A controller at a loopback address serves this machine alone, and so do its nodes.
    hosts = [value for key, value in conf.items() if key.startswith("SlurmctldHost")]
    alone = any("127.0.0." in host or "localhost" in host for host in hosts)
    notes = []
    for key, text in places.items():
        path = Path(os.path.realpath(text))
        kind = "" if alone or text.startswith(BUILTIN) else file_system(_nearest(path))
        if "tmpfs" in conf.get("JobContainerType", "") and path.is_relative_to("/tmp"):  # noqa: S108
            notes.append(
                warn(key, f"each job has a /tmp of its own here (JobContainerType): it may not see {text}")
            )
        elif kind in _OF_MEMORY:
            lies = f"{text} lies in the memory of this machine ({kind})"
            notes.append(warn(key, f"{lies}: the job's nodes do not see it"))
        elif kind in _OF_DISKS:
            where = f"which is on a disk of this machine ({kind})"
            notes.append(skipped(f"whether the job's nodes see {key} {text}, {where}"))
    return notes


def _nearest(path: Path) -> Path:
    return next((place for place in (path, *path.parents) if place.exists()), Path("/"))


def nodes_to_avoid(config: RunConfig, says: SlurmSays) -> tuple[tuple[str, ...], list[Finding]]:
    """Returns the nodes that sbatch is to exclude, and what the user should know."""
    if not config.health.exclude_h:
        return (), []
    bad = recall(says.conf.get("ClusterName", ""))
    notes = [warn(f"a record of a bad node is passed over: {problem}") for problem in bad.problems]
    if not bad.nodes:
        return (), notes
    if not says.partitions:
        return (), [*notes, warn("no bad node is excluded: the job's partition is not known")]
    extra = config.slurm.extra
    lists = {name: str(extra.get(name) or "") for name in ("exclude", "nodelist", "nodefile")}
    for name, given in lists.items():
        # A file, or sbatch's own short forms.
        if given and (name == "nodefile" or NODE_LIST.fullmatch(given) is None):
            why = f"slurm.extra.{name} is {given}, which is no list of nodes"
            return (), [*notes, warn(f"no bad node is excluded: {why}")]
    variable = obeyed_variables(os.environ, config).get("reservation", "")
    reservation = str(extra.get("reservation") or os.environ.get(variable, ""))

    async def ask() -> tuple[tuple[str, ...], list[str], set[str]]:
        client = SlurmClient()
        partitions = ",".join(facts.name for facts in says.partitions)
        usable = await client.usable_nodes(partitions, reservation)
        excluded, asked = [
            await client.expand(lists[name]) if lists[name] else [] for name in ("exclude", "nodelist")
        ]
        spared = sparable(bad.names, usable, excluded, config.distributed.nodes, asked)
        return spared, asked, {*usable, *asked}

    try:
        spared, asked, possible = asyncio.run(ask())
    # Without Slurm's word on the other nodes none is excluded.
    except (SlurmMissing, NotFound) as error:
        return (), [*notes, warn(f"no bad node is excluded: {error.one_line()}")]
    notes += [warn(f"the job avoids {node.told}") for node in bad.nodes if node.node in spared]
    few = f"the {'reservation' if reservation else 'partition'} has too few other nodes like it"
    notes += [
        warn(f"the job may get {node.told}: {'it asks for this node' if node.node in asked else few}")
        for node in bad.nodes
        if node.node not in spared and node.node in possible
    ]
    return spared, notes


def save_time(
    config: RunConfig,
    paths: RunPaths,
    committed: Sequence[CheckpointInfo],
    probe: Callable[[Path], PlaceReport] = probe_place,
) -> SaveTime | None:
    """Returns the time that a save of this run takes; None: unknown."""
    # What was measured in this run counts before anything that is expected of its storage.
    saving = measured_save(read_history(paths))
    size = checkpoint_size(config, committed)
    # Trying the storage writes 64 MiB: not for a state of which the speed hardly matters.
    if saving is None and size is not None and size[0] >= _WORTH_TRYING:
        report = probe(paths.checkpoints)
        saving = None if report.problem else expected_save(size[0], report.write_bytes_per_s)
    return _behind_a_step(paths, saving) if config.trainer.is_guest else saving


def _behind_a_step(paths: RunPaths, saving: SaveTime | None) -> SaveTime | None:
    """Returns the time of a whole step and a save; None: no step was measured yet."""
    rows = last_steps(paths, STEPS_LOOKED_AT)
    steps_s = [float(row["step_s"]) for row in rows if isinstance(row.get("step_s"), int | float)]
    # Without a measured step there is no time to compare with a deadline; a save alone would look too good.
    if not steps_s:
        return None
    save_s = None if saving is None else saving.seconds
    # As if the warning came at a step's beginning, by the numbers that the session itself will decide by.
    # A warning may come when a step has just begun.
    worst = reach(seconds_left=math.inf, running_s=0.0, steps_s=steps_s, save_s=save_s)
    save = "a save" if saving is None else f"a save of {saving.seconds:.1f} s ({saving.basis})"
    return SaveTime(
        seconds=worst.needed_s or 0.0,
        basis=f"with its margin: the end of a step, which takes up to {max(steps_s):.1f} s, and {save}",
    )


def refused_keys(said: str) -> tuple[str, ...]:
    """Returns the configuration keys that sbatch's words are about; empty: they do not say. Pure."""
    # An option that is named, by Slurm or by the site, says more than Slurm's last sentence.
    # sbatch's refusals are one sentence that names no key.
    if named := _named(said):
        return tuple(filter(None, map(_key_of, named)))
    if "node configuration" in said:
        return _OF_A_NODE
    if "node name" in said:
        return ("slurm.extra.nodelist", "slurm.extra.exclude")
    # The first match, in the table's order: sentences about other things mention partition, CPUs and nodes, too. The
    # last sentence is Slurm's own.
    for sentence in reversed(said.split("; ")):
        if found := [key for pattern, key in _KEYS if re.search(pattern, sentence, re.IGNORECASE)]:
            return (found[0],)
    return ()


def refusal(config: RunConfig, said: str) -> SlurmRefused:
    """Returns the error for a job that sbatch refuses with the words `said`."""
    keys = refused_keys(said)
    # What was not asked for cannot be what is too much.
    asked = [f"{key}={_value(config, key)}" for key in keys if _value(config, key) not in (0, "unset")]
    obeyed = obeyed_variables(os.environ, config)
    asked += [f"{name}={os.environ[name]}" for key in keys if (name := obeyed.get(key.rpartition(".")[2]))]
    if keys and (meant := _IN_EXTRA.get(keys[0])):
        asked += [
            f"slurm.extra.{name}={value}"
            for name, value in config.slurm.extra.items()
            if meant.fullmatch(name)
        ]
    remedy = (
        _REMEDIES.get(keys[0]) if keys else "do as it says in the slurm section; `sinfo` shows what there is"
    )
    named = [f"--{option} is {_key_of(option) or 'written by submit itself'}" for option in _named(said)]
    if named:
        remedy = "; ".join([f"here {', '.join(named)}", *([remedy] if remedy else [])])
    return SlurmRefused(
        "Slurm does not take the job",
        where=", ".join(asked) or None,
        found=said,
        remedy=remedy or f"change {keys[0]}; `sinfo` shows what there is",
    )


def _key_of(option: str) -> str:
    """Returns the key for one of sbatch's options; empty: submit writes it, and no key does."""
    return OWN_OPTIONS.get(option, f"slurm.extra.{option}")


def _named(said: str) -> list[str]:
    return list(dict.fromkeys(re.findall(r"(?<![\w-])--([a-z][a-z-]*[a-z])", said)))


def judge_script(config: RunConfig, script: str) -> list[Finding]:
    """Returns sbatch's verdict on `script`: when it could start, or why that is not known now; and what the site says.

    Raises:
        SlurmRefused: it would be refused.
        SlurmMissing: slurmctld does not answer.
    """
    program = shutil.which("sbatch")
    if program is None:
        raise SlurmMissing("there is no sbatch here", remedy="load Slurm's module, or use --cluster local")
    # The environment of the real submission, whose verdict is asked for, but with messages in English.
    environment = submission_environment(os.environ, config) | {"LC_ALL": "C"}
    with waiting_for("sbatch --test-only", _TIMEOUT_S):
        # On standard input: a dry run writes no file.
        done = run_to_end([program, "--test-only"], _TIMEOUT_S, text=script, env=environment)
    if done.exit_code is None:
        # No refusal: a controller that plans for long may well take the job.
        said = f"no answer within {_TIMEOUT_S:.0f} s: what Slurm thinks of the job is not known"
        return [warn(_VERDICT_OF, said)]
    lines = f"{done.err}\n{done.out}".splitlines()
    said = slurm_words("\n".join(lines)) or f"not a word, exit code {done.exit_code}"
    if done.exit_code == 0:
        # The others are the site's, from its plug-ins.
        verdict = [line for line in lines if _VERDICT.search(line)]
        words = slurm_words("\n".join(line for line in lines if line not in verdict)) if verdict else ""
        started = good(_VERDICT_OF, slurm_words("\n".join(verdict)) or said)
        return [started, *([warn(f"sbatch says: {words}")] if words else [])]
    last = slurm_words(done.err.strip().rpartition("\n")[2])
    # slurmctld's silence says nothing about the job, so it is no refusal.
    if _NO_ANSWER.search(last):
        raise SlurmMissing(
            "Slurm does not answer", where="sbatch --test-only", found=said, remedy="see `scontrol ping`"
        )
    if _PASSES.search(last):
        return [good(_VERDICT_OF, f"would wait: {said}")]
    if takes_no_job(done.err):
        raise SlurmRefused(FULL, found=said, remedy=ROOM)
    # Slurm's verdict goes by the nodes of now; sbatch itself queues a job for those that are drained.
    if "node configuration" in last and (away := asyncio.run(_away(config))):
        return [warn(_VERDICT_OF, f"would wait: {away}; {said}", "`sinfo -R` says why, and since when")]
    raise refusal(config, said)


async def _away(config: RunConfig) -> str:
    """Returns which nodes that the job needs take none now; empty: it is not for lack of nodes, or not known."""
    client, asked, wanted = SlurmClient(), str(config.slurm.extra.get("nodelist") or ""), config.all_nodes
    with suppress(SlurmMissing, NotFound):  # then sbatch's own words are all that is known
        partitions = await client.partitions_of(asked_partition(os.environ, config))
        usable = await client.usable_nodes(",".join(one.name for one in partitions))
        if NODE_LIST.fullmatch(asked) and (
            away := [n for n in await client.expand(asked) if n not in usable]
        ):
            return f"slurm.extra.nodelist names {', '.join(away)}, not usable now"
        if len(usable) < wanted <= (total := sum(one.total_nodes for one in partitions)):
            return f"of {counted(total, 'node')} {len(usable)} can be used now"
    return ""


def _value(config: RunConfig, key: str) -> object:
    extra = key.removeprefix("slurm.extra.")
    value = value_of(config, key) if extra == key else config.slurm.extra.get(extra)
    return "unset" if value is None else value
