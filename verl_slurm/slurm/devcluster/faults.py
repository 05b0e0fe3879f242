"""Causes faults for jobs on the embedded cluster: preemption, the loss of a node.

The preemption is Slurm's own, by a job of higher priority that needs the same nodes. The node loss is a SIGKILL of
everything on it at once, which looks like a power cut from outside.
"""

import asyncio
import time
from typing import Literal

import msgspec

from verl_slurm.base.errors import NotFound, SlurmRefused
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.cluster_processes import end_all, list_members
from verl_slurm.slurm.devcluster.conf import PREEMPTIBLE, URGENT, node_names
from verl_slurm.slurm.devcluster.state import ClusterState, locked, read_state
from verl_slurm.slurm.facts import JobFacts
from verl_slurm.slurm.slurm_client import SlurmClient

_POLL_S = 0.05


class Preemption(msgspec.Struct, frozen=True, kw_only=True):
    """A preemption under way."""

    job_id: int
    urgent_job_id: int
    seen: Literal["preempt_time", "requeued", "suspended"]
    """Slurm's first visible sign. `requeued`: the job has left already (no grace time, or by itself)."""
    deadline: str | None
    """End of the grace time, UTC, ISO 8601; None: it is over, or there is none."""
    seconds: float
    """From the submission of the urgent job to that sign."""


class NodeFailure(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    killed: list[int]
    """The killed processes: slurmd, its slurmstepds, the job's."""


def _state(cluster: DevCluster) -> ClusterState:
    state = read_state(cluster.directory) if cluster.directory.is_dir() else None
    if state is None or not cluster.daemons().can_answer:
        remedy = "verl-slurm devcluster start (with the same --dir)"
        raise NotFound("no embedded cluster is running", where=cluster.directory, remedy=remedy)
    return state


def preempt(cluster: DevCluster, job_id: int, *, hold_s: int = 3, timeout_s: float = 60.0) -> Preemption:
    """Has Slurm preempt a running job of the partition `preemptible`, and returns as soon as Slurm shows it.

    Args:
        hold_s: how long the urgent job keeps the nodes once it has them; it ends by itself.
        timeout_s: the longest wait for Slurm's sign.

    Raises:
        NotFound: no cluster, no such job.
        SlurmRefused: the job is not running, not preemptible, or was not preempted in time.
    """
    _state(cluster)
    return asyncio.run(_preempt(cluster, job_id, hold_s, timeout_s))


async def _preempt(cluster: DevCluster, job_id: int, hold_s: int, timeout_s: float) -> Preemption:
    client = SlurmClient(cluster.client_env())
    before = await client.job(job_id)
    _check_preemptible(before)
    began = time.monotonic()
    urgent = await _submit_urgent(client, before, hold_s)
    while time.monotonic() - began < timeout_s:
        facts = await client.job(job_id)
        seen: Literal["preempt_time", "requeued", "suspended"] | None = None
        # First: Slurm clears PreemptTime when it requeues the job.
        if facts.restarts > before.restarts:
            seen = "requeued"
        elif facts.preempt_time is not None:
            seen = "preempt_time"
        elif facts.state == "SUSPENDED":
            seen = "suspended"
        if seen is not None:
            # From the moment of the decision EndTime is the end of the grace time.
            end = facts.end_time if seen == "preempt_time" else None
            return Preemption(
                job_id=job_id,
                urgent_job_id=urgent,
                seen=seen,
                deadline=None if end is None else end.isoformat(),
                seconds=round(time.monotonic() - began, 3),
            )
        if facts.is_over:
            # Else the urgent job would keep the nodes, or preempt another job later.
            await client.run(["scancel", str(urgent)])
            what, remedy = "the job ended before it was preempted", "choose a job that runs for longer"
            raise SlurmRefused(what, where=job_id, found=facts.state, remedy=remedy)
        await asyncio.sleep(_POLL_S)
    await client.run(["scancel", str(urgent)])
    found, remedy = f"nothing within {timeout_s:g} s", f"look at {cluster.directory}/log/slurmctld.log"
    raise SlurmRefused("Slurm did not preempt the job", where=job_id, found=found, remedy=remedy)


def _check_preemptible(facts: JobFacts) -> None:
    if not facts.is_running or facts.node_list is None:
        raise SlurmRefused(
            "only a running job can be preempted",
            where=facts.job_id,
            found=facts.state,
            expected="RUNNING",
            remedy="wait until squeue shows it as R",
        )
    if facts.partition != PREEMPTIBLE:
        raise SlurmRefused(
            "the job's partition is not preemptible",
            where=facts.job_id,
            found=facts.partition,
            expected=PREEMPTIBLE,
            remedy=f"submit it with slurm.partition={PREEMPTIBLE}",
        )


async def _submit_urgent(client: SlurmClient, facts: JobFacts, hold_s: int) -> int:
    assert facts.node_list is not None
    words = [
        f"--partition={URGENT}",
        # Its very nodes: on others it would preempt another job, or none.
        f"--nodelist={facts.node_list}",
        f"--nodes={facts.num_nodes}",
        # Whole nodes: with room for both, nothing is preempted.
        "--exclusive",
        "--job-name=urgent",
        "--no-requeue",
        "--output=/dev/null",
        "--chdir=/",
        f"--wrap=exec sleep {int(hold_s)}",
    ]
    remedy = "sinfo -p urgent shows whether the nodes are up"
    return await client.submit(words, "the urgent job", remedy=remedy)


def _known_node(state: ClusterState, node: str) -> None:
    names = node_names(state.options.nodes)
    if node not in names:
        expected, remedy = f"one of {', '.join(names)}", "verl-slurm devcluster status"
        raise NotFound("the cluster has no such node", where=node, expected=expected, remedy=remedy)


def fail_node(cluster: DevCluster, node: str) -> NodeFailure:
    """Sends SIGKILL to everything on a node at once. Slurm notices after `slurmd_timeout_s`. NotFound: no such node."""
    _known_node(_state(cluster), node)
    with locked(cluster.directory):
        killed: dict[int, None] = {}
        # first slurmd, so that it starts nothing more
        slurmd = [process for name, process in cluster.daemons().slurmd.items() if name == node]
        end_all(slurmd, wait_s=1.0)
        killed.update((process.pid, None) for process in slurmd)
        # a process that was just being forked shows in the next look
        for _ in range(20):
            members = list_members(cluster.directory, cluster.slurm_conf, node)
            if not members:
                break
            killed.update((process.pid, None) for process in members)
            end_all(members)
    return NodeFailure(node=node, killed=list(killed))


def restore_node(cluster: DevCluster, node: str, *, timeout_s: float = 30.0) -> str:
    """Starts a failed node again, waits until Slurm uses it, and returns its state then, e.g. `idle`.

    Raises:
        NotFound: no cluster, no such node.
        SlurmRefused: it did not come back in time.
    """
    _known_node(_state(cluster), node)
    with locked(cluster.directory):
        if node not in cluster.daemons().slurmd:
            cluster.start_slurmd(node)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        now = cluster.node_states().get(node, "unknown")
        # sinfo's short words for nodes that Slurm uses.
        if now in {"idle", "mix", "alloc", "comp"}:
            return now
        time.sleep(_POLL_S)
    now, remedy = cluster.node_states().get(node, "unknown"), f"look at {cluster.directory}/log"
    raise SlurmRefused("the node did not come back", where=node, found=now, remedy=remedy)
