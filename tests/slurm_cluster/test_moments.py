"""What the Slurm at hand says of a job at each moment that matters, and what is made of it: jobs of bash, no training.

The golden files of tests/slurm are such moments, recorded: `VERL_SLURM_MOMENTS=DIR` writes them there.
"""

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.lanes import with_variants
from tests.processes import captured
from verl_slurm.slurm.cause import JobCause, Trigger, decide_cause
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.faults import fail_node, preempt, restore_node
from verl_slurm.slurm.facts import JobFacts
from verl_slurm.slurm.slurm_client import SlurmClient

pytestmark = [pytest.mark.slurm, pytest.mark.long]

# It outlives TERM, so that COMPLETING lasts for KillWait and can be seen.
_SCRIPT = "trap '' TERM USR1; echo $$ > {pid}; while :; do sleep 1; done"


class Job:
    """A job of two nodes."""

    def __init__(self, cluster: DevCluster, directory: Path) -> None:
        self.cluster, self.pid_file, self.number = cluster, directory / "pid", 0
        self._client = SlurmClient(cluster.client_env())

    def slurm(self, *argv: str, check: bool = True) -> str:
        return captured(argv, env=self.cluster.client_env(), timeout=60, check=check).stdout.strip()

    def submit(self, *more: str) -> "Job":
        """Queues it, and waits until its batch process runs."""
        options = [
            "--nodes=2",
            "--exclusive",
            "--requeue",
            "--time=10",
            "--output=/dev/null",
            "--chdir=/",
            *more,
        ]
        self.number = int(
            self.slurm("sbatch", "--parsable", *options, f"--wrap={_SCRIPT.format(pid=self.pid_file)}")
        )
        self.until(lambda facts: facts.is_running and self.pid_file.exists())
        return self

    def facts(self) -> JobFacts:
        return asyncio.run(self._client.job(self.number))

    def until(self, reached: Callable[[JobFacts], bool], timeout_s: float = 150.0) -> JobFacts:
        """Slurm tells nobody by itself: one has to ask."""
        deadline = time.monotonic() + timeout_s
        while not reached(facts := self.facts()):
            assert time.monotonic() < deadline, self.slurm("scontrol", "show", "job", str(self.number))
            time.sleep(0.1)
        return facts

    def other_node(self) -> str:
        """The node without the batch process."""
        facts = self.facts()
        nodes = asyncio.run(self._client.expand(facts.node_list or ""))
        return next(node for node in nodes if node != facts.batch_host)

    def ending(self) -> JobFacts:
        """Until it is COMPLETING."""
        return self.until(lambda facts: facts.state == "COMPLETING")

    def cause(self, trigger: Trigger, moment: str) -> JobCause:
        """What a lead of its first attempt would decide now; the moment is recorded."""
        facts = self.facts()
        self._record(moment)
        lost = asyncio.run(self._client.lost_nodes("node[1-4]")) if facts.restarts else ()
        return decide_cause(
            trigger, facts, own_restarts=0, signal_lead_s=30, now=datetime.now(UTC), lost_nodes=lost
        )

    def _record(self, moment: str) -> None:
        if not (place := os.environ.get("VERL_SLURM_MOMENTS")):
            return
        version = self.slurm("scontrol", "--version").split()[-1]
        env = {**self.cluster.client_env(), "SLURM_TIME_FORMAT": "%s"}
        for suffix, more in (("txt", []), ("json", ["--json"])):
            done = captured(["scontrol", "show", "job", str(self.number), *more], env=env)
            if done.returncode == 0:
                text = re.sub(rf'(JobId=|"job_id": ?){self.number}\b', r"\g<1>1", done.stdout)
                home, here = "/home/ada", str(self.pid_file.parent)
                # Slurm's JSON writes `/` as `\/`.
                text = text.replace(here, home).replace(here.replace("/", r"\/"), home.replace("/", r"\/"))
                Path(place, f"{version}_{moment}.{suffix}").write_text(text)


@pytest.fixture
def job(cluster: DevCluster, tmp_path: Path) -> Iterator[Job]:
    """On the shared cluster: a grace time of 30 s, KillWait 15 s."""
    made = Job(cluster, tmp_path)
    yield made
    _leave(made)


def _leave(job: Job) -> None:
    if job.number:
        job.slurm("scancel", str(job.number), check=False)
        if job.pid_file.exists():
            _kill_batch(job)
        job.until(lambda facts: facts.is_over)


def _kill_batch(job: Job) -> None:
    try:
        os.kill(int(job.pid_file.read_text()), signal.SIGKILL)
    except (OSError, ValueError):
        return


@pytest.mark.variant  # test_cause.py has the recorded answers
def test_a_running_job_has_no_cause_but_its_operators(job: Job) -> None:
    job.submit()
    kinds = [job.cause(trigger, "running").kind for trigger in ("poll", "warning", "requeue_wish", "term")]
    assert kinds == ["none", "operator", "operator_requeue", "operator"]


@pytest.mark.variant  # test_cause.py has the recorded answers
def test_a_preemption_shows_in_its_grace_time_and_as_a_requeue_at_its_end(job: Job) -> None:
    job.submit()
    preempt(job.cluster, job.number, hold_s=1)
    early = job.cause("warning", "preempted_in_grace")
    assert early.kind == "preemption", early.evidence
    assert early.deadline == job.facts().end_time
    job.ending()
    late = job.cause("term", "preempted_completing")
    assert late.kind == "requeued", late.evidence


