"""A job that was preempted, and whose run then comes to its end: Slurm does not run it once more.

From 24.05 to 25.11 slurmctld keeps the mark of a preemption over the requeue, and takes the job's own end for that
preemption's: it requeues a job that exits with 0.
"""

from collections.abc import Callable

import pytest

from tests.harness import SMALL, LiveRun, ends_like
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import preempt
from verl_slurm.slurm.facts import JobFacts

pytestmark = [pytest.mark.slurm, pytest.mark.torch]


def _preempted_once(run: LiveRun, cluster: DevCluster) -> None:
    """Until its second life trains."""
    run.submit()
    run.wait_phase("generate")
    preempt(cluster, int(run.job_id), hold_s=1)
    run.wait_event("ended", exit_code=25)
    seen = len(run.events())
    run.wait_event("training", after=seen)


def _is_over_for_good(run: LiveRun, cluster: DevCluster) -> JobFacts:
    """A requeue of its end shows as PENDING as soon as the job has completed."""
    facts = run.wait_slurm(lambda facts: facts.state not in ("RUNNING", "COMPLETING"))
    assert facts.is_over, run.story()
    assert run.slurm("squeue", "-h", "-j", run.job_id, check=False).strip() == ""
    log = (cluster.directory / "log" / "slurmctld.log").read_text()
    assert f"_job_complete: requeue JobId={run.job_id} " not in log
    return facts


@pytest.mark.long
@pytest.mark.scenario("USE01")
@pytest.mark.variant
def test_a_finished_run_that_was_preempted_once_stays_finished(
    run: LiveRun, twin: LiveRun, cluster: DevCluster
) -> None:
    _preempted_once(run, cluster)
    ends_like(run, twin)
    assert _is_over_for_good(run, cluster).restarts == 1
    run.cli("watch", str(run.paths.root))  # what a dependent job asks: Slurm may have it as PREEMPTED


@pytest.mark.soak
@pytest.mark.scenario("USE01")
def test_a_cancelled_run_that_was_preempted_once_stays_cancelled(run: LiveRun, cluster: DevCluster) -> None:
    _preempted_once(run, cluster)
    run.slurm("scancel", run.job_id)
    run.wait_end(exit_code=23)
    assert _is_over_for_good(run, cluster).state == "CANCELLED"


@pytest.mark.soak
@pytest.mark.scenario("L01")
def test_a_preempted_job_that_may_not_be_requeued_is_followed_by_another(
    make_cluster: Callable[..., DevCluster], twin: LiveRun, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cluster = make_cluster(nodes=4, cred_expire_s=10)
    run = LiveRun(cluster, tmp_path_factory.mktemp("followed") / "run", *SMALL).submit()
    try:
        run.slurm("scontrol", "update", f"JobId={run.job_id}", "Requeue=0")
        run.wait_phase("generate")
        preempt(cluster, int(run.job_id), hold_s=1)
        run.wait_event("ended", exit_code=25)
        run.job_id = run.wait_event("successor")["job_id"]
        run.wait_event("started", job_id=run.job_id)
        ends_like(run, twin)
        assert _is_over_for_good(run, cluster).state == "COMPLETED"
    finally:
        run.cancel()
