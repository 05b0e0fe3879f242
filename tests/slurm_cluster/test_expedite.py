"""`--requeue=expedite` on a Slurm that offers it (25.11 and newer): a lost node costs the run nothing but a start."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import SMALL, LiveRun, ends_like
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import fail_node
from verl_slurm.slurm.requeue_rules import names_expedite

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.long]


@pytest.mark.variant
def test_an_expedited_job_that_loses_a_node_starts_again_before_all_others(
    make_cluster: Callable[..., DevCluster], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Three nodes, the run on two of them: after the loss there is room for the run or for a job that waits already."""
    cluster = make_cluster(nodes=3)
    run = LiveRun(cluster, tmp_path / "run", *SMALL)
    if not names_expedite(run.slurm("sbatch", "--help")):
        pytest.skip("not applicable: this sbatch has no --requeue=expedite (25.11 and newer)")
    with cluster.slurm_conf.open("a") as conf:
        conf.write("SlurmctldParameters=enable_expedited_requeue\n")
    run.slurm("scontrol", "reconfigure")
    run.submit()
    rival = ""
    try:
        assert run.facts().expedited
        # Slurm's own delay of 120 s would let it pass.
        asked = ["--nodes=2", "--exclusive", "--output=/dev/null", "--chdir=/", "--wrap=exec sleep 1200"]
        rival = run.slurm("sbatch", "--parsable", *asked).strip()
        run.wait_phase("generate")
        (lost,) = run.other_nodes()
        fail_node(cluster, lost)
        again = run.wait_event("started", requeues=1)
        assert lost not in again["nodes"].split(",")
        assert run.slurm("squeue", "--noheader", f"--jobs={rival}", "--format=%T").strip() == "PENDING"
        # Not made where this test is skipped.
        ends_like(run, request.getfixturevalue("twin"))
        # An expedited job is held after an end that Slurm takes for an error.
        facts = run.wait_slurm(lambda facts: not facts.is_running and facts.state != "COMPLETING")
        assert (facts.state, facts.restarts) == ("COMPLETED", 1), run.story()
    finally:
        run.cancel()
        if rival:
            run.slurm("scancel", rival, check=False)
