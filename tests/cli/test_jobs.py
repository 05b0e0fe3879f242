"""What `requeue` says of a job that cannot be requeued now, and of no job; what it does: test_submit_slurm.py."""

import errno
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.builders import owner
from tests.cli.conftest import fail_storage
from tests.journals import append_event
from tests.many_runs import Kind, make_run
from verl_slurm.base.errors import Fenced, SlurmMissing
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.processes import birth_of
from verl_slurm.runs.liveness import job_state, refuse_living, way_on, what_next
from verl_slurm.runs.requests import cancel_run
from verl_slurm.runs.run_record import last_job
from verl_slurm.slurm.parse import parse_job

GOLDEN = Path(__file__).parent.parent / "slurm" / "golden"


@pytest.mark.parametrize(
    ("moment", "reason", "way"),
    [
        ("suspended", None, "an operator has to: scontrol resume 1"),
        ("pending", "job_requeued_in_held_state", "scontrol release 1"),
        ("pending", "JobHeldUser", "scontrol release 1"),
        ("pending", "JobHeldAdmin", "an operator has to: scontrol release 1"),
        ("pending", "PartitionTimeLimit", "scontrol update JobId=1 TimeLimit=MINUTES"),
        ("pending", "QOSMaxWallDurationPerJobLimit", "scontrol update JobId=1 TimeLimit=MINUTES"),
        ("pending", "QOSMaxCpuMinutesPerJobLimit", "scontrol update JobId=1 TimeLimit=MINUTES"),
        ("pending", "AssocMaxCPUMinutesPerJobLimit", "scontrol update JobId=1 TimeLimit=MINUTES"),
        (
            "pending",
            "QOSMaxCpuPerJobLimit",
            "scontrol update JobId=1 QOS=OTHER (the limits: sacctmgr show qos",
        ),
        ("pending", "QOSMinGRES", "scontrol update JobId=1 QOS=OTHER"),
        ("pending", "AssocMaxGRESPerJob", "scontrol update JobId=1 Account=OTHER"),
        ("pending", "AssocGrpCPUMinutesLimit", "scontrol update JobId=1 Account=OTHER"),
        ("pending", "QOSGrpGRESMinutes", "scontrol update JobId=1 QOS=OTHER"),
        ("pending", "JobHoldMaxRequeue", "scontrol release 1"),
        ("pending", "ReqNodeNotAvail,_Reserved_for_maintenance", "JobId=1 TimeLimit=MINUTES"),
        ("pending", "QOSMaxCpuPerUserLimit", ""),
        ("pending", "AssocGrpCPURunMinutesLimit", ""),
        ("pending", "PartitionDown", "it starts once the partition preemptible is UP again"),
        ("pending", "PartitionNodeLimit", "scontrol update JobId=1 Partition=OTHER"),
        ("pending", "BadConstraints", "scontrol update JobId=1 Features=OTHER"),
        ("pending", "DependencyNeverSatisfied", "scontrol update JobId=1 Dependency="),
        *(
            (
                "pending",
                reason,
                "scontrol update JobId=1 ReservationName=; scontrol release 1 (the limits: scontrol",
            )
            for reason in (
                "ReservationDeleted",
                "ReservationInvalid",
                "Reservation_workshop_was_deleted",
                "Reservation workshop is invalid",
            )
        ),
        ("pending", "Reservation", ""),
        ("pending", "PartitionConfig", "scontrol update JobId=1 Partition=OTHER"),
        ("pending", "MaxMemPerLimit", "scontrol update JobId=1 MinMemoryNode=MB"),
        ("pending", "MaxJobsPerAccount", ""),
        ("pending", "job_requeued_in_special_exit_state", "scontrol release 1"),
        ("pending", "License_request_'a:9'_is_no_longer_valid,_holding_job", "scontrol release 1"),
        ("pending", "BurstBufferOperation", "scontrol release 1"),
        ("pending", "Job's_account_not_permitted_to_use_this_partition_(p_allows_a_not_b)", "Account=OTHER"),
        ("pending", "Job's_QOS_not_permitted_to_use_this_partition_(p_allows_a_not_b)", "QOS=OTHER"),
        (
            "pending",
            "uid_7_not_in_group_permitted_to_use_this_partition_(p)._groups_allowed:_a",
            "Partition=OTHER",
        ),
        ("pending", "Resources", ""),
        ("running", None, ""),
    ],
)
def test_a_job_that_stands_still_has_a_way_on(moment: str, reason: str | None, way: str) -> None:
    facts = parse_job((GOLDEN / f"{moment}.txt").read_text(), 1)
    told = way_on(msgspec.structs.replace(facts, reason=reason))
    assert way in told
    assert bool(way) == bool(told)
    assert ("an operator" in told) is ("an operator" in way), "whom Slurm lets do it"
    if moment == "pending":
        stands = bool(way) and reason not in ("PartitionDown", "ReqNodeNotAvail,_Reserved_for_maintenance")
        assert what_next(msgspec.structs.replace(facts, reason=reason)) == (told, stands)


