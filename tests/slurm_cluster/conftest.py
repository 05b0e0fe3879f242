"""What the tests on a real Slurm share."""

import pytest

from tests.harness import SMALL, LiveRun
from verl_slurm.devcluster.cluster import DevCluster


@pytest.fixture(scope="session")
def twin(cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> LiveRun:
    """The same run, undisturbed."""
    run = LiveRun(cluster, tmp_path_factory.mktemp("twin") / "run", *SMALL).submit()
    run.wait_end()
    assert len(run.events("generation")) == 1, run.story()
    return run
