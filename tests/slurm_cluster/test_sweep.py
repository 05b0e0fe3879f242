"""A sweep on a real Slurm: its runs wait for each other, also for one that was preempted and waits to go on."""

from pathlib import Path

import msgspec
import pytest

from tests.harness import ONE_RANK, SMALL, LiveRun
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import preempt

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("ranks_without_torch")]


def test_a_run_of_a_sweep_starts_when_the_one_before_it_has_ended_for_good(
    cluster: DevCluster, tmp_path: Path
) -> None:
    base = LiveRun(cluster, tmp_path / "sweep", *SMALL, *ONE_RANK)
    words = [*base.argv, "--cluster", "slurm", "--sweep", "--at-once", "1", "seed=0,1", "--json"]
    planned = msgspec.json.decode(base.cli("submit", *words, "--dry-run").stdout)
    assert [Path(row["run_dir"]).name for row in planned] == ["seed0", "seed1"]
    assert not (tmp_path / "sweep").exists()

    rows = msgspec.json.decode(base.cli("submit", *words).stdout)
    first, second = (LiveRun(cluster, Path(row["run_dir"])) for row in rows)
    first.job_id, second.job_id = (row["job_id"] for row in rows)
    try:
        first.wait_phase("generate")
        assert (second.facts().state, second.facts().reason) == ("PENDING", "Dependency")
        preempt(cluster, int(first.job_id), hold_s=1)
        first.wait_event("ended", exit_code=25)
        assert second.facts().state == "PENDING"
        first.wait_end()
        assert not second.events("started") or first.facts().is_over
        second.wait_end()
        assert first.facts().restarts == 1
        listed = base.cli("list", str(tmp_path / "sweep")).stdout
        assert listed.count("done") == 2, listed
    finally:
        first.cancel()
        second.cancel()
