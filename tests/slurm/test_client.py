"""The client against stubs of scontrol (what it must survive) and against the real one."""

import asyncio
import os
import re
import shlex
import stat
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from verl_slurm.base.errors import NotFound, SlurmMissing, SlurmRefused
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.facts import JobFacts
from verl_slurm.slurm.parse import parse_job
from verl_slurm.slurm.requeue_rules import RequeueOutcome, is_answer, refuse_requeue
from verl_slurm.slurm.runner import Completed, telling
from verl_slurm.slurm.slurm_client import SlurmClient

GOLDEN = Path(__file__).parent / "golden"
Stub = Callable[..., SlurmClient]


@pytest.fixture
def stub(tmp_path: Path) -> Stub:
    """A client whose scontrol is a shell script."""

    def make(script: str, **options: float) -> SlurmClient:
        program = tmp_path / "scontrol"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return SlurmClient({"PATH": f"{tmp_path}:{os.environ['PATH']}"}, **options)

    return make


def facts_of(name: str) -> JobFacts:
    return parse_job((GOLDEN / f"{name}.txt").read_text(), 1)


@pytest.mark.scenario("L13")
def test_a_command_that_hangs_is_killed_at_its_deadline(stub: Stub, tmp_path: Path) -> None:
    client = stub(f"echo $$ > {tmp_path}/pid; exec sleep 600", timeout_s=0.5)
    with pytest.raises(SlurmMissing, match="no end within"):
        asyncio.run(client.job(1))
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_a_command_that_ends_too_late_is_told_with_its_own_words(stub: Stub) -> None:
    words = "Slurm temporarily unable to accept job, sleeping and retrying"
    client = stub(f"echo 'sbatch: error: {words}' >&2; exec sleep 600", timeout_s=0.5)
    with pytest.raises(SlurmMissing, match=f"no further job for now.*no end within.*{words}.*MaxJobCount"):
        asyncio.run(client.job(1))


def test_a_command_that_is_not_answered_is_said_while_it_waits(stub: Stub, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "told")
    text = GOLDEN / "running.txt"
    client = stub(f"read line < {tmp_path}/told; echo $line > {tmp_path}/line; cat {text}")
    # The command ends once the line is said.
    with telling(lambda line: (tmp_path / "told").write_text(f"{line}\n") and None):
        asyncio.run(client.job(1))
    said = (tmp_path / "line").read_text()
    assert said == "waiting for Slurm: scontrol show has not answered yet, and has up to 8 s\n"


@pytest.mark.scenario("L13")
def test_endless_output_is_cut_off(stub: Stub) -> None:
    with pytest.raises(SlurmMissing, match="bytes of output"):
        asyncio.run(stub("exec yes").job(1))


@pytest.mark.scenario("L13")
@pytest.mark.parametrize(
    "script",
    ["echo garbage", "exit 0", "printf '\\377\\376'", "head -c 2097152 /dev/zero", "yes x | head -c 2097152"],
)
def test_garbage_is_not_taken_for_an_answer(stub: Stub, script: str) -> None:
    with pytest.raises((NotFound, SlurmMissing)):
        asyncio.run(stub(script).job(1))


def test_an_unknown_job_and_a_dead_controller_are_told_apart(stub: Stub) -> None:
    with pytest.raises(NotFound):
        asyncio.run(stub("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1").job(1))
    with pytest.raises(SlurmMissing):
        asyncio.run(stub("echo 'Unable to contact slurm controller' >&2; exit 1").job(1))


@pytest.mark.parametrize(
    ("code", "said", "answered"),
    [
        (1, "Requested operation is presently disabled for job 7", True),
        (1, "Access/permission denied", True),
        (1, "Unable to contact slurm controller (connect failure)", False),
        (1, "slurm_requeue error: Socket timed out on send/recv operation", False),
        (1, "Zero Bytes were transmitted or received", False),
        (1, "Rate limit exceeded, please retry momentarily", False),
        (1, "Job can not be altered now, try again later for job 7", False),
        (-15, "", False),
    ],
)
def test_a_request_that_was_lost_is_no_refusal(code: int, said: str, answered: bool) -> None:
    assert is_answer(Completed(exit_code=code, stdout="", stderr=said, seconds=0.0)) is answered


def test_without_slurm_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SlurmMissing, match="devcluster start"):
        asyncio.run(SlurmClient({"PATH": str(tmp_path)}).job(1))


