"""When a requeued job may start is told to Slurm in Slurm's time, whatever the node's clock says."""

import asyncio
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.slurm_client import SlurmClient

SHIM = Path(__file__).parents[1] / "hostile" / "clockshim.c"
pytestmark = pytest.mark.slurm


@pytest.fixture
def library(tmp_path: Path) -> Path:
    compiler, made = shutil.which("cc"), tmp_path / "clockshim.so"
    if compiler is None:
        pytest.skip("NOT RUN: no C compiler")
    argv = [compiler, "-shared", "-fPIC", "-O2", "-o", str(made), str(SHIM), "-ldl"]
    if subprocess.run(argv, capture_output=True, check=False).returncode:
        pytest.skip("NOT RUN: no headers of C")
    return made


@pytest.mark.scenario("FLT-N10")
@pytest.mark.parametrize(
    ("off_s", "starts_in_s"),
    # A node that is ahead: scontrol refuses to name a time before its own present, and nothing else sets one.
    [(-250, 60), (0, 60), (90, 90)],
    ids=["behind", "right", "ahead"],
)
def test_a_start_time_is_slurms_unless_the_node_is_ahead_of_it(
    cluster: DevCluster, library: Path, tmp_path: Path, off_s: int, starts_in_s: int
) -> None:
    offset = tmp_path / "offset"
    offset.write_bytes(off_s.to_bytes(8, "little", signed=True) + bytes(8))
    env = cluster.client_env()
    client = SlurmClient(env | {"LD_PRELOAD": str(library), "CLOCKSHIM": str(offset)})
    job_id = asyncio.run(SlurmClient(env).submit(["--hold", "-o/dev/null", "--wrap=true"], "a job"))
    try:
        asked = datetime.now(UTC)  # the test's clock is slurmctld's

        async def story() -> datetime | None:
            await client.set_start(await client.job(job_id), 60)
            return (await client.job(job_id)).eligible_time

        eligible = asyncio.run(story())
        assert eligible is not None
        assert -5 < (eligible - asked).total_seconds() - starts_in_s < 15
    finally:
        asyncio.run(SlurmClient(env).cancel(job_id))


@pytest.mark.scenario("FLT-N10")
def test_a_node_that_is_far_ahead_leaves_slurms_own_delay(cluster: DevCluster) -> None:
    """scontrol would make the time its node's present: later than what Slurm has by itself."""
    client = SlurmClient(cluster.client_env())
    job_id = asyncio.run(client.submit(["--hold", "-o/dev/null", "--wrap=true"], "a job"))
    try:

        async def story() -> datetime | None:
            def slurms() -> datetime:
                return datetime.now(UTC) - timedelta(seconds=200)

            return await client.set_start(await client.job(job_id), 10, slurms)

        assert asyncio.run(story()) is None
    finally:
        asyncio.run(client.cancel(job_id))
