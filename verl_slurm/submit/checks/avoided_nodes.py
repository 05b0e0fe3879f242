"""Finds the nodes that the user's runs left lately, for a job to stay away from."""

import asyncio

from verl_slurm.base.errors import NotFound, SlurmMissing
from verl_slurm.config.schema import RunConfig
from verl_slurm.health.bad_nodes import recall
from verl_slurm.slurm.commands import NODE_LIST
from verl_slurm.slurm.requeue_rules import sparable
from verl_slurm.slurm.slurm_client import SlurmClient
from verl_slurm.submit.checks.preflight import SlurmSays


def nodes_to_avoid(config: RunConfig, says: SlurmSays) -> tuple[tuple[str, ...], list[str]]:
    """Returns the nodes that sbatch is to exclude, and notes for the user. Where Slurm does not say which other nodes
    there are, none."""
    if not config.health.exclude_h:
        return (), []
    bad = recall(says.conf.get("ClusterName", ""))
    notes = [f"a record of a bad node is passed over: {problem}" for problem in bad.problems]
    if not bad.nodes:
        return (), notes
    own = str(config.slurm.extra.get("exclude") or "")
    if own and NODE_LIST.fullmatch(own) is None:  # a file, or sbatch's own short forms
        return (), [
            *notes,
            f"no bad node is excluded: slurm.extra.exclude is {own}, which is no list of nodes",
        ]

    async def ask() -> tuple[str, ...]:
        client = SlurmClient()
        usable = await client.usable_nodes(",".join(facts.name for facts in says.partitions))
        excluded = await client.expand(own) if own else ()
        return sparable(bad.names, usable, excluded, config.distributed.nodes)

    try:
        spared = asyncio.run(ask())
    except (SlurmMissing, NotFound) as error:
        return (), [*notes, f"no bad node is excluded: {error.one_line()}"]
    notes += [f"the job avoids {node.told}" for node in bad.nodes if node.node in spared]
    notes += [
        f"the job may get {node.told}: the partition has too few other nodes like it"
        for node in bad.nodes
        if node.node not in spared
    ]
    return spared, notes