def test_a_signal_goes_to_the_batch_process_alone(stub: Stub, tmp_path: Path) -> None:
    client, log = stub(f"cat {shlex.quote(str(GOLDEN / 'running.txt'))}"), tmp_path / "asked"
    scancel = tmp_path / "scancel"
    scancel.write_text(f'#!/bin/sh\necho "$@" > {log}\n')
    scancel.chmod(0o755)
    asyncio.run(client.signal_batch(1, "USR1"))
    assert log.read_text() == "--batch --signal=USR1 1\n"
    scancel.write_text("#!/bin/sh\necho 'scancel: error: Invalid job id' >&2; exit 1\n")
    with pytest.raises(SlurmRefused, match="Invalid job id"):
        asyncio.run(client.signal_batch(1, "USR1"))


@pytest.mark.scenario("L14")
def test_what_is_done_to_a_task_of_an_array_is_done_to_no_other(stub: Stub, tmp_path: Path) -> None:
    """One task has the array's own number as its JobId, and by that number Slurm means all of them (22.05.8)."""
    log, golden = tmp_path / "asked", shlex.quote(str(GOLDEN / "array" / "running.txt"))
    client = stub(f'[ "$1" = show ] && exec cat {golden}; echo "$@" >> {log}')
    (tmp_path / "scancel").symlink_to(tmp_path / "scontrol")

    async def story() -> None:
        facts = await client.job(3)
        assert facts.array_task == "3_3"
        await client.requeue(3, 10, own_restarts=0)
        await client.exclude(facts, "node4")
        await client.signal_batch(3, "USR1")
        await client.cancel(3)
        assert (await client.job(4)).target == "3_1"

    asyncio.run(story())
    said = log.read_text().splitlines()
    assert said[0] == "requeue 3_3"
    assert {re.sub(r"uts\d{10}$", "uts", line) for line in said[1:]} == {
        "update JobId=3_3 StartTime=uts",
        "update JobId=3_3 ExcNodeList=node4",
        "--batch --signal=USR1 3_3",
        "3_3",
    }


@pytest.mark.parametrize(
    ("moment", "updates"),
    [("newer/25.11_node_lost_completing_expedited", False), ("26.05.5/node_lost_completing", True)],
)
def test_a_job_that_may_start_at_once_is_given_no_later_time(
    stub: Stub, tmp_path: Path, moment: str, updates: bool
) -> None:
    """On 26.05.5 a job that waited already took the nodes of the run, which were kept for it until then."""
    client = stub(f'echo "$@" >> {tmp_path}/asked; exec cat {shlex.quote(str(GOLDEN))}/{moment}.txt')
    assert asyncio.run(client.requeue(1, 3, own_restarts=0)).kind == "already_requeued"
    asked = (tmp_path / "asked").read_text().splitlines()
    assert any(line.startswith("update") for line in asked) is updates


def test_the_signals_of_the_jobs_end_do_not_stop_a_command(stub: Stub) -> None:
    client = stub("kill -TERM $$; kill -USR1 $$; kill -INT $$; echo alive")
    assert asyncio.run(client.run(["scontrol"])).stdout == "alive\n"


