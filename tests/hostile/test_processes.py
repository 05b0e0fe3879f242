"""Processes that die, starve, babble or are nobody's: part B on the real lead and agent, with a rank without torch.

What needs the trainer's own ranks is in `test_ranks_in_a_save.py`; `faulty_processes.py` says what may be bent.
"""

import contextlib
import fcntl
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fakes.run_without_torch import Stage, control_group
from tests.processes import tell
from verl_slurm.checkpoint.store.verify import verify

pytestmark = pytest.mark.slow

EAT = signal.SIGRTMIN + 9
"""At which a stand-in with `eats` takes 64 MiB."""
UNSHARE = shutil.which("unshare")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    found = Stage(tmp_path)
    yield found
    found.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Stage]:
    """In job 7 of a Slurm."""
    found = Stage(tmp_path, slurm=True)
    yield found
    found.close()


@contextlib.contextmanager
def group_of(controller: str) -> Iterator[Path]:
    """A control group, or no test."""
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(control_group(controller, "stage"))
        except OSError as error:
            pytest.skip(f"NOT RUN: no control group ({controller}, version 1) can be made here: {error}")
        yield group


def unshared(*words: str) -> tuple[str, ...]:
    """What has a program run apart, or no test: root in a container often may not."""
    if UNSHARE is None:
        pytest.skip("NOT RUN: no unshare here (util-linux)")
    done = subprocess.run([UNSHARE, *words, "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"NOT RUN: unshare {words[0]} is not for us: {done.stderr.strip()}")
    return (UNSHARE, *words)


def whole(stage: Stage) -> list[str]:
    """Names of checkpoints; each of them verifies."""
    for name in stage.checkpoints():
        verdict = verify(stage.paths.checkpoints / name)
        assert verdict.ok, verdict.one_line()
    return stage.checkpoints()


# ---- P02, P04: the daemon dies


@pytest.mark.long
@pytest.mark.scenario("P02")
@pytest.mark.parametrize("lives", [(3, 20, 45, 70, 95, 120)])
def test_a_lead_that_is_killed_at_one_of_its_writes_leaves_nobody_and_the_next_goes_on(
    stage: Stage, lives: tuple[int, ...]
) -> None:
    for number, dies_at in enumerate(lives, start=1):
        before = whole(stage)
        stage.lead(saves=len(before) + 2, dies_at=dies_at)
        assert stage.end() == -signal.SIGKILL, f"life {number} did not get as far as {dies_at}"
        assert set(before) <= set(whole(stage))
    target = len(whole(stage)) + 1
    stage.lead(saves=target)
    assert stage.end() == 0, stage.story()
    assert whole(stage)[-1] == f"step_{target:06d}"


@pytest.mark.soak
@pytest.mark.scenario("P02")
def test_a_lead_may_be_killed_at_every_single_write(tmp_path: Path) -> None:
    dies_at, code = 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        dies_at += 1
        (tmp_path / f"{dies_at}").mkdir(mode=0o700)
        stage = Stage(tmp_path / f"{dies_at}")
        stage.lead(saves=2, dies_at=dies_at)
        code = stage.end()
        assert code in (0, -signal.SIGKILL), f"at {dies_at}:\n{stage.story()}"
        whole(stage)
        stage.lead(saves=3)
        assert stage.end() == 0, f"after {dies_at}:\n{stage.story()}"
        assert whole(stage)[-1] == "step_000003", f"after {dies_at}:\n{stage.story()}"
        shutil.rmtree(tmp_path / f"{dies_at}")
    print(f"killed at each of {dies_at - 1} calls")
    assert dies_at > 80


@pytest.mark.scenario("P04")
def test_an_agent_and_then_a_lead_that_run_out_of_memory_are_killed_and_nothing_else_is_lost(
    stage: Stage,
) -> None:
    with group_of("memory") as group:
        (group / "memory.limit_in_bytes").write_text(str(32 << 20))
        lead = stage.lead(eats=True)
        stage.wait("first_rollout")
        (agent,) = psutil.Process(lead.pid).children()
        (group / "tasks").write_text(str(agent.pid))
        agent.send_signal(EAT)
        crash = stage.wait("crash")
        assert crash["kind"] == "node"
        assert "gone without a word" in crash["detail"]
        stage.wait("first_rollout", count=2)
        (group / "tasks").write_text(str(lead.pid))
        lead.send_signal(EAT)
        assert stage.end() == -signal.SIGKILL
        told = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
        assert int(told["oom_kill"]) == 2
    stage.lead(saves=1)
    assert stage.end() == 0, stage.story()
    assert whole(stage) == ["step_000001"]


# ---- P06: nothing can be started any more when the requeue is due


def refused_until_lifted(job: Stage) -> None:
    """The checkpoint is there before the requeue, which is asked for again and again until it can be."""
    refused = job.wait("requeue", accepted=False)
    assert refused["detail"]
    assert whole(job) == ["step_000001"]
    assert job.process is not None
    assert job.process.poll() is None


@pytest.mark.scenario("P06")
def test_without_a_process_to_be_had_the_checkpoint_is_safe_and_the_requeue_asked_for_again(
    job: Stage,
) -> None:
    with group_of("pids") as group:
        lead = job.lead(no_forks=str(group))
        job.wait("first_rollout")
        for task in os.listdir(f"/proc/{lead.pid}/task"):
            (group / "tasks").write_text(task)
        job.preempt()
        refused_until_lifted(job)
        assert not job.events("internal"), job.story()
        (group / "pids.max").write_text("max")
        assert job.end() == 25, job.story()
        assert [e["name"] for e in job.events("verified")] == ["step_000001"], job.story()


@pytest.mark.scenario("P06")
def test_where_no_request_ever_gets_through_the_exit_code_says_so_at_the_time_limit(job: Stage) -> None:
    """Of a job that ran into its limit Slurm itself starts nothing again."""
    (job.box / "kill_wait").write_text("-200\n")
    with group_of("pids") as group:
        lead = job.lead(no_forks=str(group))
        job.wait("first_rollout")
        for task in os.listdir(f"/proc/{lead.pid}/task"):
            (group / "tasks").write_text(task)
        # The warning: 100 s to the limit, and Slurm's KILL is due. There is time for the save, and for one request.
        (job.box / "ends").write_text(f"{int(time.time()) + 100}\n")
        lead.send_signal(signal.SIGUSR1)
        assert job.wait("cause")["cause"] == "time_limit"
        assert job.end() == 24, job.story()
        assert whole(job) == ["step_000001"]
        assert not (job.box / "requeued").exists()


@pytest.mark.long  # half a minute: what cannot be read back is read again
@pytest.mark.scenario("P06")
def test_with_no_file_to_be_opened_nothing_is_called_damaged_and_the_requeue_asked_for_again(
    job: Stage,
) -> None:
    reader, writer = os.pipe()
    lead = job.lead(no_files=True, stdout=writer)
    os.close(writer)
    job.wait("first_rollout")
    job.preempt()
    with os.fdopen(reader) as said:
        # The journal needs a file, too; what it cannot take is said here.
        assert any("requeue" in line and "Too many open files" in line for line in said)
        _, hard = resource.prlimit(lead.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(lead.pid, resource.RLIMIT_NOFILE, (hard, hard))
        said.read()
    assert job.end() == 25, job.story()
    assert whole(job) == ["step_000001"]
    assert not list(job.paths.quarantine.glob("*"))


# ---- P07: a grace time that does not suffice


@pytest.mark.scenario("P07")
def test_a_save_that_starves_and_is_killed_in_its_middle_leaves_the_one_before(stage: Stage) -> None:
    stage.lead(saves=1)
    assert stage.end() == 0
    with group_of("cpu") as group:
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text("5000")
        lead = stage.lead(rank="held")
        stage.wait("first_rollout", count=2)
        everybody = [*psutil.Process(lead.pid).children(recursive=True), psutil.Process(lead.pid)]
        for process in everybody:
            (group / "cgroup.procs").write_text(str(process.pid))
        lead.send_signal(signal.SIGUSR2)
        stage.marked("in the middle")
        tell(everybody, signal.SIGKILL)  # as Slurm, at the end of the grace time
        assert stage.end() == -signal.SIGKILL
    assert whole(stage) == ["step_000001"]
    assert list(stage.paths.checkpoints.glob(".step_000002.*.tmp"))
    stage.lead(saves=2)
    assert stage.end() == 0, stage.story()
    assert whole(stage) == ["step_000001", "step_000002"]
    assert stage.events("restart")[-1]["resume"] == "step_000001"
    assert not list(stage.paths.checkpoints.glob(".*.tmp"))


# ---- P08: answers that are none


@pytest.mark.scenario("P08")
@pytest.mark.parametrize("answers", ["wrong", "path", "nothing", "late"])
def test_an_answer_counts_once_for_its_own_request_and_only_if_the_checkpoint_is_there(
    job: Stage, answers: str
) -> None:
    victim = job.paths.root.parent / "victim"
    victim.mkdir(mode=0o700)
    (victim / "mine").write_text("mine")
    job.lead(rank=answers)
    job.wait("first_rollout")
    job.preempt()
    assert job.end() == 25, job.story()
    assert (victim / "mine").read_text() == "mine"
    assert whole(job) == (["step_000001"] if answers == "wrong" else [])
    assert {event["name"] for event in job.events("verified")} == set(whole(job))
    assert not [e for e in job.events("degraded") if "deadline" in e["reason"]], "it waited for another one"


# ---- P10: nobody reads, or there is no room for, what is said

_FULL = 'mount -t tmpfs -o size=4k t "$0" && { cat /dev/zero > "$0/full"; exec "$@" > "$0/full"; }'
_NO_NAMES = 'mount -t tmpfs -o nr_inodes=1 t "$0" && exec "$@"'


@pytest.mark.scenario("P10")
@pytest.mark.parametrize("how", ["nobody reads", "the pipe is full", "the disk is full", "no inodes"])
def test_what_cannot_be_said_holds_up_no_save_and_ends_nobody(job: Stage, how: str) -> None:
    with contextlib.ExitStack() as stack:
        before: tuple[str, ...] = ()
        reader, writer = os.pipe()
        stack.callback(os.close, writer)
        if how == "nobody reads":
            os.close(reader)
        else:
            stack.callback(os.close, reader)
        if how == "the pipe is full":
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
            os.write(writer, b"x" * 4096)
        if how in ("the disk is full", "no inodes"):
            script = _FULL if how == "the disk is full" else _NO_NAMES
            before = unshared("--mount", "/bin/sh", "-c", script, str(job.paths.logs))
        job.lead(before=before, stdout=writer, talks=True)
        job.wait("first_rollout")
        job.preempt()
        assert job.end() == 25, job.story()
    assert whole(job) == ["step_000001"]
    assert [event["name"] for event in job.events("verified")] == ["step_000001"]


# ---- P11: children, other people's children, and being the first process of all


@pytest.mark.scenario("P11")
@pytest.mark.parametrize("first", [False, True])
def test_what_others_leave_behind_is_buried_while_the_ranks_work(stage: Stage, first: bool) -> None:
    before: tuple[str, ...] = ()
    if first:
        before = unshared("--pid", "--fork", "--mount-proc", "--kill-child")
    stage.lead(before=before, saves=1, orphans=40)
    assert stage.end() == 0, stage.story()
    assert not stage.events("crash"), stage.story()
    assert whole(stage) == ["step_000001"]


@pytest.mark.scenario("P11")
def test_a_storm_of_signals_about_children_is_weathered(job: Stage) -> None:
    lead = job.lead()
    job.wait("first_rollout")
    (agent,) = psutil.Process(lead.pid).children()
    for _ in range(5000):
        lead.send_signal(signal.SIGCHLD)
        agent.send_signal(signal.SIGCHLD)
    job.preempt()
    assert job.end() == 25, job.story()
    assert whole(job) == ["step_000001"]


class Held:
    """What a process holds: descriptors, threads, children, bytes."""

    def __init__(self, pid: int) -> None:
        process = psutil.Process(pid)
        self.counts = {
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
            "children": len(process.children()),
        }
        self.num_bytes = process.memory_info().rss


def cycles(stage: Stage, count: int) -> None:
    """The rank saves and dies, so often; what the lead holds does not grow by one a cycle, nor by anything like it."""
    (stage.box / "go").touch()
    lead = stage.lead(saves=count, dies=True)
    stage.wait("first_rollout", count=3)
    first = Held(lead.pid)
    stage.wait("first_rollout", count=count)
    last = Held(lead.pid)
    assert stage.end() == 0, stage.story()
    assert len(stage.events("crash")) == count - 1
    for what, number in last.counts.items():
        assert number - first.counts[what] < count / 3, what
    assert last.num_bytes - first.num_bytes < (4 << 20) + 2048 * count
    left = list(stage.paths.root.rglob("*.tmp"))
    assert not left


CYCLING = ("daemon.backoff_s=0.01", "daemon.crash_budget=2000", "checkpoint.keep_last=2")


@pytest.mark.long
@pytest.mark.scenario("P11")
@pytest.mark.variant
def test_starts_one_after_the_other_leave_nothing_behind(tmp_path: Path) -> None:
    stage = Stage(tmp_path, *CYCLING)
    try:
        cycles(stage, 12)
    finally:
        stage.close()


@pytest.mark.soak
@pytest.mark.scenario("P11")
def test_a_thousand_starts_leave_nothing_behind(tmp_path: Path) -> None:
    stage = Stage(tmp_path, *CYCLING)
    try:
        cycles(stage, 1000)
    finally:
        stage.close()
