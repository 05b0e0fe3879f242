"""What else a preemption can be: PreemptMode CANCEL and SUSPEND, no grace time, a warning that only the steps hear."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness import ONE_RANK, SMALL, LiveRun, ends_like
from tests.ledger_stats import ledger_stats
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import preempt

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.long]


def preempted(run: LiveRun, cluster: DevCluster) -> str:
    """Preempt it in mid-phase, see it saved and requeued by itself; Slurm's evidence."""
    run.wait_phase("generate")
    seen = len(run.events())
    preempt(cluster, int(run.job_id), hold_s=1)
    cause = run.wait_event("cause", after=seen)
    assert cause["cause"] == "preemption", run.story()
    saved = run.wait_event("saved", after=seen, emergency=True)
    run.wait_event("verified", after=seen, name=saved["name"])
    # Nobody else would have: Slurm cancels.
    asked = run.wait_event("requeue", after=seen, accepted=True)
    assert asked["detail"].startswith("requeued: "), run.story()
    run.wait_event("ended", after=seen, exit_code=25)
    run.wait_event("restart", after=seen, resume=saved["name"])
    run.wait_event("training", after=len(run.events()) - 1)
    return str(cause["evidence"])


@pytest.mark.scenario("L01", "L02")
def test_a_preemption_that_cancels_the_job_is_outlived_with_a_grace_time_and_without(
    make_cluster: Callable[..., DevCluster], tmp_path: Path
) -> None:
    """Without `send_user_signal` Slurm tells the steps alone; without a grace time it tells all, and KillWait runs."""
    cluster = make_cluster(
        nodes=2,
        preempt_mode="CANCEL",
        send_user_signal=False,
        grace_s=300,
        kill_wait_s=120,
        cred_expire_s=10,
    )
    run = LiveRun(cluster, tmp_path / "run", *SMALL, *ONE_RANK).submit()
    try:
        said = preempted(run, cluster)
        # An agent heard it, and told the lead: Slurm sends CONT and TERM, in any order.
        assert said.startswith(("SIGTERM to node ", "SIGCONT to node ")), said
        assert "JobState=RUNNING" in said or "JobState=SIGNALING" in said
        run.slurm("scontrol", "update", "partitionname=preemptible", "gracetime=0")
        said = preempted(run, cluster)
        assert "JobState=COMPLETING" in said
        assert run.facts().restarts == 2
        run.wait_end()
        assert ledger_stats(run.paths).duplicates == ()
    finally:
        run.cancel()


@pytest.fixture
def no_grace(cluster: DevCluster) -> Iterator[None]:
    """The shared cluster, for one test without a grace time."""
    run = LiveRun(cluster, Path("/"))
    run.slurm("scontrol", "update", "partitionname=preemptible", "gracetime=0")
    yield
    run.slurm("scontrol", "update", "partitionname=preemptible", "gracetime=30")


@pytest.mark.soak  # much like the test before it
@pytest.mark.scenario("L02")
def test_where_a_preemption_leaves_no_time_for_a_save_the_ledger_brings_the_rollouts_back(
    no_grace: None, cluster: DevCluster, twin: LiveRun, tmp_path: Path
) -> None:
    run = LiveRun(cluster, tmp_path / "run", *SMALL, "daemon.save_margin_s=119").submit()
    try:
        run.wait_phase("update", step=1)
        preempt(cluster, int(run.job_id), hold_s=1)
        run.wait_event("degraded")
        run.wait_event("ended", exit_code=25)
        assert not any(event["emergency"] for event in run.events("saved")), run.story()
        ends_like(run, twin)
        assert run.facts().restarts == 1
    finally:
        run.cancel()


@pytest.mark.soak
def test_a_preemption_that_suspends_the_job_costs_it_nothing_but_time(
    make_cluster: Callable[..., DevCluster], twin: LiveRun, tmp_path: Path
) -> None:
    cluster = make_cluster(nodes=2, preempt_mode="SUSPEND")
    run = LiveRun(cluster, tmp_path / "run", *SMALL).submit()
    try:
        run.wait_phase("update")
        assert preempt(cluster, int(run.job_id), hold_s=3).seen == "suspended"
        ends_like(run, twin)
        for event in ("cause", "crash", "hang", "link"):
            assert not run.events(event), run.story()
        assert len(run.events("restart")) == 1
        assert run.facts().restarts == 0
    finally:
        run.cancel()
