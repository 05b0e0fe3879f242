"""Shared storage goes away under a run on a real Slurm; what the nodes' own disks hold comes home."""

from pathlib import Path

import pytest

from tests.harness import SMALL, LiveRun, same_weights
from verl_slurm.devcluster.cluster import DevCluster
from verl_slurm.devcluster.faults import preempt
from verl_slurm.runtime_state import ledger

pytestmark = [pytest.mark.slurm, pytest.mark.torch]


def test_a_preemption_while_shared_storage_is_gone_loses_nothing(cluster: DevCluster, tmp_path: Path) -> None:
    twin = LiveRun(cluster, tmp_path / "twin", *SMALL, "train.steps=3").submit()
    twin.wait_end()
    # Its nodes by name: what lies on a node's own disk can come home from there only.
    local = (f"checkpoint.local_dir={tmp_path / 'nvme'}", "slurm.extra.nodelist=node1,node2")
    run = LiveRun(cluster, tmp_path / "run", *SMALL, "train.steps=3", *local)
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

        said = run.wait_event("second_copy", epoch=2)["reason"]
        assert said.startswith(f"{saved['name']}: brought home"), run.story()
        run.wait_event("generation", resume=saved["name"])
        run.wait_end()
        same, compared = same_weights(run.paths.root, twin.paths.root)
        assert same, compared
        assert ledger.stats(run.paths).duplicates == ()
    finally:
        run.cancel()
