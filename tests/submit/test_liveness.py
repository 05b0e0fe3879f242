"""Whether a run without Slurm still lives."""

import os
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from verl_slurm.fence import Epoch
from verl_slurm.files import private_dir, write_file
from verl_slurm.paths import RunPaths
from verl_slurm.process_birth import birth_of
from verl_slurm.submit.liveness import job_state, leads
from verl_slurm.submit.newest_job import Submission


def owned(root: Path, *, pid: int, job_id: str, taken: datetime, born: str = "") -> RunPaths:
    import msgspec

    paths = RunPaths(private_dir(root))
    owner = Epoch(
        epoch=1,
        cluster="local",
        job_id=job_id,
        restart=0,
        host="a",
        pid=pid,
        taken=taken.isoformat(),
        born=born,
    )
    write_file(paths.epoch, msgspec.json.encode(owner))
    return paths


@pytest.mark.parametrize(
    ("pid", "job", "age_s", "alive"),
    [
        (os.getpid(), "local-7", 0, True),
        (os.getpid(), "local-8", 0, False),
        (999_999_999, "local-7", 0, False),
        (os.getpid(), "local-7", 10**6, False),
    ],
    ids=["it lives", "another has the run", "no such process", "only the number is the same"],
)
def test_a_lead_that_was_started_by_hand_lives_as_long_as_its_process(
    tmp_path: Path, pid: int, job: str, age_s: int, alive: bool
) -> None:
    """Of a hostfile run, say: it has no controller of submitit's, and was called gone while it ran."""
    taken = datetime.now(UTC) - timedelta(seconds=age_s)
    paths = owned(tmp_path / "run", pid=pid, job_id="local-7", taken=taken)
    submission = Submission(job_id=job, cluster="local", host=socket.gethostname())
    state = job_state(paths, submission)
    assert (state.state, state.over) == (("RUNNING", False) if alive else ("GONE", True))
    assert [process.pid for process in leads(paths, submission)] == ([pid] if alive else [])


@pytest.mark.scenario("K02")
@pytest.mark.parametrize(("born", "alive"), [(birth_of(os.getpid()), True), ("another boot:1", False)])
@pytest.mark.parametrize("off_s", [-(10**6), 10**6])
def test_whether_a_lead_by_hand_lives_is_told_by_its_birth_and_not_by_dates(
    tmp_path: Path, born: str, alive: bool, off_s: int
) -> None:
    taken = datetime.now(UTC) + timedelta(seconds=off_s)
    paths = owned(tmp_path / "run", pid=os.getpid(), job_id="local-7", taken=taken, born=born)
    submission = Submission(job_id="local-7", cluster="local", host=socket.gethostname())
    assert job_state(paths, submission).over is not alive
