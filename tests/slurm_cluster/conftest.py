"""What the tests on a real Slurm share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import SMALL, LiveRun
from verl_slurm.devcluster.cluster import DevCluster


@pytest.fixture(scope="session")
def twin(cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> LiveRun:
    """The same run, undisturbed."""
    run = LiveRun(cluster, tmp_path_factory.mktemp("twin") / "run", *SMALL).submit()
    run.wait_end()
    assert len(run.events("restart")) == 1, run.story()
    return run


@pytest.fixture
def run(cluster: DevCluster, tmp_path: Path) -> Iterator[LiveRun]:
    """A run like it, not yet submitted; its job is ended with the test."""
    live = LiveRun(cluster, tmp_path / "run", *SMALL)
    yield live
    live.cancel()
