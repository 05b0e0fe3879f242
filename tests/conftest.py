"""Fixtures for all: a real private Slurm cluster, for the session or made to measure."""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.lanes import has_variants
from tests.processes import NO_TORCH, python_path
from verl_slurm.base.errors import SlurmMissing
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.conf import ClusterOptions

# The same examples at every run: a test that fails now and then hinders everybody, and tells nobody in time.
# To look for new ones: HYPOTHESIS_PROFILE=explore.
settings.register_profile("same", derandomize=True, print_blob=True)
settings.register_profile("explore", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out, and counts as left out, what takes minutes to hours without `make soak`, and variants in CI. Long
    tests run four at a time on CI's two cores, and wait that much longer before they count as stuck."""
    soaking = bool(os.environ.get("VERL_SLURM_SOAK"))
    for item in items:
        soak = soaking and item.get_closest_marker("soak")  # takes as long as it is asked to
        if (soak or item.get_closest_marker("long")) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(0 if soak else 1800))
    runs = {"soak": soaking, "variant": soaking or has_variants()}
    removed = [
        item
        for item in items
        if any(item.get_closest_marker(mark) for mark, wanted in runs.items() if not wanted)
    ]
    if removed:
        config.hook.pytest_deselected(items=removed)
        items[:] = [item for item in items if item not in removed]


@pytest.fixture(autouse=True)
def _environment_of_its_own() -> Iterator[None]:
    """What the code under test sets in this process's environment (a lead sets PYTHONSAFEPATH) ends with the test."""
    before, mask = dict(os.environ), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    # Bad nodes of the person who tests are nothing to a test, and a test's are nothing to that person.
    os.environ["XDG_STATE_HOME"] = "/dev/null/state"
    yield
    # A lead blocks signals, and whatever the next test starts would inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def ranks_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of this test have ranks that train nothing: for claims about the daemon, Slurm and the command line."""
    monkeypatch.setenv("PYTHONPATH", python_path(NO_TORCH)["PYTHONPATH"])


def _start(cluster: DevCluster, options: ClusterOptions) -> DevCluster:
    try:
        cluster.start(options)
    except SlurmMissing as error:
        pytest.skip(error.one_line())
    return cluster


def _end(cluster: DevCluster) -> None:
    status = cluster.stop()
    shutil.rmtree(cluster.directory, ignore_errors=True)
    assert not status.left, f"processes outlived the cluster: {status.left}"


@pytest.fixture(scope="session")
def cluster() -> Iterator[DevCluster]:
    """Four nodes, a grace time of 30 s, credentials that expire after 10 s. Shared: leave no job behind."""
    # not tmp_path: names of Unix sockets must be short
    cluster = _start(DevCluster(Path(tempfile.mkdtemp(prefix="vs-"))), ClusterOptions(cred_expire_s=10))
    try:
        yield cluster
    finally:
        _end(cluster)


@pytest.fixture
def make_cluster() -> Iterator[Callable[..., DevCluster]]:
    """`make_cluster(grace_s=5, ...)`: a cluster of one's own, with any `ClusterOptions`; `kind` of cluster."""
    made: list[DevCluster] = []

    def make(*, kind: type[DevCluster] = DevCluster, **options: Any) -> DevCluster:
        cluster = _start(kind(Path(tempfile.mkdtemp(prefix="vs-"))), ClusterOptions(**options))
        made.append(cluster)
        return cluster

    try:
        yield make
    finally:
        for cluster in made:
            _end(cluster)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A private directory with a short name: sockets of a cluster live below it."""
    directory = Path(tempfile.mkdtemp(prefix="vs-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
