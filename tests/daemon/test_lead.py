"""What a lead does last."""

import asyncio
from pathlib import Path

import pytest
from verl_slurm_daemon.allocation.local import LocalAllocation
from verl_slurm_daemon.lead.lead_loop import Lead

from tests.journals import append_event, read_events
from verl_slurm.base.errors import Fenced
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.fence import RunOwner, take_attempt
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.events import StartOverruled
from verl_slurm.journal.history import History


class OfACancelledJob(LocalAllocation):
    """Follows a job that was cancelled: over before it began."""

    def __init__(self, config: RunConfig, paths: RunPaths, *, owned: str = "") -> None:
        super().__init__(config, paths)
        self.withdrawn, self._owned = 0, owned

    async def cancelled_before(self) -> str:
        return "job 7, which this one follows, is CANCELLED"

    async def still_alive(self, owner: RunOwner) -> str:
        return self._owned

    async def withdraw(self) -> str:
        self.withdrawn += 1
        return "Requeue=0: the job ends here"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    for directory in (paths.root, paths.control, paths.logs):
        private_dir(directory)
    return paths


def test_a_run_that_ends_for_good_takes_its_requeue_back_first(paths: RunPaths) -> None:
    config = RunConfig()
    allocation = OfACancelledJob(config, paths)
    assert asyncio.run(Lead(paths, config, allocation).run()) is ExitCode.CANCELLED
    assert allocation.withdrawn == 1
    events = read_events(paths)
    assert [event["event"] for event in events] == ["started", "notice", "ended"]
    assert events[1]["text"] == "Requeue=0: the job ends here"


class OfAJournalWithAnything(OfACancelledJob):
    async def learn(self, history: History) -> StartOverruled | None:
        raise ValueError("Invalid isoformat string: 'soon'")


def test_a_start_time_in_the_journal_that_is_none_keeps_no_attempt_from_its_start(paths: RunPaths) -> None:
    config = RunConfig()
    lead = Lead(paths, config, OfAJournalWithAnything(config, paths))
    assert asyncio.run(lead.run()) is ExitCode.CANCELLED


class OnStorageThatIsAway(LocalAllocation):
    async def cancelled_before(self) -> str:
        raise OSError(5, "Input/output error")


def test_a_journal_that_cannot_be_read_at_the_start_costs_one_start_and_not_the_run(paths: RunPaths) -> None:
    config = RunConfig()
    lead = Lead(paths, config, OnStorageThatIsAway(config, paths))
    assert asyncio.run(lead.run()) is ExitCode.REQUEUED
    assert "start_failed" in [event["event"] for event in read_events(paths)]


def test_a_job_that_comes_second_does_not_wait_held_for_the_run(paths: RunPaths) -> None:
    take_attempt(paths, job_id="7", restart=0, cluster="slurm")
    config = RunConfig()
    allocation = OfACancelledJob(config, paths, owned="job 7 is RUNNING")
    with pytest.raises(Fenced):
        asyncio.run(Lead(paths, config, allocation).run())
    assert allocation.withdrawn == 1


def test_a_run_that_was_put_back_from_a_snapshot_gives_no_number_twice(paths: RunPaths) -> None:
    take_attempt(paths, job_id="1", restart=0)
    append_event(paths, "saved", attempt=2, name="step_000003")  # it lives on, and its claim is gone
    config = RunConfig()
    asyncio.run(Lead(paths, config, OfACancelledJob(config, paths)).run())
    assert read_events(paths)[-1]["attempt"] == 3
