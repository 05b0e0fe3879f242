"""Finds where a first run could train: the partitions of Slurm if it is here, else this machine."""

import asyncio
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from verl_slurm.base.errors import ConfigError, NotFound, SlurmMissing
from verl_slurm.base.one_line import counted
from verl_slurm.cli.setup.first_config import MOST_NODES, MOST_RANKS, Place
from verl_slurm.cli.show.render import span
from verl_slurm.config.schema import RunConfig
from verl_slurm.doctor.cluster_rules import judge_cluster
from verl_slurm.slurm.client import SlurmClient
from verl_slurm.slurm.facts import PartitionFacts
from verl_slurm.slurm.parse import parse_gpus
from verl_slurm.submit.checks.preflight import partition_complaint

_USUAL_LIMIT_MIN = 240
_USUAL_LEAD_S = 120
_LEAST_LEAD_S = 10
_RANKS_ON_CPUS = 2
_CPUS = 8
_MOST = 12
"""Partitions that are shown, and asked about one by one."""
_TOPICS = ("requeue", "preemption", "time limit")


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """One partition with the GPUs of its nodes."""

    facts: PartitionFacts
    gpus: int
    """Of a node, by the kind that most of its usable nodes have."""
    conf: dict[str, str]
    """`scontrol show config`."""

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def line(self) -> str:
        """Describes it in a line."""
        facts = self.facts
        limit = "without a limit" if facts.max_time_s is None else f"up to {span(facts.max_time_s)}"
        usual = ", the default" if facts.is_default else ""
        gpus = f", {counted(self.gpus, 'GPU')} on each" if self.gpus else ""
        return f"{facts.name}: {counted(facts.total_nodes, 'node')}{gpus}, jobs {limit}{usual}"


def offers(wanted: str | None, warn: Callable[[str], None]) -> list[Offer]:
    """Returns the partitions that take jobs, the default one first; none if there is no Slurm.

    Args:
        wanted: this one alone.
        warn: takes Slurm's error; a configuration can be written without its answer.

    Raises:
        NotFound: no such partition, or it takes no jobs.
    """
    try:
        return asyncio.run(_ask(wanted))
    except SlurmMissing as error:
        # Nothing is wrong with a machine without Slurm, unless a partition was named.
        if wanted is not None or "there is no" not in error.what:
            said = error.found or error.what
            warn(f"written without Slurm's help: {said}; {error.remedy}")
        return []


async def _ask(wanted: str | None) -> list[Offer]:
    client = SlurmClient()
    found = [await client.partition(wanted)] if wanted else await client.partitions()
    conf = await client.config()
    up = [facts for facts in found if facts.state == "UP" and facts.total_nodes]
    if not up:
        raise NotFound("no partition takes jobs", where=wanted, remedy="`sinfo -s` shows their states")
    up.sort(key=lambda facts: not facts.is_default)
    return [Offer(facts=facts, gpus=await _gpus(client, facts.name), conf=conf) for facts in up[:_MOST]]


async def _gpus(client: SlurmClient, partition: str) -> int:
    kinds = [parse_gpus(kind) for kind in (await client.usable_nodes(partition)).values()]
    return max(set(kinds), key=kinds.count, default=0)


def usual_ranks(given: Sequence[Offer], partition: str | None) -> int:
    """Returns the ranks that a node gets: one for each of its GPUs."""
    if given:
        offer = next((one for one in given if one.name == partition), given[0])
        return offer.gpus or min(_RANKS_ON_CPUS, _cpus_of(offer))
    return _gpus_here() or _RANKS_ON_CPUS


def place(text: str, given: Sequence[Offer]) -> Place:
    """Returns the place that `2x8 gpu` describes: nodes, ranks on each, and a partition. Without `given`, this machine.

    Raises:
        ConfigError: another form, or more ranks than a node has GPUs.
        NotFound: no such partition.
    """
    match = re.fullmatch(r"\s*([0-9]{1,5})\s*[x*]\s*([0-9]{1,4})(?:[\s,]+([\w.-]+))?\s*", text, re.ASCII)
    nodes, ranks, name = (int(match[1]), int(match[2]), match[3]) if match else (0, 0, None)
    if not (1 <= nodes <= MOST_NODES and 1 <= ranks <= MOST_RANKS):
        expected = f"e.g. 1x8 or 2x8 gpu, at most {MOST_NODES}x{MOST_RANKS}"
        raise ConfigError("not a place", found=text, expected=expected, remedy="write it so")
    if not given:
        return Place(
            partition=name,
            nodes=nodes,
            ranks_per_node=ranks,
            gpus_per_node=ranks if _gpus_here() else 0,
            cpus_per_node=min(_CPUS, os.cpu_count() or 1),
        )
    offer = next((one for one in given if name in (None, one.name)), None)
    if offer is None:
        listed = ", ".join(one.name for one in given)
        raise NotFound("no such partition", where=name, expected=listed, remedy="choose one of them")
    if offer.gpus and ranks > offer.gpus:
        raise ConfigError("a node has fewer GPUs", found=ranks, expected=f"at most {offer.gpus}")
    cpus, max_s = _cpus_of(offer), offer.facts.max_time_s
    limit_min = _USUAL_LIMIT_MIN if max_s is None else max(min(_USUAL_LIMIT_MIN, max_s // 60), 1)
    return Place(
        partition=offer.name,
        nodes=nodes,
        ranks_per_node=ranks,
        gpus_per_node=ranks if offer.gpus else 0,
        # With GPUs, the share of the node that they are.
        cpus_per_node=max(cpus * ranks // offer.gpus, 1) if offer.gpus else min(_CPUS, cpus),
        time_limit_min=limit_min,
        # Of a short limit a quarter: the job is to train, too.
        signal_lead_s=max(min(_USUAL_LEAD_S, limit_min * 60 // 4), _LEAST_LEAD_S),
    )


def notes(chosen: Place, given: Sequence[Offer], config: RunConfig) -> tuple[str, ...]:
    """Describes the partition, and what a preemption and the time limit there leave for a save.

    Raises:
        ConfigError: the partition can never run this job.
    """
    offer = next((one for one in given if one.name == chosen.partition), None)
    if offer is None:
        return ()
    if complaint := partition_complaint(config, offer.facts):
        remedy = "choose less, or another partition"
        raise ConfigError("the partition cannot run this", where=offer.name, found=complaint, remedy=remedy)
    judged = judge_cluster(offer.conf, offer.facts, config, None)
    return (offer.line, *(f"{one.topic}: {one.found}" for one in judged if one.topic in _TOPICS))


def _cpus_of(offer: Offer) -> int:
    return max(offer.facts.total_cpus // offer.facts.total_nodes, 1)


def _gpus_here() -> int:
    return sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))
