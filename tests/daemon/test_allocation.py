"""What an allocation finds out from Slurm before the lead takes a run over. Slurm's answers are scripted."""

import asyncio
import re
from pathlib import Path

import pytest
from verl_slurm_daemon import allocation
from verl_slurm_daemon.allocation import SlurmAllocation

from verl_slurm.config.schema import RunConfig
from verl_slurm.errors import NotFound, SlurmMissing, VerlSlurmError
from verl_slurm.fence import Epoch
from verl_slurm.paths import RunPaths
from verl_slurm.slurm.environment import SlurmJob
from verl_slurm.slurm.parse import parse_job

OWNER = Epoch(
    epoch=1, cluster="slurm", job_id="37", restart=0, host="a", pid=1, taken="2026-01-01T00:00:00+00:00"
)
GOLDEN = Path(__file__).parent.parent / "slurm" / "golden" / "running.txt"
RECORD = re.sub(r"JobId=\d+", "JobId=37", GOLDEN.read_text())
SILENCE = SlurmMissing("Slurm does not answer")
FORGOTTEN = NotFound("no such job")


class _Slurm:
    """Answers with one state after the other; the last one for ever."""

    def __init__(self, *answers: str | VerlSlurmError) -> None:
        self._answers, self.asked = list(answers), 0

    async def job(self, job_id: int) -> object:
        assert job_id == 37
        answer = self._answers[min(self.asked, len(self._answers) - 1)]
        self.asked += 1
        if isinstance(answer, VerlSlurmError):
            raise answer
        return parse_job(re.sub(r"JobState=\S+", f"JobState={answer}", RECORD), job_id)


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        (("RUNNING",), "job 37 is RUNNING"),
        (("PENDING",), "job 37 is PENDING"),
        (("CANCELLED",), ""),
        (("COMPLETING", "COMPLETING", "CANCELLED"), ""),
        (("COMPLETING", FORGOTTEN), ""),
        (("COMPLETING", "PENDING"), "job 37 is PENDING"),
        (("COMPLETING",), "job 37 is COMPLETING"),
        ((SILENCE, "RUNNING"), "job 37 is RUNNING"),
        ((SILENCE,), ""),
        ((FORGOTTEN,), ""),
    ],
)
def test_a_former_job_holds_the_run_until_slurm_says_that_it_is_over(
    answers: tuple[str | VerlSlurmError, ...], verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocation, "_ASK_AGAIN_S", (0.0, 0.0))
    monkeypatch.setattr(allocation, "_LEAVING_S", (0.0, 0.0, 0.0))
    slurm = _Slurm(*answers)
    monkeypatch.setattr(allocation, "SlurmClient", lambda: slurm)
    job = SlurmJob.from_environ(
        {
            "SLURM_JOB_ID": "38",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURMD_NODENAME": "node1",
        }
    )
    assert job is not None
    mine = SlurmAllocation(job, RunConfig(), RunPaths(tmp_path))
    assert asyncio.run(mine.still_alive(OWNER)) == verdict
    assert slurm.asked <= 4
