"""Slurm ends a job and does not have it run again: the run goes on all the same."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness import SMALL, LiveRun
from tests.ledger_stats import ledger_stats
from verl_slurm.slurm.devcluster.cluster import DevCluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]


@pytest.fixture
def run(make_cluster: Callable[..., DevCluster], tmp_path: Path) -> Iterator[LiveRun]:
    """On a cluster of its own, because what Slurm is told here is told to all jobs."""
    live = LiveRun(make_cluster(cred_expire_s=10, kill_wait_s=30), tmp_path / "run", *SMALL)
    yield live
    live.cancel()


@pytest.mark.long
@pytest.mark.variant
def test_a_node_that_fails_a_job_which_may_not_be_requeued_is_followed_by_another_job(run: LiveRun) -> None:
    run.submit()
    run.slurm(
        "scontrol", "update", f"JobId={run.job_id}", "Requeue=0"
    )  # as --no-requeue, which the follower has not
    run.wait_phase("update")
    (lost,) = run.other_nodes()[:1]
    run.slurm("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=test")
    cause = run.wait_event("cause")
    assert (cause["cause"], "Reason=NodeDown" in cause["evidence"]) == ("failed", True), run.story()
    ended = run.wait_event("ended", exit_code=25)
    assert "follows this one" in ended["reason"]
    follower = run.wait_event("successor")["job_id"]
    run.wait_event("started", job_id=follower)
    run.job_id = follower
    run.wait_end()
    assert ledger_stats(run.paths).duplicates == ()
