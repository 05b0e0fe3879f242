"""A cloud takes a node of a run on a real Slurm back. The metadata service is a stand-in, and the node stays."""

from pathlib import Path

import pytest

from tests.fakes.metadata_service import MetadataService
from tests.harness import SMALL, LiveRun
from verl_slurm.slurm.devcluster.cluster import DevCluster

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("ranks_without_torch")]


@pytest.mark.scenario("L16")
def test_a_run_leaves_a_node_that_its_cloud_takes_back_and_starts_on_others(
    cluster: DevCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MetadataService() as service:
        service.once = True
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.url)
        run = LiveRun(
            cluster, tmp_path / "run", *SMALL, "daemon.spot_notices=aws", "train.steps=1000"
        ).submit()
        try:
            run.wait_phase("generate")
            service.ends_in_s = 90
            cause = run.wait_event("cause", cause="reclaimed")
            goes = cause["evidence"].removeprefix("node ").partition(":")[0]
            saved = run.wait_event("saved", emergency=True)
            run.wait_event("ended", exit_code=25)
            again = run.wait_event("restart", attempt=2)
            assert again["resume"] == saved["name"], run.story()
            run.wait_event("training", attempt=2)
            agents = {name for name in run.daemons() if name.startswith("agent")}
            assert len(agents) == 2, run.story()
            assert f"agent {goes}" not in agents, run.story()
        finally:
            run.cancel()
