"""A run has one job: however many submit it, on whichever cluster, and whatever sbatch answers."""

import asyncio
import errno
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.conftest import fail_storage
from tests.harness import ROOT
from tests.lanes import with_variants
from verl_slurm.base.errors import Fenced, NotFound, SlurmMissing, SlurmRefused, VerlSlurmError
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.journal import events as ev
from verl_slurm.journal.files import append_event, read_events
from verl_slurm.runs.liveness import job_state, queued_jobs
from verl_slurm.runs.requests import cancel_run
from verl_slurm.runs.run_record import last_job
from verl_slurm.slurm.runner import telling
from verl_slurm.slurm.slurm_client import SlurmClient
from verl_slurm.submit import submission
from verl_slurm.submit.checks.slurm_answers import judge_script
from verl_slurm.submit.executor import MayBeQueued
from verl_slurm.submit.submission import carry_out, plan_submission
from verl_slurm.submit.submission_plan import SubmissionPlan

GOLDEN = Path(__file__).parent.parent / "slurm" / "golden"


class Slurm:
    """A Slurm of shell scripts: `here` answers, and sbatch says `answer` after it has queued job 7."""

    def __init__(self, place: Path) -> None:
        self.place, self.run = place, RunPaths(place / "run")
        self.answer, self.queues, self.squeue = (
            "echo Submitted batch job 7",
            True,
            "cat {}/queue 2>/dev/null; true",
        )
        self.set_job("JobId=1 ")

    def set_job(self, text: str) -> None:
        """What `scontrol show job` says."""
        self.write(
            "scontrol",
            f"""case "$*" in
            *config*) echo 'ClusterName = here';;
            *) cat {self.place}/job;;
            esac""",
        )
        (self.place / "job").write_text(text)

    def write(self, name: str, script: str) -> None:
        private_dir(self.place / "bin")
        (self.place / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.place / "bin" / name).chmod(0o700)

    def plan(self, **options: Any) -> SubmissionPlan:
        queue = f'echo "7|7|$1" >> {self.place}/queue' if self.queues else ":"
        self.write(
            "sbatch", f'[ "$1" = --help ] && exit 0\necho x >> {self.place}/sent\n{queue}\n{self.answer}'
        )
        self.write("squeue", self.squeue.format(self.place))
        self.write("srun", "exit 1")
        words = [f"run_dir={self.run.root}", "code.tree=null"]
        return plan_submission(
            ROOT / "configs/pytorch_loop.yaml", words, cluster="slurm", ask_slurm=False, **options
        )

    @property
    def times_sent(self) -> int:
        return len((self.place / "sent").read_text().split()) if (self.place / "sent").exists() else 0


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return Slurm(tmp_path)


def running(run: RunPaths, number: int) -> str:
    """A job of this run, as scontrol shows it."""
    text = (GOLDEN / "running.txt").read_text().replace("JobId=1 ", f"JobId={number} ")
    return re.sub("Command=.*", f"Command={run.logs}/{number}.sh", text)


def test_of_two_submits_that_were_planned_at_once_one_queues_a_job(slurm: Slurm) -> None:
    carry_out(slurm.plan(), prepare_only=True)
    first, second = slurm.plan(), slurm.plan()
    carry_out(first)
    slurm.set_job(running(slurm.run, 7))
    with pytest.raises(Fenced, match="the run has a job already"):
        carry_out(second)
    assert slurm.times_sent == 1


@pytest.mark.parametrize(
    ("state", "reason", "way_on"),
    with_variants(
        ("PENDING", "job_requeued_in_held_state", "scontrol release 7"),
        ("SUSPENDED", "None", "scontrol resume 7"),
        ("PENDING", "PartitionTimeLimit", "scontrol update JobId=7 TimeLimit=MINUTES"),
        keep=1,
    ),
)
def test_a_submit_beside_a_job_that_stands_still_says_why_and_what_lets_it_go_on(
    slurm: Slurm, state: str, reason: str, way_on: str
) -> None:
    carry_out(slurm.plan())
    job = running(slurm.run, 7).replace("JobState=RUNNING Reason=None", f"JobState={state} Reason={reason}")
    slurm.set_job(job)
    said = refuses(slurm.plan)
    assert said.count(way_on) == 1
    assert (f"job 7, {state}" if reason == "None" else f"job 7, {state}, {reason}") in said


