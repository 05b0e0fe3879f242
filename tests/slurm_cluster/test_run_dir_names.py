"""What submit accepts as the name of a run directory, a job on a real Slurm can run in."""

from pathlib import Path

import pytest

from tests.harness import SMALL, LiveRun
from verl_slurm.slurm.devcluster.cluster import DevCluster

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("ranks_without_torch")]


@pytest.mark.scenario("FLT-N01")
@pytest.mark.parametrize("name", ["a  b'c`d;e&f|g#h!i", '*?[x]~()<>^@=+:,"', "é日ü-_."])
def test_a_job_runs_in_a_directory_with_every_accepted_character(
    cluster: DevCluster, tmp_path: Path, name: str
) -> None:
    run = LiveRun(cluster, tmp_path / name, *SMALL)
    run.submit()
    try:
        run.wait_event("started")
        assert list(run.paths.logs.glob("*.out"))
    finally:
        run.cancel()
