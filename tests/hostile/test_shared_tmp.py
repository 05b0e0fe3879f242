"""Agents that share /tmp and see no pid of one another, as in containers on one node."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fakes.run_without_torch import Stage
from tests.hostile.test_processes import unshared
from verl_slurm.base.files import private_dir
from verl_slurm.wire.environment import CONTROL_VARIABLE

pytestmark = pytest.mark.slow


def control_of(pid: int) -> Path:
    """The directory of the agent below this lead."""
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if found := process.environ().get(CONTROL_VARIABLE):
                return Path(found)
    raise AssertionError(f"no rank below {pid}")


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[tuple[Stage, Stage]]:
    """One in job 7 of a Slurm, one without."""
    ours = Stage(private_dir(tmp_path / "ours"), slurm=True)
    other = Stage(private_dir(tmp_path / "other"))
    yield ours, other
    ours.close()
    other.close()


@pytest.mark.scenario("P14")
def test_an_agent_that_sees_no_pid_of_ours_leaves_our_directory_alone(stages: tuple[Stage, Stage]) -> None:
    apart = unshared("--pid", "--fork", "--mount-proc", "--kill-child")
    ours, other = stages
    process = ours.lead()
    ours.wait("first_rollout")
    control = control_of(process.pid)
    other.lead(before=apart, saves=1)
    assert other.end() == 0, other.story()
    assert control.is_dir()
    ours.preempt()
    assert ours.end() == 25, ours.story()
    assert not control.exists()
