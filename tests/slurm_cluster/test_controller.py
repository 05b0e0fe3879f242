"""slurmctld and munged die under a run, when it needs them and when it does not."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.devcluster.killed_daemons import await_saved_state, fail_daemon, restore_daemon
from tests.harness import ONE_RANK, SMALL, LiveRun
from tests.ledger_stats import ledger_stats
from tests.processes import held
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import preempt

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.long]


def trains_on(run: LiveRun) -> None:
    """Until rank 0 is somewhere else than now; a run that is over meanwhile has trained on, too."""

    def where() -> tuple[object, ...]:
        now = run.status()
        return (now.get("state"), now.get("step"), now.get("phase"), now.get("index"))

    before = where()
    run.wait(lambda: where() != before)


@pytest.mark.scenario("L06", "L12")
def test_a_controller_that_is_away_is_asked_until_it_is_back_and_training_needs_none(
    make_cluster: Callable[..., DevCluster], tmp_path: Path
) -> None:
    cluster = make_cluster(nodes=2, grace_s=600, kill_wait_s=120, cred_expire_s=10)
    run = LiveRun(cluster, tmp_path / "run", *SMALL, *ONE_RANK).submit()
    try:
        run.wait_phase("generate")
        with held(
            run.ranks()[:1]
        ):  # so that neither the run nor the save is done before the controller is gone
            await_saved_state(cluster, int(run.job_id))
            preempt(cluster, int(run.job_id), hold_s=1)
            assert run.wait_event("cause")["cause"] == "preemption", run.story()
            fail_daemon(cluster, "slurmctld")
        run.wait_event("requeue", accepted=False)
        (saved,) = (event for event in run.events("saved") if event["emergency"])
        assert run.events("verified")[-1]["name"] == saved["name"], "the save does not wait for Slurm"
        restore_daemon(cluster, "slurmctld")
        run.wait_event("requeue", accepted=True)
        run.wait_event("ended", exit_code=25)
        seen = len(run.events())
        run.wait_event("restart", resume=saved["name"])

        run.wait_event("training", after=seen)
        with held(run.ranks()[:1]):
            await_saved_state(cluster, int(run.job_id))
            fail_daemon(cluster, "slurmctld")
        for which in ("slurmctld", "munged"):
            if which == "munged":
                fail_daemon(cluster, which)
            trains_on(run)
            restore_daemon(cluster, which)
        run.wait_end()
        assert ledger_stats(run.paths).duplicates == ()
        assert len(run.events("restart")) == 2, run.story()
        assert run.facts().restarts == 1
    finally:
        run.cancel()
