"""What the tests on a real Slurm share."""

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import SMALL, LiveRun
from verl_slurm.devcluster.cluster import DevCluster


@pytest.fixture(scope="session")
def twin(
    cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> LiveRun:
    """The same run, undisturbed: one for all workers, of which the first that needs it makes it."""
    place = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        place = place.parent
    run = LiveRun(cluster, place / "twin", *SMALL)
    with (place / "twin.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not run.events("ended"):
            run.submit().wait_end()
    assert len(run.events("restart")) == 1, run.story()
    return run


@pytest.fixture
def run(cluster: DevCluster, tmp_path: Path) -> Iterator[LiveRun]:
    """A run like it, not yet submitted; its job is ended with the test."""
    live = LiveRun(cluster, tmp_path / "run", *SMALL)
    yield live
    live.cancel()
