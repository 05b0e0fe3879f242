"""Spare nodes on a real Slurm: a lost node is replaced inside the job, and the run ends with the same bits."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from tests.harness import LiveRun, ends_like
from tests.ledger_stats import ledger_stats
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import fail_node, restore_node
from verl_slurm.slurm.facts import JobFacts

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.long]


class Nodes:
    """The cluster's nodes, of which a test takes some."""

    def __init__(self, cluster: DevCluster, after: ExitStack) -> None:
        self._cluster, self._after = cluster, after

    def lose(self, node: str | None) -> None:
        """As a power cut would."""
        assert node is not None
        fail_node(self._cluster, node)
        self._after.callback(restore_node, self._cluster, node, timeout_s=120)


@pytest.fixture
def nodes(cluster: DevCluster) -> Iterator[Nodes]:
    with ExitStack() as after:
        yield Nodes(cluster, after)


def _chosen(run: LiveRun) -> dict[str, list[str]]:
    event = run.events("nodes_chosen")[-1]
    return {"train": event["train"], "spare": event.get("spare", [])}


def _has(number: int, facts: JobFacts) -> bool:
    return facts.num_nodes == number


def _lose(run: LiveRun, nodes: Nodes, node: str) -> None:
    before = len(run.events("training"))
    nodes.lose(node)
    run.wait(lambda: len(run.events("training")) > before)
    crash = run.events("crash")[-1]
    assert (crash["kind"], crash["node"], crash["replaced"]) == ("node", node, True)


def test_half_of_the_nodes_are_lost_one_by_one_and_replaced_inside_the_job(
    run: LiveRun, nodes: Nodes
) -> None:
    """The second one after Slurm has taken the first from the job, and with ranks that stand by."""
    run.argv += ["slurm.spare_nodes=2", "daemon.standby_after_s=0", "train.steps=40"]
    run.submit()
    run.wait_phase("update", step=1)
    first, *others = _chosen(run)["train"] + _chosen(run)["spare"]
    assert run.status()["spare_nodes"] == others[1:]
    for lost, held in zip(others[:2], (4, 3), strict=True):
        run.wait(partial(run.stands_by, held))
        _lose(run, nodes, lost)
        run.wait_slurm(partial(_has, held - 1))
    assert _chosen(run) == {"train": [first, others[2]], "spare": []}
    assert [event.get("standby", False) for event in run.events("restart")] == [False, True, True]
    before = len(run.events())
    run.slurm("scancel", "-b", "-s", "USR1", run.job_id)
    run.wait_event("saved", after=before)
    assert run.facts().restarts == 0, "no requeue"


@pytest.mark.soak  # minutes, until Slurm notices
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


@pytest.mark.variant
def test_a_run_goes_on_smaller_in_the_same_job_and_larger_in_the_next(
    run: LiveRun, cluster: DevCluster, nodes: Nodes
) -> None:
    """Two nodes, then one, then two again: the prompts are those of an undisturbed run, and none is sampled twice."""
    # Without an end of its own: a node that is slow to come back would find the run done.
    run.argv += ["distributed.min_nodes=1", "daemon.standby_after_s=1", "train.steps=1000"]
    run.submit()
    run.wait_phase("generate", step=1)
    first, second = _chosen(run)["train"]
    run.wait(partial(run.stands_by, 2))
    before = len(run.events("training"))
    fail_node(cluster, second)
    run.wait(lambda: len(run.events("training")) > before)
    assert _chosen(run) == {"train": [first], "spare": []}
    assert run.facts().restarts == 0, "no requeue"
    restore_node(cluster, second, timeout_s=120)
    alone = run.status()["step"]
    run.wait(lambda: run.status()["step"] > alone)
    run.slurm("scontrol", "requeue", run.job_id)
    run.wait_event("started", requeues=1)
    run.wait(lambda: len(run.events("training")) > before + 1)
    assert len(_chosen(run)["train"]) == 2, run.story()
    together = run.status()["step"]
    run.wait(lambda: run.status()["step"] > together)
    run.slurm("scancel", run.job_id)
    run.wait_end(ExitCode.CANCELLED)
    stats = ledger_stats(run.paths)
    assert (stats.duplicates, stats.problems) == ((), ())


@pytest.mark.soak  # minutes, until Slurm notices
def test_the_loss_of_the_last_node_of_a_smaller_run_is_a_requeue(run: LiveRun, nodes: Nodes) -> None:
    """With --no-kill Slurm would end a job of two nodes there: no agent runs on the other one."""
    run.argv += ["distributed.min_nodes=1", "train.steps=1000", "daemon.standby_after_s=null"]
    run.submit()
    run.wait_phase("generate", step=1)
    first, second = _chosen(run)["train"]
    before = len(run.events("training"))
    nodes.lose(second)
    run.wait(lambda: len(run.events("training")) > before)
    assert run.facts().node_list == first, "the lost node is given back at once"
    nodes.lose(first)
    run.wait_event("started", requeues=1)
    run.wait(lambda: len(run.events("training")) > before + 1)


@pytest.mark.soak  # the lead looks for idle nodes every two minutes
def test_a_run_that_found_one_node_is_requeued_onto_two_when_they_are_idle(run: LiveRun) -> None:
    others = run.slurm(
        "sbatch", "--parsable", "--partition=preemptible", "--nodes=3", "--exclusive", "--wrap=sleep 600"
    ).strip()
    held = LiveRun(run.cluster, run.paths.root)
    held.job_id = others
    try:
        held.wait_slurm(lambda facts: facts.is_running)
        run.argv += ["distributed.min_nodes=1", "train.steps=1000", "daemon.standby_after_s=null"]
        run.submit()
        run.wait_event("training")
        assert len(_chosen(run)["train"]) == 1
    finally:
        run.slurm("scancel", others)
    cause = run.wait_event("cause", cause="growth")
    assert "from 1 to 2" in cause["evidence"]
    run.wait_event("started", requeues=1)
    run.wait_event("training", after=len(run.events()) - 1)
    assert len(_chosen(run)["train"]) == 2
    assert not run.events("degraded")
