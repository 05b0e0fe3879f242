"""The combinations of a sweep: their names, their words, and what is refused."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.builders import run_config
from verl_slurm.base.errors import ConfigError, Fenced, SlurmRefused
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.cli.__main__ import main
from verl_slurm.slurm.commands import WORK_DIR
from verl_slurm.submit.submission import SubmissionResult
from verl_slurm.submit.submission_plan import SubmissionPlan, swept_runs


def test_each_combination_is_a_run_with_a_name() -> None:
    runs = swept_runs(["train.actor_lr=1e-6,3e-6", "train.steps=50", "seed=0,1"])
    assert [run.label for run in runs] == [
        "actor_lr1e-6-seed0",
        "actor_lr1e-6-seed1",
        "actor_lr3e-6-seed0",
        "actor_lr3e-6-seed1",
    ]
    assert runs[1].words == ("train.actor_lr=1e-6", "train.steps=50", "seed=1")
    # Keys with the same last part keep their sections.
    (first, *_) = swept_runs(["train.x=1,2", "rollout.x=3,4"])
    assert first.label == "train.x1-rollout.x3"


def test_commas_in_brackets_and_quotes_separate_nothing() -> None:
    runs = swept_runs(["slurm.extra={a: 1, b: 2},{a: 2}", 'x="1,2",3', "y=[1,2]"])
    assert [run.words for run in runs][:2] == [
        ("slurm.extra={a: 1, b: 2}", 'x="1,2"', "y=[1,2]"),
        ("slurm.extra={a: 1, b: 2}", "x=3", "y=[1,2]"),
    ]
    assert [run.label for run in runs] == [
        "extraa_1_b_2-x1_2",
        "extraa_1_b_2-x3",
        "extraa_2-x1_2",
        "extraa_2-x3",
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["seed=1"], "nothing to sweep"),
        ([], "nothing to sweep"),
        (["seed=0,,1"], "a value of the sweep is empty"),
        (["seed=0,1,0"], "the same name"),
        (["seed"], "not an override"),
        (["a=" + ",".join(map(str, range(40))), "b=" + ",".join(map(str, range(40)))], "too many runs"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        swept_runs(words)


class Cluster:
    """A Slurm that queues, but for the words of a `submit`: runs by their names, with the job each waits for."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self.lives, self.done = place, dict[str, int](), set[str]()
        self.queued, self.room = list[tuple[str, str]](), 100
        monkeypatch.chdir(place)
        (place / "my.yaml").write_text(
            "{name: my, model: {path: 'builtin:tiny', reward: 'rule:arithmetic'}, data: {root: 'builtin:arithmetic'}}"
        )
        (place / "bin").mkdir()
        monkeypatch.setenv("PATH", str(place / "bin"), prepend=os.pathsep)
        monkeypatch.setattr("verl_slurm.submit.submission.plan_submission", self._plan)
        monkeypatch.setattr("verl_slurm.submit.submission.carry_out", self._carry_out)

    def submit(self, *words: str) -> int:
        script = f".submission_file_{'0' * 32}.sh"
        jobs = [(job, f"{self.place}/runs/my/{run}/logs/{script}") for run, job in self.lives.items()]
        lines = [f"{job}|{job}|{path}{WORK_DIR}{self.place}" for job, path in jobs]
        squeue = self.place / "bin" / "squeue"
        squeue.write_text("\n".join(["#!/bin/sh", "cat <<'END'", *lines, "END", ""]))
        squeue.chmod(0o700)
        self.queued.clear()
        return main(["submit", "my.yaml", "--sweep", *words])

    def _plan(self, _: Path, words: list[str], **__: Any) -> SubmissionPlan:
        root = Path(words[-1].partition("=")[2])
        if job := self.lives.get(root.name):
            raise Fenced("the run has a job already", where=root, found=f"job {job}, RUNNING")
        config = run_config(run_dir=self.place / root, name=root.name)
        why = "all steps are done" if root.name in self.done else ""
        return SubmissionPlan(config=config, cluster="slurm", new_run=True, done=why)

    def _carry_out(self, plan: SubmissionPlan, *, after: str) -> SubmissionResult:
        if len(self.lives) == self.room:
            raise SlurmRefused("Slurm refused the job", found="QOSMaxSubmitJobPerUserLimit")
        name = plan.config.name
        self.queued.append((name, after))
        self.lives[name] = job = 1 + max(self.lives.values(), default=0)
        return SubmissionResult(run_dir=str(plan.run_dir), cluster="slurm", job_id=str(job), new_run=True)


def test_runs_of_a_sweep_that_live_are_left_alone_and_the_same_line_queues_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    slurm = Cluster(tmp_path, monkeypatch)
    slurm.room = 2
    assert slurm.submit("seed=0,1,2,3") == ExitCode.SLURM_REFUSED
    assert "2 of 4 runs queued: jobs 1, 2; the same line queues the rest" in capfd.readouterr().err
    slurm.room = 100
    assert slurm.submit("seed=0,1,2,3") == ExitCode.OK
    assert slurm.queued == [("seed2", ""), ("seed3", "")]
    said = capfd.readouterr().err
    for job, name in ((1, "seed0"), (2, "seed1")):
        assert f"not queued: the run has a job already: runs/my/{name} (found job {job}, RUNNING)" in said
    # All that are left live: as for a run alone.
    slurm.done.add("seed0")
    del slurm.lives["seed0"]
    assert slurm.submit("seed=0,1,2,3") == ExitCode.FENCED
    assert "each run of the sweep that is not done has a job already" in capfd.readouterr().err


def test_runs_of_a_sweep_that_live_count_for_the_limit_of_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = Cluster(tmp_path, monkeypatch)
    slurm.room = 3
    slurm.submit("--at-once", "2", "seed=0,1,2,3")
    assert slurm.queued == [("seed0", ""), ("seed1", ""), ("seed2", "1")]
    slurm.room = 100
    assert slurm.submit("--at-once", "2", "seed=0,1,2,3,4") == ExitCode.OK
    assert slurm.queued == [("seed3", "2"), ("seed4", "3")]
    # Fewer than may run at the same time.
    slurm.lives = {"seed1": 2}
    slurm.done = {"seed0", "seed2", "seed3", "seed4"}
    assert slurm.submit("--at-once", "2", "seed=0,1,2,3,4,5,6") == ExitCode.OK
    assert slurm.queued == [("seed5", ""), ("seed6", "2")]
