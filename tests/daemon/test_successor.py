"""Another job where Slurm may not requeue this one: queued once, as the run asks, and never after a cancel."""

import asyncio
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from verl_slurm_daemon.allocation import slurm_job as module
from verl_slurm_daemon.allocation.slurm_job import SlurmAllocation
from verl_slurm_daemon.allocation.successor import queue_successor, successor_script

from tests.journals import append_event, read_events
from verl_slurm.base.errors import NotFound, SlurmMissing, SlurmRefused
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.load import parse_config
from verl_slurm.journal import files
from verl_slurm.runs.run_record import last_job
from verl_slurm.slurm.batch import AWAIT, awaiting, sbatch_parameters
from verl_slurm.slurm.requeue_rules import RequeueOutcome
from verl_slurm.slurm.slurm_environment import SlurmJob

CONFIG = parse_config(b"", "my.yaml", ("slurm.partition=gpu",))


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = RunPaths(private_dir(tmp_path / "my run"))
    private_dir(paths.logs)
    return paths


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An sbatch that notes its words and answers 38."""
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" >>{tmp_path}/said\n${{ANSWER:-echo 38}}\n")
    program.chmod(0o755)
    jobs = program.with_name("squeue")
    jobs.write_text('#!/bin/sh\necho "$JOBS"\n')
    jobs.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path / "said"


def test_the_job_that_follows_is_asked_for_as_the_run_is_and_once(run: RunPaths, said: Path) -> None:
    assert asyncio.run(queue_successor(run, CONFIG, "37")) == "38"
    assert asyncio.run(queue_successor(run, CONFIG, "37")) == "38"  # the agents of a dead lead ask, too
    words = said.read_text().splitlines()
    assert words.count("--parsable") == 1
    assert {"--dependency=afterany:37", "--partition=gpu", "--requeue", "--signal=B:USR1@120"} <= set(words)
    assert Path(words[-1]).stat().st_mode & 0o777 == 0o600
    jobs = files.read_history(run)
    assert (jobs.predecessor_of("38"), jobs.successor_of("37"), jobs.predecessor_of("37")) == ("37", "38", "")


def test_one_that_slurm_has_and_no_journal_knows_is_not_queued_again_but_written_down(
    run: RunPaths, said: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = run.logs / "successor_of_37.sh"
    monkeypatch.setenv("JOBS", f"40|40|/home/me/after.sh\n41|41|{script}\n42|42|{run.logs}/successor_of_3.sh")
    assert asyncio.run(queue_successor(run, CONFIG, "37")) == "41"
    assert not said.exists()
    assert last_job(run).job_id == "41"  # what `verl-slurm cancel` ends


def claimed_by(run: RunPaths, whom: str, number: int = 0) -> None:
    private_dir(run.control)
    (run.control / f"successor_of_37.{number}").write_text(whom)


def test_who_claimed_it_first_is_waited_for_and_its_answer_is_taken(run: RunPaths, said: Path) -> None:
    claimed_by(run, "another agent")
    looks = []

    async def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            append_event(run, "successor", job_id="40", cluster="slurm", after="37")

    assert asyncio.run(queue_successor(run, CONFIG, "37", sleep=sleep)) == "40"
    assert not said.exists()


def test_a_claimant_that_died_before_it_could_ask_loses_no_successor(run: RunPaths, said: Path) -> None:
    claimed_by(run, "a dead agent")
    claimed_by(run, "one that died after it", 1)
    looks = []

    async def sleep(seconds: float) -> None:
        looks.append(seconds)

    assert asyncio.run(queue_successor(run, CONFIG, "37", sleep=sleep)) == "38"
    assert said.read_text().splitlines().count("--parsable") == 1
    assert 8.0 < sum(looks) / 2 < 10.0, "longer than sbatch may take; well within KillWait"


def test_a_claimant_without_an_answer_asks_again_at_once_unless_another_has_lost_patience(
    run: RunPaths, said: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_: float) -> None:
        raise AssertionError("it waits for itself")

    monkeypatch.setenv("ANSWER", "exit 1")
    with pytest.raises(SlurmRefused):
        asyncio.run(queue_successor(run, CONFIG, "37", sleep=never))
    monkeypatch.setenv("ANSWER", "echo 38")
    claimed_by(run, "an impatient one", 1)
    with pytest.raises(AssertionError, match="waits"):
        asyncio.run(queue_successor(run, CONFIG, "37", sleep=never))
    (run.control / "successor_of_37.1").unlink()
    assert asyncio.run(queue_successor(run, CONFIG, "37", sleep=never)) == "38"


def test_what_sbatch_refuses_is_an_error_with_a_remedy(
    run: RunPaths, said: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANSWER", "exit 1")
    with pytest.raises(SlurmRefused, match="verl-slurm submit"):
        asyncio.run(queue_successor(run, CONFIG, "37"))
    assert read_events(run) == []


def test_the_script_quotes_what_a_shell_would_read_otherwise(run: RunPaths) -> None:
    odd = RunPaths(run.root.parent / "a b; touch $HOME 'x'")
    text = successor_script("/opt/my python/bin/python", odd)
    last = text.splitlines()[-1].removeprefix("exec ")
    assert shlex.split(last) == [
        "/opt/my python/bin/python",
        *["-P", "-m", "verl_slurm_daemon", "lead", "--run"],
        str(odd.root),
    ]
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_the_last_words_of_the_job_before_do_not_make_it_the_runs_job_again(run: RunPaths) -> None:
    append_event(run, "submitted", job_id="37", cluster="slurm")
    append_event(run, "successor", job_id="38", cluster="slurm", after="37")
    append_event(run, "ended", job_id="37", exit_code=25)
    assert last_job(run).job_id == "38"


def mine(run: RunPaths, number: str, **more: str) -> SlurmAllocation:
    environment = {
        "SLURM_JOB_ID": number,
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURMD_NODENAME": "n1",
    }
    job = SlurmJob.from_environ(environment | more)
    assert job is not None
    return SlurmAllocation(job, CONFIG, run)


class Forbidding:
    """A Slurm that may not requeue; the job before this one is in `state`."""

    def __init__(self, state: str = "TIMEOUT", array_task: str | None = None) -> None:
        self.state, self.array_task = state, array_task

    async def requeue(self, *_: object, **__: object) -> RequeueOutcome:
        return RequeueOutcome(kind="forbidden", detail="Requeue=0")

    async def config_and_time(self) -> object:
        raise SlurmMissing("does not answer")

    async def job(self, job_id: int) -> object:
        assert job_id == 37
        return self


HET = {"SLURM_HET_SIZE": "2"} | {
    f"SLURM_JOB_{name}_HET_GROUP_{number}": value
    for number in range(2)
    for name, value in (("NODELIST", f"n{number + 1}"), ("NUM_NODES", "1"))
}


@pytest.mark.scenario("USE20")
def test_a_job_that_may_not_be_requeued_is_followed_and_one_of_several_parts_is_not(
    run: RunPaths, said: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SlurmClient", Forbidding)
    for part in ({"SLURM_ARRAY_JOB_ID": "36", "SLURM_ARRAY_TASK_ID": "1"}, HET):
        answer = asyncio.run(mine(run, "37", **part).requeue())
        assert not isinstance(answer, str)
        assert answer.exit_code is ExitCode.REQUEUE_FAILED
    assert not said.exists()
    answer = asyncio.run(mine(run, "37").requeue())
    assert not isinstance(answer, str)
    assert answer.exit_code is ExitCode.REQUEUED
    assert answer.detail == "job 38 is queued and follows this one: Requeue=0"


@pytest.mark.parametrize(("state", "stops"), [("CANCELLED", True), ("TIMEOUT", False), ("PREEMPTED", False)])
def test_a_cancel_of_the_job_before_is_final(
    run: RunPaths, state: str, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    append_event(run, "successor", job_id="38", cluster="slurm", after="37")
    monkeypatch.setattr(module, "SlurmClient", lambda: Forbidding(state))
    assert bool(asyncio.run(mine(run, "38").cancelled_before())) is stops
    assert not asyncio.run(mine(run, "39").cancelled_before())  # nobody's successor


@pytest.mark.parametrize(
    ("state", "array_task", "stops"),
    [
        ("CANCELLED", "36_1", True),
        ("COMPLETED", "36_1", False),  # it ended before the cancel reached it
        ("CANCELLED", "30_8", False),  # of a chain before this one
        ("CANCELLED", None, False),
    ],
)
def test_a_cancelled_task_of_a_chain_is_followed_by_no_other(
    run: RunPaths, state: str, array_task: str | None, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SlurmClient", lambda: Forbidding(state, array_task))
    task = {"SLURM_ARRAY_JOB_ID": "36", "SLURM_ARRAY_TASK_ID": "2"}

    def cancelled_before() -> str:
        append_event(run, "started", job_id="38", cluster="slurm")  # a lead asks when it has said so
        return asyncio.run(mine(run, "38", **task).cancelled_before())

    append_event(run, "started", job_id="37", cluster="slurm")
    assert not cancelled_before()
    append_event(run, "started", job_id="37", cluster="slurm")
    append_event(run, "cancel_asked")
    assert bool(cancelled_before()) is stops
    append_event(run, "submitted", job_id="39", cluster="slurm")  # its user wants it to go on
    assert not cancelled_before()


def test_no_later_task_of_a_cancelled_chain_goes_on_either(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one only says so and ends; by the time the third one starts, Slurm may have forgotten the first."""
    slurm = Forbidding("CANCELLED", "36_1")
    monkeypatch.setattr(module, "SlurmClient", lambda: slurm)

    def cancelled_before(number: str) -> str:
        task = {"SLURM_ARRAY_JOB_ID": "36", "SLURM_ARRAY_TASK_ID": "2"}
        append_event(run, "started", job_id=number, cluster="slurm")
        return asyncio.run(mine(run, number, **task).cancelled_before())

    append_event(run, "started", job_id="37", cluster="slurm", array="36")
    append_event(run, "cancel_asked")
    for number in ("38", "39"):
        assert cancelled_before(number)
        append_event(run, "ended", job_id=number, exit_code=int(ExitCode.CANCELLED))

    async def forgotten(_: int) -> object:
        raise NotFound("Slurm does not know the job")

    monkeypatch.setattr(slurm, "job", forgotten)
    assert not cancelled_before("40"), "nobody has said what became of the first"
    append_event(run, "ended", job_id="37", exit_code=int(ExitCode.CANCELLED))
    assert cancelled_before("41")
    another = {"SLURM_ARRAY_JOB_ID": "50", "SLURM_ARRAY_TASK_ID": "1"}
    assert not asyncio.run(mine(run, "51", **another).cancelled_before()), "queued by hand, later"
    append_event(run, "restart", job_id="42")  # the run went on
    assert not cancelled_before("43")


def test_no_signal_that_is_ours_to_send_kills_a_batch_script_before_the_daemon_listens(run: RunPaths) -> None:
    setup = sbatch_parameters(CONFIG, waits=awaiting("python", run))["setup"]
    assert isinstance(setup, list)
    scripts = [successor_script("python", run), "\n".join(setup)]
    scripts += [path.read_text() for path in (Path(__file__).parents[2] / "sbatch").glob("*.sbatch")]
    traps = [line for script in scripts for line in script.splitlines() if line.startswith("trap ''")]
    assert len(traps) == len(scripts) > 6
    assert {frozenset(line.split()[2:]) for line in traps} == {frozenset(("USR1", "USR2", "TERM", "CONT"))}
    # And each waits for what it starts.
    assert all(AWAIT in script for script in scripts)
