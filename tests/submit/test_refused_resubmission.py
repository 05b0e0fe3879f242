"""What a submission that sbatch refuses leaves of an earlier one."""

from pathlib import Path

import pytest

from tests.harness import ROOT
from verl_slurm.base.errors import SlurmRefused
from verl_slurm.base.paths import RunPaths
from verl_slurm.submit import submission
from verl_slurm.submit.submission import carry_out, plan_submission
from verl_slurm.submit.submission_plan import SubmissionPlan


@pytest.mark.scenario("USE08")
def test_a_mark_that_an_earlier_submission_made_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it a start by hand would take the newest checkpoint, where the user wanted to begin afresh."""

    def refuse(_: SubmissionPlan, after: str) -> str:
        raise SlurmRefused("sbatch refused the job")

    def plan(resume_from: str) -> SubmissionPlan:
        words = [f"run_dir={tmp_path}/run", "code.tree=null", f"checkpoint.resume_from={resume_from}"]
        return plan_submission(ROOT / "configs/pytorch_loop.yaml", words, cluster="local")

    monkeypatch.setattr(submission, "submit_job", refuse)
    mark = RunPaths(tmp_path / "run").resume_once
    carry_out(plan("auto"), prepare_only=True)
    with pytest.raises(SlurmRefused):
        carry_out(plan("null"))
    assert not mark.exists()
    carry_out(plan("null"), prepare_only=True)
    with pytest.raises(SlurmRefused):
        carry_out(plan("null"))
    assert mark.exists()