def test_a_job_whose_steps_were_stopped_by_a_signal_has_a_way_on() -> None:
    facts = parse_job((GOLDEN / "running.txt").read_text(), 1)
    assert "scancel --signal=CONT 1" in way_on(msgspec.structs.replace(facts, state="STOPPED"))


def test_a_job_that_was_requeued_in_a_special_state_is_held_and_not_over() -> None:
    facts = parse_job((GOLDEN / "pending.txt").read_text(), 1)
    held = msgspec.structs.replace(facts, state="SPECIAL_EXIT", reason="job_requeued_in_held_state")
    assert (held.is_waiting, held.is_over) == (True, False)
    assert way_on(held) == "scontrol release 1"


def on_a_cluster_with(job: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Slurm that shows `job` for every question; returns the file of what it was asked to do."""
    (place / "bin").mkdir()
    (place / "job.txt").write_text(job)
    asked = place / "asked"
    programs = {
        "scontrol": f'[ "$1" = show ] && exec cat {place}/job.txt\necho "$0 $*" >> {asked}',
        "scancel": f'echo "$0 $*" >> {asked}',
        "squeue": "",
    }
    for name, script in programs.items():
        (place / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (place / "bin" / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(place / "bin"), prepend=os.pathsep)
    return asked


def test_status_says_how_a_job_that_is_held_goes_on(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm holds a job by itself, too, when a node refuses to launch it."""
    run = make_run(tmp_path / "run", "running", job_id="1").root
    job = re.sub(r"Reason=\S+", "Reason=launch_failed_requeued_held", (GOLDEN / "pending.txt").read_text())
    words = "verl-slurm: 2026-11-27T09:00 n1: python fails: no such file"
    job = re.sub("Command=.*", f"Command={run}/logs/1.sh\n   Comment={words}", job)
    on_a_cluster_with(job, tmp_path, monkeypatch)
    append_event(RunPaths(run), "held", stuck=1, reason="the job has 1 of the 2 nodes")
    said = cli("status", run).out
    assert "held         the job has 1 of the 2 nodes\n" in said
    assert f"PENDING, launch_failed_requeued_held; {words}; scontrol release 1" in said, said
    assert "state        held; running when its daemon last said so" in said
    assert cli("status", run, "--json").json["state"] == "held"


@pytest.mark.parametrize("mode", ["SUSPEND,GANG", "REQUEUE"])
def test_a_job_that_slurm_itself_suspended_for_another_does_not_stand_still(
    mode: str, cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", "running", job_id="1").root
    job = re.sub("Command=.*", f"Command={run}/logs/1.sh", (GOLDEN / "suspended.txt").read_text())
    on_a_cluster_with(f"{job}\nPreemptMode = {mode}\n", tmp_path, monkeypatch)
    said, by_itself = cli("status", run).out, "if another job preempted it, Slurm resumes it by itself"
    assert "scontrol resume 1" in said
    resumed = mode == "SUSPEND,GANG"
    assert (by_itself in said) is resumed
    # What `watch` warns of, and what is the first remedy of `submit`.
    state = job_state(RunPaths(run), last_job(RunPaths(run)))
    assert state.way_on == ("" if resumed else "an operator has to: scontrol resume 1")
    assert "state        suspended; running when its daemon last said so" in said
    assert (by_itself in cli("requeue", run).error) is resumed


@pytest.mark.parametrize("command", ["status", "cancel", "logs"])
def test_of_a_run_that_was_moved_away_the_job_that_lives_on_is_named(
    command: str, cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_cluster_with("", tmp_path, monkeypatch)
    run = tmp_path / "gone"
    (tmp_path / "bin/squeue").write_text(f"#!/bin/sh\necho '7|7|{run}/logs/.submission_file_1.sh'\n")
    said = cli(command, run)
    assert said.code == ExitCode.NOT_FOUND
    assert "job 7 of a run that was here" in said.err, said
    assert "scancel 7" in said.err


def test_status_says_why_attempts_could_not_begin_until_one_trains(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", "running", job_id="1").root
    job = re.sub("Command=.*", f"Command={run}/logs/1.sh", (GOLDEN / "running.txt").read_text())
    on_a_cluster_with(job, tmp_path, monkeypatch)
    append_event(RunPaths(run), "start_failed", before=1, detail="x is a link: move it back")
    append_event(RunPaths(run), "started", attempt=3)
    append_event(RunPaths(run), "warning", topic="rates", text="the program's lr=1e-05 (0.01) is not used")
    said = cli("status", run).out
    assert "WARNING, rates: the program's lr=1e-05 (0.01) is not used" in said
    assert (
        "not begun    2 attempts in a row, and the next comes by itself: x is a link: move it back\n" in said
    )
    append_event(RunPaths(run), "warning", attempt=3, topic="start", text="no answer: tries again in 60 s")
    assert "not begun    the start waits: no answer: tries again in 60 s\n" in cli("status", run).out
    (tmp_path / "job.txt").write_text(job.replace("JobState=RUNNING", "JobState=CANCELLED"))
    assert "not begun" not in cli("status", run).out, "none comes any more"
    (tmp_path / "job.txt").write_text(job)
    append_event(RunPaths(run), "ended", attempt=3, exit_code=23, exit="", reason="")
    assert "not begun" not in cli("status", run).out, "none comes any more"
    append_event(RunPaths(run), "started", attempt=4)
    append_event(RunPaths(run), "training", attempt=4)
    assert "not begun" not in cli("status", run).out


@pytest.mark.parametrize(("restarts", "said"), [(3, False), (8, True)])
def test_starts_of_which_no_daemon_knows_are_said_of_a_job_that_waits(
    restarts: int, said: bool, cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm itself requeues a job whose PrologSlurmctld fails, again and again."""
    run = make_run(tmp_path / "run", "queued", job_id="1").root
    append_event(RunPaths(run), "started", job_id="1", attempt=1, requeues=2)
    job = re.sub("Command=.*", f"Command={run}/logs/1.sh", (GOLDEN / "pending.txt").read_text())
    on_a_cluster_with(job.replace("Restarts=0", f"Restarts={restarts}"), tmp_path, monkeypatch)
    words = "Slurm has started it 5 times since its last word, in vain"
    assert (words in cli("status", run).out) is said


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED"])
@pytest.mark.parametrize("kind", ["queued", "running"])
def test_a_job_that_is_over_by_slurm_goes_on_by_submit_whatever_the_journal_has(
    kind: Kind, state: str, cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", kind, job_id="1").root
    job = re.sub("Command=.*", f"Command={run}/logs/1.sh", (GOLDEN / "running.txt").read_text())
    on_a_cluster_with(re.sub(r"JobState=\S+", f"JobState={state}", job), tmp_path, monkeypatch)
    silent = cli("status", run).out
    assert ("its script wrote nothing: " in silent) is (state == "FAILED"), (
        "no TaskProlog kept it from its start"
    )
    (run / "logs").mkdir()
    (run / "logs/1_0_log.out").touch()
    said = cli("status", run).out
    assert f"the job is over ({state}); see verl-slurm logs {run}; `verl-slurm submit {run}` goes on" in said
    assert "goes on by itself" not in said
    assert said.count("\nended") == 1


@pytest.mark.parametrize("kind", ["cancelled", "failed"])
def test_a_job_that_was_requeued_after_its_end_waits_by_every_command(
    kind: Kind, cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", kind, job_id="1").root
    job = re.sub("Command=.*", f"Command={run}/logs/1.sh", (GOLDEN / "pending.txt").read_text())
    asked = on_a_cluster_with(job, tmp_path, monkeypatch)
    (tmp_path / "bin/squeue").write_text(f"#!/bin/sh\necho '1|PENDING|BeginTime|{run}/logs/1.sh|//|/'\n")
    end = "cancelled" if kind == "cancelled" else "failed with 22"
    words = f"requeued after its end ({end}), by whom is not known, and trains when it starts"
    said = cli("status", run).out
    assert "1 (slurm): PENDING" in said
    assert said.count("\nended") == said.count(words) == 1
    assert f"verl-slurm submit {run}" not in said
    listed = cli("list", tmp_path)
    assert "queued" in listed.out
    assert words in listed.err
    for facts in (cli("status", run, "--json").json, *cli("list", tmp_path, "--json").json):
        assert (facts["job_over"], facts["outcome"]) == (False, None)
        assert words in facts["ended"]
    with pytest.raises(Fenced, match="job 1, PENDING"):
        refuse_living(RunPaths(run))
    assert cli("cancel", run).code == 0
    assert asked.read_text().split()[-1] == "1"


@pytest.mark.parametrize("words", [["cancel"], ["requeue"]], ids=" ".join)
def test_a_foreign_job_without_a_script_that_has_the_runs_number_is_left_alone(
    words: list[str], cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sbatch --wrap`, after slurmctld has lost its state: it was called the run's, and `scancel 1` proposed."""
    run = make_run(tmp_path / "run", "running", job_id="1").root
    job = re.sub("Command=.*", "Command=(null)", (GOLDEN / "running.txt").read_text())
    asked = on_a_cluster_with(job, tmp_path, monkeypatch)
    assert "the job is over (GONE)" in cli("status", run).out
    refuse_living(RunPaths(run))
    said = cli(*words, run)
    assert said.code == ExitCode.SLURM_REFUSED
    assert (
        f"leave it: another job has its number, and the run's is over; `verl-slurm submit {run}`" in said.err
    )
    assert "scancel" not in said.err
    # A copy of a run names its job, too, and `submit` would refuse it.
    (run / "run.yaml").write_text("run_dir: /the/original\n")
    assert cli("status", run, "--json").json["misplaced"].startswith("a copy, or a run that was moved")
    for said in (cli("status", run).out, cli(*words, run).err):
        assert "a copy, or a run that was moved" in said
        assert f"verl-slurm submit {run}`" not in said
    assert not asked.exists()


def test_a_local_run_is_told_nothing_of_a_slurm_that_is_away(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", cluster="local", job_id="999999999", host=socket.gethostname()).root
    on_a_cluster_with("", tmp_path, monkeypatch)
    away = "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1\n"
    (tmp_path / "bin/squeue").write_text(away)
    said = cli("status", run).out
    assert "does not answer" not in said
    assert f"the job is over (GONE); see verl-slurm logs {run}" in said


ASKING = (
    ["cancel", "{}"],
    ["requeue", "{}"],
    ["requeue", "--now", "{}"],
    ["update-reward", "--checkpoint", "{}", "--new-model", "rule:arithmetic"],
)


@pytest.mark.scenario("SEC14")
@pytest.mark.parametrize("words", ASKING, ids=" ".join)
def test_a_journal_has_no_power_over_another_job(
    words: list[str], cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", "running", job_id="1").root
    asked = on_a_cluster_with((GOLDEN / "running.txt").read_text(), tmp_path, monkeypatch)
    result = cli(*(word.format(run) for word in words))
    assert not asked.exists(), asked.read_text()
    assert "events.jsonl names a job of which Slurm does not say" in result.err
    assert "cancel_asked" not in (run / "events.jsonl").read_text()
    assert result.code == (ExitCode.OK if words[0] == "update-reward" else ExitCode.SLURM_REFUSED)


@pytest.mark.scenario("SEC14")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("Command", "{}/logs/1.sh"),
        ("Command", "{}/../by_link/logs/1.sh"),
        ("Command", "/opt/sbatch/single_node.sbatch {}"),
        ("Command", "/opt/sbatch/chain.sbatch a run"),
    ],
)
def test_cancel_ends_the_job_that_slurm_ties_to_the_run(
    field: str, value: str, cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "a run", "running", job_id="1").root
    (tmp_path / "by_link").symlink_to("a run")
    fields = {field: value.format(run), "WorkDir": str(tmp_path)}
    job = (GOLDEN / "running.txt").read_text()
    for name, text in fields.items():
        job = re.sub(f"{name}=.*", f"{name}={text}", job)
    asked = on_a_cluster_with(job, tmp_path, monkeypatch)
    result = cli("cancel", run)
    assert result.code == 0, result.err
    assert asked.read_text().split()[-1] == "1"


def test_the_job_of_a_run_that_was_moved_is_not_called_gone(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run_old", "running", job_id="1").root
    script = tmp_path / "run/logs" / f".submission_file_{'0' * 32}.sh"
    job = re.sub("Command=.*", f"Command={script}", (GOLDEN / "running.txt").read_text())
    on_a_cluster_with(job, tmp_path, monkeypatch)
    said = cli("status", run).out
    assert "GONE" not in said
    assert f"it is a run's at {tmp_path}/run, which is not here; if that is this run, move it back" in said


@pytest.mark.parametrize(("logs", "reached"), [("run/logs", True), ("other/logs", False)])
def test_a_job_with_the_runs_own_script_is_its_job_after_the_cluster_was_renamed(
    logs: str, reached: bool, cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", "running", job_id="1").root
    append_event(RunPaths(run), "submitted", job_id="1", slurm="former")
    script = tmp_path / logs / f".submission_file_{'0' * 32}.sh"
    job = re.sub("Command=.*", f"Command={script}", (GOLDEN / "running.txt").read_text())
    asked = on_a_cluster_with(f"{job}\nClusterName = new\n", tmp_path, monkeypatch)
    (tmp_path / "bin/squeue").write_text(f"#!/bin/sh\necho '1|RUNNING|None|{script}'\n")
    assert ("on former" in cli("list", tmp_path).out) is not reached
    assert ("it is of Slurm cluster former" in cli("status", run).out) is not reached
    assert (cli("cancel", run).code == ExitCode.OK and asked.exists()) is reached


def test_a_job_that_was_submitted_by_another_mount_is_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", "running", job_id="1")
    (tmp_path / "home").mkdir()
    job = re.sub("Command=.*", f"Command={tmp_path}/home/logs/1.sh", (GOLDEN / "running.txt").read_text())
    asked = on_a_cluster_with(job, tmp_path, monkeypatch)
    if os.geteuid() != 0 or subprocess.call(["mount", "--bind", run.root, tmp_path / "home"]):
        pytest.skip("NOT RUN: mounting needs root")
    try:
        assert cancel_run(run) == "1"
    finally:
        subprocess.run(["umount", tmp_path / "home"], check=True)
    assert asked.read_text().split()[-1] == "1"


SILENCE = "echo 'scancel: error: Unable to contact slurm controller (connect failure)' >&2; exit 1"


def of_a_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    run = make_run(place / "run", "running", job_id="1")
    job = re.sub("Command=.*", f"Command={run.root}/logs/1.sh", (GOLDEN / "running.txt").read_text())
    on_a_cluster_with(job, place, monkeypatch)
    return run


def test_cancel_asks_again_while_slurm_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = of_a_run(tmp_path, monkeypatch)
    program, first = tmp_path / "bin" / "scancel", tmp_path / "first"
    program.write_text(
        f"#!/bin/sh\n[ -e {first} ] || {{ touch {first}; {SILENCE}; }}\necho $1 > {tmp_path}/asked\n"
    )
    assert cancel_run(run) == "1"
    assert (tmp_path / "asked").read_text() == "1\n"
    assert run.events.read_text().count("cancel_asked") == 1


@pytest.mark.parametrize(
    ("call", "number"), [("write", errno.ENOSPC), ("fsync", errno.EDQUOT), ("open", errno.EROFS)]
)
@pytest.mark.parametrize("command", ["cancel", "requeue"])
def test_a_journal_that_takes_no_line_keeps_no_request_from_the_job(
    cli: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    call: str,
    number: int,
) -> None:
    run = of_a_run(tmp_path, monkeypatch)
    fail_storage(call, number, "events.jsonl", monkeypatch)
    result = cli(command, run.root)
    assert result.code == 0, result.err
    asked = (tmp_path / "asked").read_text().rpartition("/")[2].split()
    assert (asked[0], asked[-1]) == ("scancel", "1")
    assert f"the {command} of job 1 could not be written down: [Errno {number}]" in result.error
    assert "chain" not in result.error


def test_a_cancel_that_is_not_written_down_names_what_ends_the_chain(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = of_a_run(tmp_path, monkeypatch)
    job = (tmp_path / "job.txt").read_text()
    (tmp_path / "job.txt").write_text(job.replace("JobId=1 ", "JobId=1 ArrayJobId=7 ArrayTaskId=1 "))
    fail_storage("write", errno.ENOSPC, "events.jsonl", monkeypatch)
    assert "`scancel 7` ends all of them" in cli("cancel", run.root).error


def test_a_program_is_warned_of_a_cancel_that_is_not_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = of_a_run(tmp_path, monkeypatch)
    fail_storage("write", errno.ENOSPC, "events.jsonl", monkeypatch)
    with pytest.warns(UserWarning, match="could not be written down"):
        assert cancel_run(run) == "1"


def test_without_slurm_no_requeue_is_signalled_that_is_not_written_down(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lead would take the signal for a preemption, with 30 s to save."""
    with subprocess.Popen(
        [sys.executable, "-c", "input()", "lead", "--run", "run"], cwd=tmp_path, stdin=subprocess.PIPE
    ) as lead:
        job_id = f"local-{lead.pid}"
        run = make_run(tmp_path / "run", "running", cluster="local", job_id=job_id, host=socket.gethostname())
        claim = owner(job_id=job_id, pid=lead.pid, born=birth_of(lead.pid))
        write_file(run.attempt, msgspec.json.encode(claim))
        fail_storage("write", errno.ENOSPC, "events.jsonl", monkeypatch)
        result = cli("requeue", run.root)
        assert (result.code, str(run.events) in result.error) == (ExitCode.NO_ROOM, True)
        assert lead.poll() is None
        lead.communicate(b"\n")
    assert lead.returncode == 0


@pytest.mark.parametrize("own", ["afterany:18(unfulfilled)", "(null)"])
@pytest.mark.parametrize("refused", [False, True])
def test_a_cancel_of_a_waiting_run_of_a_sweep_keeps_the_limit_or_says_that_it_is_gone(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, refused: bool
) -> None:
    """Job 20 is the sweep's. The run's own successor, a job that is no run, and one elsewhere wait for the end."""
    run = make_run(tmp_path / "seed1", "running", job_id="1").root
    job = re.sub("Command=.*", f"Command={run}/logs/1.sh", (GOLDEN / "pending.txt").read_text())
    asked = on_a_cluster_with(job.replace("Dependency=(null)", f"Dependency={own}"), tmp_path, monkeypatch)
    script = f".submission_file_{'0' * 32}.sh"
    waiting = (
        f"20|singleton(unfulfilled),afterany:1(unfulfilled)|{tmp_path}/seed2/logs/{script}",
        f"21|afterany:1(unfulfilled)|{run}/logs/successor_of_1.sh",
        f"22|afterany:1(unfulfilled)|{tmp_path}/seed2/logs/look.sh {run}",
        f"23|afterany:1(unfulfilled)|{tmp_path}/other/seed2/logs/{script}",
        f"24|afterany:18(unfulfilled)|{tmp_path}/seed3/logs/{script}",
        f"25|(null)|{tmp_path}/seed4/logs/{script}",
    )
    lines = "\n".join(waiting)
    (tmp_path / "bin" / "squeue").write_text(f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\n")
    if refused:
        with (tmp_path / "bin" / "scontrol").open("a") as program:
            program.write("echo 'slurm_update error: Job dependency problem' >&2\nexit 1\n")
    result = cli("cancel", run)
    assert result.code == ExitCode.OK, result.err
    done = [line.rpartition("/")[2] for line in asked.read_text().splitlines()]
    change = "scontrol update JobId=20 Dependency=singleton,afterany:18"
    waits = own != "(null)"
    assert done == [*([change] if waits else []), "scancel 1"]
    told = "the limit of --at-once no longer holds for job 20" if refused else "job 20 waited for job 1"
    assert (told in result.err) is waits
    assert (f"Job dependency problem); while it waits: {change}" in result.err) is (refused and waits)


@pytest.mark.parametrize(
    ("program", "what"), [("scontrol", "its job goes on"), ("scancel", "Slurm may have taken the cancel")]
)
def test_a_cancel_that_slurm_never_answers_says_that_the_run_goes_on_or_may(
    program: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = of_a_run(tmp_path, monkeypatch)
    (tmp_path / "bin" / program).write_text(f"#!/bin/sh\n{SILENCE}\n")
    with pytest.raises(SlurmMissing, match=f"{what}.*Unable to contact.*verl-slurm cancel .* again once"):
        cancel_run(run, patience_s=0)
    append_event(run, "ended", attempt=1, job_id="1", exit_code=0, exit="OK", reason="")
    with pytest.raises(SlurmMissing, match="has ended: nothing is done.*Unable to contact"):
        cancel_run(run, patience_s=0)


@pytest.mark.scenario("SEC14")
def test_a_claim_has_no_power_over_another_process_of_its_reader(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        job_id = f"local-{other.pid}"
        run = make_run(tmp_path / "run", "running", cluster="local", job_id=job_id, host=socket.gethostname())
        claim = owner(job_id=job_id, pid=other.pid, born=birth_of(other.pid))
        write_file(run.attempt, msgspec.json.encode(claim))
        result = cli("cancel", run.root)
        assert result.code == ExitCode.NOT_FOUND
        assert other.poll() is None
        other.communicate(b"\n")
    assert other.returncode == 0


@pytest.mark.parametrize("command", ["cancel", "requeue", "status", "logs"])
def test_an_unset_variable_is_not_the_run_in_the_working_directory(
    command: str, cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_run(tmp_path / "run", "done").root)
    assert cli(command, "").code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("kind", "found", "way"),
    [
        ("done", "job 999999999, done", "train.steps=N` goes on"),
        ("done of a loop", "job 999999999, done", "run` goes on, if it has more to do"),
        ("cancelled", "job 999999999, cancelled", "` starts it again"),
        ("running", "job 999999999, GONE", "` starts it again"),
    ],
)
@pytest.mark.parametrize("command", ["cancel", "requeue"])
def test_what_became_of_a_job_that_is_over_is_said_by_the_journal(
    command: str, kind: str, found: str, way: str, cli: Callable[..., Any], tmp_path: Path
) -> None:
    state: Any = kind.partition(" ")[0]
    run = make_run(tmp_path / "run", state, cluster="local", job_id="999999999", host=socket.gethostname())
    if "loop" in kind:
        run.run_yaml.write_text("trainer: {backend: command, command: [train.py]}\n")
    result = cli(command, run.root)
    assert result.code == ExitCode.NOT_FOUND
    assert found in result.error
    assert way in result.error


def test_a_run_without_its_run_yaml_is_no_stranger_and_its_job_can_be_cancelled(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", "running", job_id="1")
    job = re.sub("Command=.*", f"Command={run.logs}/1.sh", (GOLDEN / "running.txt").read_text())
    asked = on_a_cluster_with(job, tmp_path, monkeypatch)
    run.control.mkdir(exist_ok=True)
    write_file(run.trained_with, run.run_yaml.read_bytes())
    run.run_yaml.unlink()
    for command in ("status", "logs", "list", "watch", "requeue", "prune", "submit"):
        result = cli(command, run.root)
        assert result.code == ExitCode.NOT_FOUND, command
        assert f"`cp {run.trained_with} {run.run_yaml}`" in result.error
    assert "run.yaml is gone" in cli("list", tmp_path).out
    assert cli("cancel", run.root).code == ExitCode.OK
    assert asked.read_text().split()[-1] == "1"


def test_an_interrupted_cancel_says_that_the_job_may_go_on(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = of_a_run(tmp_path, monkeypatch).root
    (tmp_path / "bin" / "scancel").write_text(f"#!/bin/sh\nkill -INT {os.getpid()}\n")
    result = cli("cancel", run)
    assert result.code == ExitCode.INTERRUPTED
    assert (
        f"the job may go on; `verl-slurm status {run}` tells, `verl-slurm cancel {run}` ends it" in result.err
    )


@pytest.mark.parametrize("private", ["jobs,usage", "none"])
def test_a_job_that_slurm_hides_from_a_colleague_is_not_called_over(
    private: str, cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = of_a_run(tmp_path, monkeypatch).root
    (tmp_path / "bin" / "scontrol").write_text(
        f"""#!/bin/sh
        case "$*" in
        *config*) echo 'PrivateData             = {private}';;
        *) echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1;;
        esac"""
    )
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(run).st_uid + 1)
    said, [listed] = cli("status", run).out, cli("list", tmp_path, "--json").json
    if private == "none":
        assert "the job is over (GONE)" in said
        assert listed["state"] == "gone"
        return
    assert "UNKNOWN, Slurm shows you no jobs of other users (PrivateData)" in said
    assert "over" not in said
    assert listed["state"] == "running?"
    assert "its owner can do it" in cli("cancel", run).err
