"""What the tests on a real Slurm share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import SMALL, LiveRun
from tests.made_once import made_once
from verl_slurm.slurm.devcluster.cluster import DevCluster


@pytest.fixture(scope="session")
def twin(cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> LiveRun:
    """The same run, undisturbed."""

    def make(place: Path) -> None:
        LiveRun(cluster, place / "run", *SMALL).submit().wait_end()

    run = LiveRun(cluster, made_once(tmp_path_factory, "twin", make) / "run", *SMALL)
    assert len(run.events("restart")) == 1, run.story()
    return run


@pytest.fixture
def run(cluster: DevCluster, tmp_path: Path) -> Iterator[LiveRun]:
    """A run like it, not yet submitted; its job is ended with the test."""
    live = LiveRun(cluster, tmp_path / "run", *SMALL)
    yield live
    live.cancel()
