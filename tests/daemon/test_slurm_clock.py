"""Deadlines are told by slurmctld's clock, whatever a node's own says, and however often that one is set."""

import asyncio
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from verl_slurm_daemon.allocation import slurm_job as slurm_allocation
from verl_slurm_daemon.allocation.slurm_job import SlurmAllocation, SlurmClock

from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import RunConfig
from verl_slurm.slurm.parse import parse_job
from verl_slurm.slurm.slurm_environment import SlurmJob

TRUE = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)
GOLDEN = Path(__file__).parent.parent / "slurm" / "golden" / "time_limit_running.txt"


class Node:
    """A machine whose date is off by `ahead_s`, and may be set."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        self.ahead_s, self.passed_s = ahead_s, 0.0

    def date(self) -> datetime:
        return TRUE + timedelta(seconds=self.passed_s + self.ahead_s)

    def steady(self) -> float:
        return 100_000.0 + self.passed_s


@pytest.mark.scenario("K02")
@pytest.mark.parametrize("ahead_s", [-600.0, -3.0, 3.0, 600.0])
def test_a_node_minutes_off_counts_by_slurms_time(ahead_s: float) -> None:
    node = Node(ahead_s)
    clock = SlurmClock(node.date, node.steady)
    assert clock.hear(TRUE) == ahead_s
    for node.passed_s in (0.0, 0.5, 3600.0):
        off = (clock.now() - (TRUE + timedelta(seconds=node.passed_s))).total_seconds()
        assert 0.0 <= off <= 1.0, "a deadline is never thought to be later than it is"


def test_nodes_that_agree_or_hear_nothing_keep_their_own_time() -> None:
    node = Node(0.7)
    clock = SlurmClock(node.date, node.steady)
    assert clock.hear(TRUE) == 0.0
    node.passed_s = 12.25
    assert clock.now() == node.date()
    node = Node(600.0)
    clock = SlurmClock(node.date, node.steady)
    assert clock.hear(None) == 0.0
    assert clock.now() == node.date()


@pytest.mark.parametrize("heard", [True, False])
def test_a_date_that_is_set_in_mid_run_moves_nothing(heard: bool) -> None:
    node = Node()
    clock = SlurmClock(node.date, node.steady)
    if heard:
        clock.hear(TRUE)
    node.passed_s, node.ahead_s = 60.0, -3600.0
    assert clock.now() == TRUE + timedelta(seconds=60.0)


class _Slurm:
    """Minutes behind this machine, by its own clock."""

    def __init__(self) -> None:
        self.date = datetime.now(UTC) - timedelta(seconds=300)

    async def config_and_time(self) -> tuple[dict[str, str], datetime]:
        return {"KillWait": "15 sec"}, self.date.replace(microsecond=0)

    async def node_addr(self, _: str) -> str:
        return "n1"

    async def job(self, job_id: int) -> object:
        end = f"EndTime={int(self.date.timestamp()) + 100}"
        return parse_job(re.sub(r"\bEndTime=\d+", end, GOLDEN.read_text()), job_id)


@pytest.mark.scenario("K02")
def test_the_lead_reads_what_is_left_of_its_job_by_slurms_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_allocation, "SlurmClient", _Slurm)
    job = SlurmJob.from_environ(
        {
            "SLURM_JOB_ID": "1",
            "SLURM_JOB_NODELIST": "n1",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURMD_NODENAME": "n1",
        }
    )
    assert job is not None
    mine = SlurmAllocation(job, RunConfig(), RunPaths(tmp_path))

    async def left() -> float | None:
        await mine.address()
        return (await mine.outlook()).seconds_left

    seconds = asyncio.run(left())
    assert seconds is not None
    assert 0.0 < seconds <= 100.0, "by this machine's clock it would have ended minutes ago"