def test_a_full_queue_is_said_and_a_node_that_is_drained_is_waited_for(slurm: Slurm) -> None:
    slurm.answer = "echo 'allocation failure: Resource temporarily unavailable' >&2; exit 1"
    with pytest.raises(SlurmRefused, match="no further job for now.*MaxJobCount.*try again later"):
        judge_script(slurm.plan().config, "")
    slurm.answer = "echo 'allocation failure: Requested node configuration is not available' >&2; exit 1"
    config = slurm.plan().config
    asks = msgspec.structs.replace(
        config, slurm=msgspec.structs.replace(config.slurm, extra={"nodelist": "node2"})
    )
    partition = (
        "PartitionName=p Default=YES GraceTime=0 MaxTime=60 MaxNodes=9 TotalNodes=2 TotalCPUs=8 State=UP"
    )
    shown = f"{partition} PreemptMode=REQUEUE"
    slurm.write("scontrol", f'case "$*" in *hostnames*) echo node2;; *) echo "{shown}";; esac')
    for usable, said in {"node1 node2": "", "node1": "names node2, not usable now"}.items():
        lines = "".join(f"echo '{node}|idle||'; " for node in usable.split())
        slurm.write("sinfo", lines)
        if said:
            assert said in judge_script(asks, "")[0].text
        else:
            with pytest.raises(SlurmRefused, match="sinfo"):
                judge_script(asks, "")
    slurm.write("sinfo", ":")
    assert "nodes 0 can be used now" in judge_script(config, "")[0].text


@pytest.mark.parametrize("verdict", [True, False], ids=["sbatch --test-only", "sbatch"])
def test_an_sbatch_that_does_not_answer_is_said_while_submit_waits(slurm: Slurm, verdict: bool) -> None:
    told = slurm.place / "told"
    os.mkfifo(told)
    slurm.answer = f"read line < {told}; echo Submitted batch job 7; echo Job 7 to start at noon >&2"
    plan, said = slurm.plan(), threading.Event()

    def tell(line: str) -> None:
        if ("sbatch --test-only has" if verdict else "sbatch has") in line:
            said.set()
            told.write_text("\n")

    with telling(tell):
        if verdict:
            judge_script(plan.config, "")
        else:
            assert carry_out(plan).job_id == "7"
    assert said.is_set()


@pytest.mark.parametrize(
    "answer",
    with_variants(
        "kill -9 $$",
        "echo Stapelauftrag eingereicht",
        "echo 7",
        "echo 'Your job 3 of 5 is accepted.'; echo Submitted batch job 7",
        "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1",
        "echo Submitted batch job 7; exit 1",
        keep=2,
    ),
)
def test_a_job_that_is_queued_is_known_whatever_sbatch_answers(slurm: Slurm, answer: str) -> None:
    slurm.answer = answer
    assert carry_out(slurm.plan()).job_id == "7"
    assert last_job(slurm.run).job_id == "7"


def test_where_slurm_does_not_show_it_either_a_job_may_be_queued_and_the_run_stays(slurm: Slurm) -> None:
    slurm.answer, slurm.queues = "echo Stapelauftrag", False
    plan = slurm.plan()
    with pytest.raises(MayBeQueued, match=r"a job may be queued.*squeue --me"):
        carry_out(plan)
    assert slurm.run.run_yaml.exists()
    # It comes to light later: the next submit queues no second one, and `cancel` ends it.
    (slurm.place / "queue").write_text(f"7|7|{slurm.run.logs}/.submission_file_x.sh\n")
    with pytest.raises(Fenced, match="job 7"):
        carry_out(slurm.plan())
    slurm.set_job(running(slurm.run, 7))
    slurm.write("scancel", f"echo $* > {slurm.place}/cancelled")
    assert cancel_run(slurm.run) == "7"
    assert (slurm.place / "cancelled").read_text() == "7\n"


