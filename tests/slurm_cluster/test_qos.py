"""A cluster with accounting, where a QOS decides: a job of a higher one takes a run's nodes, in the same partition."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.devcluster.accounting import AccountedCluster
from tests.devcluster.test_accounting import NEEDS_SLURMDBD
from tests.harness import SMALL, LiveRun, ends_like
from verl_slurm.slurm.devcluster.cluster import DevCluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.long, NEEDS_SLURMDBD]


@pytest.mark.scenario("L01", "EMB3")
@pytest.mark.variant
def test_a_job_of_a_higher_qos_preempts_a_run_which_saves_and_resumes(
    make_cluster: Callable[..., DevCluster], twin: LiveRun, tmp_path: Path
) -> None:
    # Each node has a counted GPU, which the run asks for and does not use: it trains on CPUs, as its twin.
    cluster = make_cluster(kind=AccountedCluster, nodes=2, cred_expire_s=10, gpus=1)
    words = (*SMALL, "slurm.qos=normal", "slurm.gpus_per_node=1", "distributed.device=cpu")
    run = LiveRun(cluster, tmp_path / "run", *words).submit()
    try:
        run.wait_phase("generate")
        options = ("--qos=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--chdir=/")
        urgent = run.slurm("sbatch", "--parsable", *options, "--wrap=exec sleep 1").strip()
        cause = run.wait_event("cause")
        assert cause["cause"] == "preemption", run.story()
        saved = run.wait_event("saved", emergency=True)
        run.wait_event("requeue", accepted=True)
        run.wait_event("restart", after=1, resume=saved["name"])
        ends_like(run, twin)
        deadline = time.monotonic() + 60
        while True:
            argv = ("sacct", "-D", "-X", "-n", "-P", "-o", "jobid,qos,state,alloctres")
            told = [line.split("|") for line in run.slurm(*argv).splitlines()]
            states = {(job, qos, state) for job, qos, state, _ in told}
            if (run.job_id, "normal", "COMPLETED") in states:
                break
            assert time.monotonic() < deadline, told
            time.sleep(0.2)
        # Every attempt under the job's one number.
        assert states == {
            (run.job_id, "normal", "REQUEUED"),
            (urgent, "urgent", "COMPLETED"),
            (run.job_id, "normal", "COMPLETED"),
        }
        assert all("gres/gpu=2" in granted for job, _, _, granted in told if job == run.job_id)
    finally:
        run.cancel()
