"""RUN's file system is mounted on a node only after Slurm has started the job there."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.harness import ONE_RANK, SMALL, LiveRun
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import preempt

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.usefixtures("ranks_without_torch"),
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: mounting needs root"),
]


def test_a_requeued_job_waits_for_its_runs_file_system(cluster: DevCluster, tmp_path: Path) -> None:
    shared, store = tmp_path / "shared", tmp_path / "store"
    shared.mkdir()
    store.mkdir()
    mount, umount = ["mount", "--bind", store, shared], ["umount", "-l", shared]
    subprocess.run(mount, check=True)
    run = LiveRun(cluster, shared / "run", *SMALL, *ONE_RANK, "daemon.requeue_delay_s=10").submit()
    try:
        run.wait_phase("generate")
        preempt(cluster, int(run.job_id), hold_s=1)
        saved = run.wait_event("saved", emergency=True)
        run.wait_event("ended", exit_code=25)
        subprocess.run(umount, check=True)
        run.wait_slurm(lambda facts: facts.is_running)
        subprocess.run(mount, check=True)
        run.wait_event("restart", attempt=2, resume=saved["name"])
    finally:
        run.cancel()
        subprocess.run(umount, check=True)
