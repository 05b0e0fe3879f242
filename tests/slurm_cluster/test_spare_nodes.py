"""Spare nodes on a real Slurm: a lost node is replaced inside the job, and the run ends with the same bits."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.harness import LiveRun, ends_like
from verl_slurm.devcluster.cluster import DevCluster
from verl_slurm.devcluster.faults import fail_node, restore_node

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.long]


class Nodes:
    """The cluster's nodes, of which a test takes some."""

    def __init__(self, cluster: DevCluster, mend: ExitStack) -> None:
        self._cluster, self._mend = cluster, mend

    def lose(self, node: str | None) -> None:
        """As a power cut would."""
        assert node is not None
        fail_node(self._cluster, node)
        self._mend.callback(restore_node, self._cluster, node, timeout_s=120)


@pytest.fixture
def nodes(cluster: DevCluster) -> Iterator[Nodes]:
    with ExitStack() as mend:
        yield Nodes(cluster, mend)


def _chosen(run: LiveRun) -> dict[str, list[str]]:
    event = run.events("nodes_chosen")[-1]
    return {"train": event["train"], "spare": event.get("spare", [])}


@pytest.mark.parametrize("standby", ["daemon.standby_after_s=0", "daemon.standby_after_s=null"])
def test_a_lost_node_is_replaced_inside_the_job(
    run: LiveRun, twin: LiveRun, nodes: Nodes, standby: str
) -> None:
    run.argv += ["slurm.spare_nodes=1", standby]
    run.submit()
    run.wait_phase("update", step=1)
    first = _chosen(run)
    assert (len(first["train"]), len(first["spare"])) == (2, 1)
    assert run.status()["spare_nodes"] == first["spare"]
    if standby.endswith("0"):
        run.wait(lambda: sum(role.startswith("standby") for role in run.daemons()) == 3)
    lost = first["train"][1]
    nodes.lose(lost)
    run.wait_event("restart", number=2)
    ends_like(run, twin)
    crash = run.events("crash")[-1]
    assert (crash["kind"], crash["node"], crash["replaced"]) == ("node", lost, True)
    assert _chosen(run) == {"train": sorted([first["train"][0], *first["spare"]]), "spare": []}
    assert run.facts().restarts == 0, "no requeue"
    assert len(run.events("restart")) == 2


def test_without_a_spare_node_left_the_job_is_requeued(
    run: LiveRun, twin: LiveRun, cluster: DevCluster, nodes: Nodes
) -> None:
    run.argv += ["slurm.spare_nodes=1"]
    run.submit()
    run.wait_phase("generate")
    first = _chosen(run)
    (spare,) = first["spare"]
    fail_node(cluster, spare)
    run.wait_slurm(lambda facts: facts.num_nodes == 2)
    restore_node(cluster, spare, timeout_s=120)  # for the next attempt: Slurm has taken it from this job
    nodes.lose(first["train"][1])
    run.wait_event("started", requeues=1)
    ends_like(run, twin)


def test_a_lost_first_node_is_requeued_by_the_agents_of_the_others(
    run: LiveRun, twin: LiveRun, nodes: Nodes
) -> None:
    """Slurm 22.05 takes even the node of the batch process from such a job, which would run on to its limit."""
    run.argv += ["slurm.spare_nodes=1"]
    run.submit()
    run.wait_phase("generate")
    nodes.lose(run.facts().batch_host)
    orphaned = run.wait_event("orphaned")
    assert orphaned["accepted"], run.story()
    ends_like(run, twin)
    assert run.facts().restarts == 1
