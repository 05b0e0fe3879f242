"""Shared storage goes away under a run on a real Slurm; what the nodes' own disks hold comes home."""

from pathlib import Path

import pytest

from tests.harness import ONE_RANK, SMALL, LiveRun, ends_like, same_weights
from tests.ledger_stats import ledger_stats
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import preempt

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.long]


def test_a_preemption_while_shared_storage_is_gone_loses_nothing(cluster: DevCluster, tmp_path: Path) -> None:
    twin = LiveRun(cluster, tmp_path / "twin", *SMALL, *ONE_RANK, "train.steps=3").submit()
    twin.wait_end()
    # Its node by name: what lies on a node's own disk can come home from there only.
    local = (f"checkpoint.local_dir={tmp_path / 'nvme'}", "slurm.extra.nodelist=node1")
    run = LiveRun(cluster, tmp_path / "run", *SMALL, *ONE_RANK, "train.steps=3", *local)
    run.submit()
    try:
        run.wait_phase("generate")
        run.paths.checkpoints.rename(tmp_path / "away")
        run.paths.checkpoints.write_bytes(b"")  # as a mount that is gone: nothing can be made below it
        preempt(cluster, int(run.job_id), hold_s=1)
        saved = run.wait_event("saved", emergency=True)
        assert "shared storage" in run.wait_event("one_copy", name=saved["name"])["reason"]
        run.paths.checkpoints.unlink()
        (tmp_path / "away").rename(run.paths.checkpoints)
        run.wait_event("ended", exit_code=25)

        said = run.wait_event("second_copy", attempt=2)["reason"]
        assert said.startswith(f"{saved['name']}: brought home"), run.story()
        run.wait_event("restart", resume=saved["name"])
        run.wait_end()
        same, compared = same_weights(run.paths.root, twin.paths.root)
        assert same, compared
        assert ledger_stats(run.paths).duplicates == ()
    finally:
        run.cancel()


@pytest.mark.scenario("L11")
@pytest.mark.variant
def test_a_copy_on_nodes_that_do_not_come_back_is_not_waited_for(
    cluster: DevCluster, twin: LiveRun, tmp_path: Path
) -> None:
    local = (f"checkpoint.local_dir={tmp_path / 'nvme'}", "slurm.extra.nodelist=node1,node2")
    # The next life is asked for late, so that there is time to send it elsewhere.
    run = LiveRun(cluster, tmp_path / "run", *SMALL, *local, "daemon.requeue_delay_s=3000")
    run.submit()
    try:
        run.wait_phase("generate", step=1)
        run.slurm("scancel", "-b", "-s", "USR1", run.job_id)
        shared = run.wait_event("verified")
        run.paths.checkpoints.rename(tmp_path / "away")
        run.paths.checkpoints.write_bytes(b"")
        seen = len(run.events())
        preempt(cluster, int(run.job_id), hold_s=1)
        saved = run.wait_event("saved", after=seen, emergency=True)
        run.wait_event("one_copy", name=saved["name"])
        run.paths.checkpoints.unlink()
        (tmp_path / "away").rename(run.paths.checkpoints)
        run.wait_event("ended", exit_code=25)

        run.wait_slurm(lambda facts: facts.state == "PENDING")
        run.slurm("scontrol", "update", f"jobid={run.job_id}", "ReqNodeList=node3,node4", "StartTime=now")
        again = run.wait_event("started", requeues=1)
        assert again["nodes"] == "node[3-4]", run.story()
        resumed = run.wait_event("restart", after=seen)
        assert resumed["resume"] == shared["name"], run.story()
        told = " ".join(event["reason"] for event in run.events("resume"))
        assert f"{saved['name']} is on the disks of node[1-2] alone" in told
        ends_like(run, twin)
    finally:
        run.cancel()