@pytest.mark.soak  # make test-slurm-versions
def test_a_preemption_of_a_job_that_may_not_be_requeued_is_no_cancel(job: Job) -> None:
    job.submit("--no-requeue")
    preempt(job.cluster, job.number, hold_s=1)
    assert job.cause("warning", "norequeue_preempted_in_grace").kind == "preemption"
    job.ending()
    late = job.cause("term", "norequeue_preempted_completing")
    assert late.kind == "preemption", late.evidence


@pytest.mark.variant  # test_cause.py has the recorded answers
def test_a_cancel_is_one_from_its_first_moment_on(job: Job) -> None:
    job.submit()
    job.slurm("scancel", str(job.number))
    assert job.cause("term", "scancel_completing").kind == "cancel"
    _kill_batch(job)
    assert job.until(lambda facts: facts.is_over).state == "CANCELLED"
    assert job.cause("poll", "scancel_over").kind == "cancel"


def test_a_cancel_in_the_grace_time_is_no_preemption(job: Job) -> None:
    job.submit()
    preempt(job.cluster, job.number, hold_s=1)
    began = job.facts().preempt_time
    assert began is not None
    # In its first second a cancel and a preemption's end look the same on older versions.
    while datetime.now(UTC).timestamp() < began.timestamp() + 2:
        time.sleep(0.1)
    job.slurm("scancel", str(job.number))
    cause = job.cause("term", "scancel_in_grace_completing")
    assert cause.kind == "cancel", cause.evidence


@pytest.mark.soak  # test_interruptions.py
def test_an_operators_requeue_is_one(job: Job) -> None:
    job.submit()
    job.slurm("scontrol", "requeue", str(job.number))
    cause = job.cause("term", "requeue_completing")
    assert cause.kind == "requeued", cause.evidence


@pytest.mark.soak  # make test-slurm-versions
def test_a_job_that_stands_still_is_not_ended(job: Job) -> None:
    job.submit()
    job.slurm("scontrol", "suspend", str(job.number))
    assert job.cause("poll", "suspended").kind == "suspended"
    job.slurm("scontrol", "resume", str(job.number))
    job.slurm("scancel", "--signal=STOP", str(job.number))
    job.until(lambda facts: facts.state != "SIGNALING")
    stopped = job.cause("poll", "stopped")
    job.slurm("scancel", "--signal=CONT", str(job.number))
    assert stopped.kind == "suspended", stopped.evidence


@pytest.mark.soak  # make test-slurm-versions
def test_a_batch_process_that_is_killed_is_a_failure(job: Job) -> None:
    job.submit()
    _kill_batch(job)
    job.until(lambda facts: not facts.is_running)
    cause = job.cause("poll", "batch_killed_over")
    assert cause.kind == "failed", cause.evidence


@pytest.mark.variant
def test_a_node_that_is_lost_is_named(job: Job) -> None:
    job.submit()
    lost = job.other_node()
    fail_node(job.cluster, lost)
    try:
        job.until(lambda facts: not facts.is_running)
        cause = job.cause("term", "node_lost_completing")
        assert cause.kind == "node_lost", cause.evidence
        assert lost in cause.evidence
    finally:
        restore_node(job.cluster, lost)


@pytest.mark.soak  # make test-slurm-versions
def test_a_node_down_of_a_job_that_may_not_be_requeued_is_a_failure(job: Job) -> None:
    job.submit("--no-requeue")
    node = job.other_node()
    job.slurm("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    try:
        job.until(lambda facts: not facts.is_running)
        cause = job.cause("term", "norequeue_node_down_completing")
        assert cause.kind == "failed", cause.evidence
    finally:
        # Refused where the node has come back by itself (ReturnToService=2).
        job.slurm("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)


@pytest.mark.soak  # test_interruptions.py
def test_the_time_limit_is_named(job: Job) -> None:
    job.submit()
    job.slurm("scontrol", "update", f"JobId={job.number}", "EndTime=now+20seconds")
    warned = job.cause("warning", "time_limit_running")
    assert warned.kind == "time_limit", warned.evidence
    job.ending()
    ended = job.cause("term", "time_limit_completing")
    assert ended.kind == "time_limit", ended.evidence


@pytest.mark.parametrize("grace_s", with_variants(6, 0))
def test_a_preemption_that_cancels_is_told_from_a_cancel_as_far_as_slurm_says_it(
    make_cluster: Callable[..., DevCluster], tmp_path: Path, grace_s: int
) -> None:
    job = Job(
        make_cluster(nodes=2, preempt_mode="CANCEL", grace_s=grace_s, kill_wait_s=15), tmp_path
    ).submit()
    preempt(job.cluster, job.number, hold_s=1)
    job.ending()
    cause = job.cause("term", f"cancel_mode_{grace_s}_completing")
    # Up to 23.02 a cancel at the end of the grace time looks the same, and no cancel is ever undone.
    version = job.slurm("scontrol", "--version").split()[-1]
    said = grace_s == 0 or version >= "23.11"
    assert cause.kind == ("preemption" if said else "cancel"), cause.evidence
    _leave(job)
