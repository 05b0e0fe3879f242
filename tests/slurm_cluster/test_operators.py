"""What people do to a job by hand: suspend, hold, release, set a node down, kill the steps, cancel what waits."""

from pathlib import Path

import pytest

from tests.harness import ONE_RANK, LiveRun, ends_like
from tests.journals import append_event

pytestmark = [pytest.mark.slurm, pytest.mark.torch]


@pytest.mark.soak  # the causes: test_moments.py; suspended: the campaign
@pytest.mark.long
@pytest.mark.scenario("L07")
def test_a_suspended_and_a_held_job_are_not_requeued_the_remedy_is_named_and_they_go_on(
    run: LiveRun, twin: LiveRun
) -> None:
    run.submit()
    run.wait_phase("generate")
    run.slurm("scontrol", "suspend", run.job_id)
    refused = run.cli("requeue", str(run.paths.root), check=False)
    run.slurm("scontrol", "resume", run.job_id)
    assert refused.returncode == 14
    assert "SUSPENDED" in refused.stderr
    assert f"scontrol resume {run.job_id}" in refused.stderr

    run.wait_phase("update")
    run.slurm("scontrol", "requeuehold", run.job_id)
    assert run.wait_event("cause")["cause"] == "requeued", run.story()
    saved = run.wait_event("saved", emergency=True)
    run.wait_event("ended", exit_code=25)
    assert not run.events("requeue"), "somebody has asked already"
    run.wait_slurm(lambda facts: facts.state == "PENDING")
    refused = run.cli("requeue", str(run.paths.root), check=False)
    assert refused.returncode == 14
    assert f"scontrol release {run.job_id}" in refused.stderr

    run.slurm("scontrol", "release", run.job_id)
    run.wait_event("restart", resume=saved["name"])
    assert len(run.events("restart")) == 2, "suspended and resumed: the same ranks went on"
    ends_like(run, twin)


@pytest.mark.long
@pytest.mark.scenario("FLT-H")
@pytest.mark.usefixtures("ranks_without_torch")
def test_a_run_whose_patience_ended_is_held_and_goes_on_by_itself_after_its_release(run: LiveRun) -> None:
    run.argv += ONE_RANK
    run.submit()
    run.wait_phase("generate")
    for _ in range(4):  # attempts whose time limit came before their ranks trained
        append_event(run.paths, "restart", number=1, progress="start+0")
        append_event(run.paths, "cause", cause="time_limit")
    run.cli("requeue", str(run.paths.root))
    held = run.wait_event("held")
    assert "TimeLimit=" in held["reason"]
    run.wait_slurm(lambda facts: facts.state == "PENDING" and "held" in (facts.reason or "").lower())
    said = run.cli("status", str(run.paths.root), check=False)
    assert f"scontrol release {run.job_id}" in said.stdout + said.stderr
    run.slurm("scontrol", "release", run.job_id)
    run.wait_event("ended", exit_code=0)


@pytest.mark.scenario("L07")
@pytest.mark.usefixtures("ranks_without_torch")
def test_a_job_that_is_held_and_cancelled_while_it_waits_for_its_next_life_stays_cancelled(
    run: LiveRun,
) -> None:
    run.argv += [*ONE_RANK, "daemon.requeue_delay_s=3000"]
    run.submit()
    run.wait_phase("generate")
    run.cli("requeue", str(run.paths.root))
    saved = run.wait_event("ended", exit_code=25)["checkpoint"]
    run.wait_slurm(lambda facts: facts.state == "PENDING")
    run.slurm("scontrol", "hold", run.job_id)
    run.cli("cancel", str(run.paths.root))
    facts = run.wait_slurm(lambda facts: facts.is_over)
    assert facts.state == "CANCELLED"
    assert run.cli("watch", str(run.paths.root), check=False).returncode == 23
    # And what its user starts again goes on where it was.
    former, seen = run.job_id, len(run.events())
    run.submit()
    assert run.job_id != former
    run.wait_event("restart", after=seen, resume=saved)


@pytest.mark.soak
@pytest.mark.scenario("L03")
def test_a_warning_of_the_time_limit_that_all_steps_get_kills_nobody_and_is_one_warning(
    run: LiveRun, twin: LiveRun
) -> None:
    """`--signal=USR1@N` without `B:`: every process of every step is signalled, and the batch process is not."""
    run.submit()
    run.wait_phase("generate")
    run.slurm("scontrol", "update", f"jobid={run.job_id}", "EndTime=now+150seconds")
    run.slurm("scancel", "-s", "USR1", run.job_id)
    cause = run.wait_event("cause")
    assert cause["cause"] == "time_limit", run.story()
    assert cause["evidence"].startswith("SIGUSR1 to node "), cause
    saved = run.wait_event("saved", emergency=True)
    run.wait_event("verified", name=saved["name"])
    run.wait_event("ended", exit_code=25)
    run.slurm("scontrol", "update", f"jobid={run.job_id}", "TimeLimit=20")
    run.wait_event("restart", resume=saved["name"])
    ends_like(run, twin)
    assert not run.events("crash"), run.story()
    assert run.facts().restarts == 1


REWARD = """
import os


def score(prompts, responses, answers):
    os.write(2, b"RuntimeError: no judge here\\n")
    os._exit(3)  # an exception would end the run at once: it is the user's own
"""


@pytest.mark.long
@pytest.mark.scenario("L08")
def test_a_run_that_crashes_at_every_start_is_given_up_with_its_reason(run: LiveRun, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    run.argv += [*ONE_RANK, f"model.reward=python:{reward}:score"]
    run.argv += ["daemon.crash_budget=1", "daemon.no_progress_limit=2"]
    run.submit()
    ended = run.wait_end(exit_code=21)
    assert "in a row crashed without anything new" in ended["reason"]
    crashes = run.events("crash")
    assert all("no judge here" in event["detail"] for event in crashes), run.story()
    assert len(run.events("started")) == 2, "in place, then in another allocation, and then no more"
    assert run.wait_slurm(lambda facts: facts.is_over).restarts == 1