def script(name: str) -> str:
    """Stands where the line that `submit --prepare-only` prints has it."""
    return f"/opt/my site/sbatch/{name}"


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "sbatch").glob("*.sbatch")))
@pytest.mark.parametrize("relative", [False, True])
def test_a_job_that_was_queued_by_the_printed_line_is_the_runs_before_it_starts(
    slurm: Slurm, name: str, relative: bool
) -> None:
    carry_out(slurm.plan(), prepare_only=True)
    array = "9_[1-8%1]" if name == "chain.sbatch" else "9"
    command = f"{script(name)} {'run' if relative else slurm.run.root}"
    job = f"{array}|9|{command}|//|{slurm.place}\n"
    (slurm.place / "queue").write_text(job)
    assert "the run has a job of which its journal does not know" in refuses(lambda: carry_out(slurm.plan()))
    slurm.set_job(re.sub("Command=.*", f"Command={command}", running(slurm.run, 9)))
    slurm.write("scancel", f"echo $* > {slurm.place}/cancelled")
    assert cancel_run(slurm.run) == "9"
    assert (slurm.place / "cancelled").read_text() == "9\n"


def test_another_script_that_has_the_run_as_its_argument_is_left_alone(slurm: Slurm) -> None:
    carry_out(slurm.plan(), prepare_only=True)
    jobs = (f"/home/me/look.sh {slurm.run.root}", f"{script('multi_node.sbatch')} {slurm.run.root}2")
    text = "".join(f"{n}|{n}|{command}|//|{slurm.place}\n" for n, command in enumerate(jobs, 8))
    (slurm.place / "queue").write_text(f"{text}11+1|12|{slurm.run.logs}/1.sh|//|/\n")
    assert queued_jobs(slurm.run) == []
    with pytest.raises(NotFound):
        cancel_run(slurm.run)
    assert carry_out(slurm.plan()).job_id == "7"


@pytest.mark.parametrize("program", ["squeue", "scontrol"])
def test_what_lies_in_a_hidden_partition_is_found(slurm: Slurm, program: str) -> None:
    carry_out(slurm.plan(), prepare_only=True)
    client = SlurmClient()
    if program == "scontrol":
        shows = "PartitionName=p Default=YES MaxTime=UNLIMITED TotalNodes=1 TotalCPUs=8 State=UP"
        slurm.write("scontrol", f"""case "$*" in *--all*) echo '{shows}';; esac""")
        assert [facts.name for facts in asyncio.run(client.partitions_of("p"))] == ["p"]
        assert asyncio.run(client.default_partition()).name == "p"
        assert asyncio.run(client.partitions()) == [], "Slurm does not offer it"
        shows = "NodeName=n NodeAddr=a NodeHostName=n State=DOWN CPUTot=2"
        slurm.write("scontrol", f"""case "$*" in *--all*) echo '{shows}';; esac""")
        assert asyncio.run(client.node_addr("n")) == "a"
        assert asyncio.run(client.lost_nodes("n")) == ("n",)
        return
    job = f"7|7|{slurm.run.logs}/1.sh|//|/"
    slurm.write(
        "squeue",
        f"""case "$*" in *--all*%T*) echo '{job}' | sed 's/7.7/7|PENDING|None/';;
        *--all*) echo '{job}';; esac""",
    )
    assert queued_jobs(slurm.run) == ["7"]
    assert asyncio.run(client.states([0]))[7] == ("PENDING", "", f"{slurm.run.logs}/1.sh", "/", "")


def test_a_job_whose_run_was_removed_is_named_with_what_ends_it(slurm: Slurm) -> None:
    carry_out(slurm.plan())
    shutil.rmtree(slurm.run.root)
    with pytest.raises(Fenced, match="its run is gone: `scancel 7`"):
        carry_out(slurm.plan())


def test_what_a_site_says_beside_the_number_is_passed_on(slurm: Slurm) -> None:
    slurm.answer, slurm.queues = "echo 'sbatch: error: Invalid qos specification' >&2; exit 1", False
    with pytest.raises(SlurmRefused, match="Invalid qos"):
        carry_out(slurm.plan())
    assert not slurm.run.root.exists(), "no doubt, and nothing is left"
    slurm.queues = True
    slurm.answer = "echo 'sbatch: 12 h left of your share' >&2; echo Submitted batch job 7"
    assert carry_out(slurm.plan()).notes[-1] == "sbatch says: 12 h left of your share"


