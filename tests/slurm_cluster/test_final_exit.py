"""What becomes of a job whose run is done, and when a requeued one starts again, on a real Slurm."""

import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests.harness import ONE_RANK, SMALL, LiveRun
from verl_slurm.slurm.devcluster.cluster import DevCluster

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("ranks_without_torch")]
_SHORT = ("train.steps=2", "train.batch_size_per_device=64", "daemon.requeue_delay_s=2")


@pytest.fixture
def run(make_cluster: Callable[..., DevCluster], tmp_path: Path) -> Iterator[LiveRun]:
    """On a cluster with Slurm's own delay of two minutes, which would show."""
    live = LiveRun(make_cluster(kill_wait_s=30), tmp_path / "run", *SMALL, *ONE_RANK, *_SHORT)
    yield live
    live.cancel()


def _seconds(earlier: object, later: object) -> float:
    return (datetime.fromisoformat(str(later)) - datetime.fromisoformat(str(earlier))).total_seconds()


@pytest.mark.scenario("USE01", "FLT-O1")
def test_a_requeued_run_starts_after_its_delay_and_a_done_one_starts_no_ranks(run: LiveRun) -> None:
    """A hand's `scontrol requeue` while the ranks load; then the done job is made to start once more."""
    run.submit()
    run.wait_event("restart")
    run.slurm("scontrol", "requeue", run.job_id)
    ended = run.wait_event("ended", exit_code=25, timeout_s=300)
    again = run.wait_event("started", requeues=1, timeout_s=300)
    waited = _seconds(ended["time"], again["time"])
    assert waited < 60, f"{waited} s: Slurm's own delay is 120"
    run.wait_end(timeout_s=600)
    facts = run.wait_slurm(lambda job: job.state == "COMPLETED")
    assert not facts.requeue
    starts = len(run.events("restart"))
    before = run.facts().restarts
    run.slurm("scontrol", "requeue", run.job_id, check=False)  # as Slurm itself would
    assert run.facts().restarts == before
    lead = f"exec {sys.executable} -P -m verl_slurm_daemon lead --run {run.paths.root}"
    run.job_id = run.slurm("sbatch", "--parsable", "-N1", "-o/dev/null", f"--wrap={lead}").strip()
    done = run.wait_event("done", timeout_s=300)
    assert done["name"] == "step_000002"
    run.wait_slurm(lambda job: job.state == "COMPLETED" and not job.requeue)
    assert len(run.events("restart")) == starts
    assert run.events("ended")[-1]["exit_code"] == 0