def test_the_environment_cannot_change_what_the_commands_print(stub: Stub, tmp_path: Path) -> None:
    client = stub("echo ${SCONTROL_ALL:-none} ${POSIXLY_CORRECT:-none} $LC_ALL $SLURM_TIME_FORMAT")
    os.environ["SCONTROL_ALL"] = "1"
    try:
        client = SlurmClient(
            {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SCONTROL_ALL": "1", "LC_ALL": "de_DE"}
            # With it options end at the first other word: `show node n1 --all` would be refused.
            | {"POSIXLY_CORRECT": "1"}
        )
        assert asyncio.run(client.run(["scontrol"])).stdout == "none none C %s\n"
    finally:
        del os.environ["SCONTROL_ALL"]


@pytest.mark.scenario("L07")
@pytest.mark.parametrize(
    ("moment", "own", "kind"),
    [
        ("scancel_completing", 0, "cancelled"),
        ("scancel_over", 0, "cancelled"),
        ("scancel_in_grace_completing", 0, "cancelled"),
        ("preempted_completing", 0, "already_requeued"),
        ("norequeue_preempted_in_grace", 0, "forbidden"),
        ("norequeue_preempted_completing", 0, "forbidden"),  # and so followed by another job
        ("suspended", 0, "refused"),
        ("running", 0, None),
        ("preempted_in_grace", 0, None),
        ("time_limit_completing", 0, None),
        ("stopped", 0, None),
        ("batch_killed_completing", 0, None),
        ("norequeue_node_down_completing", 0, "forbidden"),
        ("cancel_mode_preempted_completing", 0, "cancelled"),
        ("newer/23.02_batch_killed_completing", 0, None),
        ("newer/24.05_out_of_memory_completing", 0, None),
        ("newer/25.05_norequeue_node_down_completing", 0, "forbidden"),
        ("newer/25.11_expediting", 0, "already_requeued"),
        ("newer/25.11_requeue_hold_expedited", 0, "already_requeued"),
    ],
)
def test_what_must_not_be_requeued_is_left_alone(moment: str, own: int, kind: str | None) -> None:
    refusal = refuse_requeue(facts_of(moment), own)
    assert (None if refusal is None else refusal.kind) == kind


@pytest.mark.scenario("L07")
@pytest.mark.parametrize("moment", ["scancel_completing", "scancel_over", "suspended"])
def test_a_refused_requeue_sends_nothing(stub: Stub, tmp_path: Path, moment: str) -> None:
    log = tmp_path / "asked"
    golden = shlex.quote(str(GOLDEN / f"{moment}.txt"))
    outcome = asyncio.run(stub(f'echo "$1" >> {log}; cat {golden}').requeue(1, 10, own_restarts=0))
    assert not outcome.will_run_again
    assert log.read_text() == "show\n"


@pytest.mark.scenario("FLT-A")
def test_a_job_that_is_to_be_held_is_given_no_start_time_and_its_release_is_named(
    stub: Stub, tmp_path: Path
) -> None:
    log, golden = tmp_path / "asked", shlex.quote(str(GOLDEN / "running.txt"))
    client = stub(f'echo "$1" >> {log}; cat {golden}')
    outcome = asyncio.run(client.requeue(1, 10, own_restarts=0, hold=True))
    assert outcome.will_run_again
    assert "scontrol release" in outcome.detail
    assert log.read_text() == "show\nrequeuehold\n"


@pytest.mark.scenario("L13")
def test_a_requeue_that_changes_nothing_is_unconfirmed(stub: Stub) -> None:
    golden = shlex.quote(str(GOLDEN / "running.txt"))
    outcome = asyncio.run(stub(f"cat {golden}").requeue(1, 10, own_restarts=0))
    assert outcome.kind == "unconfirmed"
    assert not outcome.will_run_again


def test_a_job_that_slurm_may_not_requeue_is_told_from_one_that_it_will_not(stub: Stub) -> None:
    golden = shlex.quote(str(GOLDEN / "running.txt"))
    words = "Requested operation is presently disabled"
    script = f'[ "$1" = show ] && exec cat {golden}; echo "{words}" >&2; exit 1'
    outcome = asyncio.run(stub(script).requeue(1, 10, own_restarts=0))
    assert (outcome.kind, outcome.detail) == ("forbidden", words)


def test_slurms_refusal_is_passed_on(stub: Stub) -> None:
    golden = shlex.quote(str(GOLDEN / "running.txt"))
    script = f'[ "$1" = show ] && exec cat {golden}; echo "Access/permission denied" >&2; exit 1'
    outcome = asyncio.run(stub(script).requeue(1, 10, own_restarts=0))
    assert (outcome.kind, outcome.detail) == ("refused", "Access/permission denied")


# ---- real


async def _submit(client: SlurmClient, directory: Path, *options: str) -> int:
    """A job on two nodes that leaves at once when it is told to."""
    script = directory / "job.sh"
    script.write_text("#!/bin/sh\ntrap 'exit 0' TERM\necho start\nsrun sleep 600 &\nwait\n")
    output = directory / "out"
    argv = ["sbatch", "--parsable", "-N2", "--requeue", "--open-mode=append", f"--output={output}"]
    done = await client.run([*argv, *options, str(script)])
    assert done.exit_code == 0, done.stderr
    return int(done.stdout)


async def _until(client: SlurmClient, job_id: int, test: Callable[[JobFacts], bool]) -> JobFacts:
    async with asyncio.timeout(60):
        while not test(facts := await client.job(job_id)):  # noqa: ASYNC110 - one has to ask
            await asyncio.sleep(0.1)
    return facts


@pytest.mark.slurm
def test_a_requeued_job_runs_again_after_the_short_delay(
    make_cluster: Callable[..., DevCluster], tmp_path: Path
) -> None:
    """With Slurm's default cred_expire, where a plain requeue costs 120 s."""

    async def story(client: SlurmClient) -> tuple[RequeueOutcome, RequeueOutcome, JobFacts]:
        job = await _submit(client, tmp_path)
        await _until(client, job, lambda facts: facts.state == "RUNNING")
        outcome = await client.requeue(job, 3, own_restarts=0)
        again = await client.requeue(job, 3, own_restarts=0)
        running = await _until(client, job, lambda facts: facts.state == "RUNNING" and facts.restarts == 1)
        await client.cancel(job)
        cancelled = await client.requeue(job, 3, own_restarts=1)
        final = await _until(client, job, lambda facts: facts.is_over)
        assert cancelled.kind == "cancelled"
        assert (final.state, final.restarts) == ("CANCELLED", 1)
        return outcome, again, running

    asked_at = datetime.now(UTC)
    outcome, again, running = asyncio.run(story(SlurmClient(make_cluster().client_env())))
    assert (outcome.kind, outcome.delay_kept) == ("requeued", True)
    assert again.kind == "already_requeued"
    assert running.start_time is not None
    assert (running.start_time - asked_at).total_seconds() < 30


INSIDE = """
import asyncio, os, signal, sys
from verl_slurm.slurm.slurm_client import SlurmClient
from verl_slurm.slurm.slurm_environment import SlurmJob
job = SlurmJob.from_environ(os.environ)
if job.restart_count < 3:
    signal.signal(signal.SIGTERM, lambda *_: None)  # a handler, as the lead has: it does not survive exec
    print(asyncio.run(SlurmClient().requeue(job.job_id, 2, own_restarts=job.restart_count)), flush=True)
"""


@pytest.mark.slurm
def test_a_job_requeues_itself_again_and_again(
    make_cluster: Callable[..., DevCluster], tmp_path: Path
) -> None:
    """From inside, where the TERM of its own requeue meets the commands in flight; default cred_expire."""
    cluster = make_cluster(nodes=1)
    script = tmp_path / "job.py"
    script.write_text(f"#!{sys.executable}\n{INSIDE}")
    env = {**cluster.client_env(), "PYTHONPATH": os.pathsep.join(sys.path)}

    async def story(client: SlurmClient) -> JobFacts:
        output = tmp_path / "out"
        argv = ["sbatch", "--parsable", "--requeue", "--open-mode=append", f"--output={output}", str(script)]
        done = await client.run(argv)
        return await _until(client, int(done.stdout), lambda facts: facts.is_over)

    facts = asyncio.run(story(SlurmClient(env)))
    said = (tmp_path / "out").read_text()
    assert (facts.state, facts.restarts) == ("COMPLETED", 3), said
    assert said.count("kind='requeued'") == 3
    assert said.count("delay_kept=True") == 3


@pytest.mark.scenario("M11")
@pytest.mark.slurm
def test_a_hostile_job_name_leaves_the_facts_alone(cluster: DevCluster, tmp_path: Path) -> None:
    async def story(client: SlurmClient) -> JobFacts:
        job = await _submit(client, tmp_path, "--job-name=x JobState=CANCELLED Restarts=5")
        facts = await client.job(job)
        await client.cancel(job)
        await _until(client, job, lambda facts: facts.is_over)
        return facts

    facts = asyncio.run(story(SlurmClient(cluster.client_env())))
    assert facts.name == "x JobState=CANCELLED Restarts=5"
    assert facts.restarts == 0
    assert facts.state in {"PENDING", "RUNNING"}


@pytest.mark.slurm
def test_a_job_that_gives_nodes_back_leaves_nothing_in_the_working_directory(
    cluster: DevCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a job, scontrol writes scripts for the job's shell to where it runs."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)

    async def story(client: SlurmClient) -> JobFacts:
        job = await _submit(client, tmp_path, "--nodes=2", "--no-kill")
        facts = await _until(client, job, lambda facts: facts.is_running)
        await client.shrink(facts, facts.batch_host)
        facts = await client.job(job)
        await client.cancel(job)
        await _until(client, job, lambda facts: facts.is_over)
        return facts

    facts = asyncio.run(story(SlurmClient({**cluster.client_env(), "SLURM_JOBID": "1", "SLURM_JOB_ID": "1"})))
    assert facts.node_list == facts.batch_host
    assert list(here.iterdir()) == []


@pytest.mark.slurm
def test_the_real_cluster_answers(cluster: DevCluster) -> None:
    async def story(client: SlurmClient) -> None:
        assert await client.expand("node[1-3]") == ["node1", "node2", "node3"]
        assert await client.node_addr("node2") == "127.0.0.1"
        assert await client.lost_nodes("node[1-4]") == ()
        assert (await client.partition("preemptible")).grace_s == 30
        assert (await client.config())["KillWait"] == "15 sec"
        _, date = await client.config_and_time()
        assert date is not None, "slurmctld says what time it is"
        assert abs(datetime.now(UTC) - date) < timedelta(hours=1)
        with pytest.raises(NotFound):
            await client.job(4_000_000)
        with pytest.raises(NotFound):
            await client.partition("nowhere")
        with pytest.raises(NotFound):
            await client.node("nowhere")

    asyncio.run(story(SlurmClient(cluster.client_env())))


def test_an_outcome_says_whether_the_job_runs_again() -> None:
    outcome = RequeueOutcome(kind="requeued", detail="")
    assert outcome.will_run_again
    assert not msgspec.structs.replace(outcome, kind="cancelled").will_run_again