def refuses(act: Callable[[], object]) -> str:
    with pytest.raises(VerlSlurmError) as error:
        act()
    return str(error.value)


def test_a_run_that_lives_on_another_cluster_is_left_alone(slurm: Slurm) -> None:
    carry_out(slurm.plan(), prepare_only=True)
    append_event(slurm.run, ev.Submitted(slurm="there", job_id="7"))
    append_event(slurm.run, ev.Started(slurm="there", attempt=1, job_id="7"))
    # Somebody's job has the number here.
    slurm.set_job((GOLDEN / "running.txt").read_text().replace("JobId=1 ", "JobId=7 "))
    assert "the run lives on another Slurm cluster" in refuses(slurm.plan)
    assert "of Slurm cluster there, and this is here" in refuses(lambda: cancel_run(slurm.run))
    assert job_state(slurm.run, last_job(slurm.run)).state == "UNKNOWN"
    append_event(slurm.run, ev.Ended(22, "CRASHED", "x", attempt=1, job_id="7"))
    assert carry_out(slurm.plan()).job_id == "7", "over there, so the same number is a new job here"
    assert last_job(slurm.run).slurm == ""


def test_a_cancel_frees_a_run_of_a_job_that_is_forgotten_or_in_another_clusters_queue(slurm: Slurm) -> None:
    carry_out(slurm.plan(), prepare_only=True)
    append_event(slurm.run, ev.Submitted(slurm="there", job_id="9"))
    append_event(slurm.run, ev.CancelAsked())
    slurm.plan()
    append_event(slurm.run, ev.Submitted(slurm="here", job_id="9"))
    slurm.plan()
    for _ in range(2):
        with pytest.raises(NotFound):
            cancel_run(slurm.run)
    assert sum(isinstance(event, ev.CancelAsked) for event in read_events(slurm.run)) == 2


def test_the_number_of_a_job_of_ours_that_is_another_job_by_now_blocks_nothing(slurm: Slurm) -> None:
    carry_out(slurm.plan(), prepare_only=True)
    append_event(slurm.run, ev.Submitted(job_id="3"))
    slurm.set_job((GOLDEN / "running.txt").read_text().replace("JobId=1 ", "JobId=3 "))
    assert job_state(slurm.run, last_job(slurm.run)).state == "GONE"
    assert carry_out(slurm.plan()).job_id == "7"


def test_a_job_that_is_queued_is_named_where_the_journal_takes_no_line(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, said = slurm.plan(), list[str]()
    fail_storage("write", errno.ENOSPC, "events.jsonl", monkeypatch)
    with telling(said.append), pytest.raises(OSError, match=r"No space.*events\.jsonl"):
        carry_out(plan)
    ends = f"`verl-slurm status {slurm.run.root}` tells, `verl-slurm cancel {slurm.run.root}` ends it"
    assert said == [f"job 7 is queued, and the journal does not name it: {ends}"]


def test_a_slurm_that_does_not_answer_is_no_leave_to_queue(slurm: Slurm) -> None:
    carry_out(slurm.plan(), prepare_only=True)
    slurm.squeue = "exit 1"
    with pytest.raises(SlurmMissing):
        carry_out(slurm.plan())
    assert slurm.times_sent == 0


@pytest.mark.parametrize("asked", [True, False], ids=["while sbatch works", "before"])
def test_an_interrupted_submit_says_whether_a_job_may_be_queued(
    slurm: Slurm, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.answer = f"kill -INT {os.getpid()}; exec sleep 60"
    plan, said = slurm.plan(), list[str]()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    if not asked:
        monkeypatch.setattr(submission, "keep_code", interrupted)
    with telling(said.append), pytest.raises(KeyboardInterrupt):
        carry_out(plan)
    run = slurm.run.root
    assert run.exists() is asked
    look = f"`verl-slurm status {run}` tells, `verl-slurm cancel {run}` ends it"
    assert said == [f"interrupted while the job was submitted: it may be queued; {look}"] * asked
