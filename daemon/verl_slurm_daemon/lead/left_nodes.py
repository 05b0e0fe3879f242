"""Tells agents what their nodes are compared with, and remembers nodes that are not fit for all runs of the user."""

import asyncio
import os
from pathlib import Path

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.paths import RunPaths
from verl_slurm.checks.bad_nodes import Recalled, recall, remember
from verl_slurm.config.schema import RunConfig
from verl_slurm.containers.runtimes import inputs
from verl_slurm.journal import events as ev
from verl_slurm.program.programs import Moves
from verl_slurm_daemon.journal import Journal


def places_seen(config: RunConfig, paths: RunPaths) -> tuple[str, ...]:
    """Returns what the ranks need and this node has. What no node has is no fault of one, and is told elsewhere."""
    # An agent that finds its lead has RUN; the nodes' own disks are made ready by the ranks.
    binds = config.slurm.container.binds if config.slurm.container is not None else ()
    # The ranks run the submitted copy of the program: where it lay need not be on a node.
    moved = Moves.of(paths).config(config)
    wanted = sorted({place for place in (*inputs(moved), *binds) if place.startswith("/")})
    return tuple(place for place in wanted if Path(place).exists())


async def write_down(
    config: RunConfig, paths: RunPaths, journal: Journal, node: str, evidence: str, *, passing: bool = False
) -> None:
    """Remembers a node that failed a check, unless that may pass by itself, and says so in the journal."""
    hours = config.health.exclude_h
    kept = f"this run avoids it for {config.daemon.avoid_node_s:g} s (daemon.avoid_node_s)"
    if hours and not passing:
        kept = f"runs of yours avoid it for {hours:g} h"
        try:
            cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
            await asyncio.to_thread(remember, cluster, node, evidence, paths.root, hours)
        # The requeue does not depend on it: this run avoids the node by its own journal.
        except (OSError, ValueError, VerlSlurmError) as error:
            kept = f"other runs of yours are not told: {error}"
    journal.write(ev.Warned("health", f"{node}: {evidence}; {kept}"))


async def recalled(config: RunConfig) -> Recalled:
    """Returns the user's bad nodes of this cluster, unless the configuration keeps none."""
    cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
    return await asyncio.to_thread(recall, cluster) if config.health.exclude_h else Recalled()
