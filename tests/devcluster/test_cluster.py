"""The embedded cluster itself: up, down, as root, as anyone; what happens to jobs on it."""

import asyncio
import os
import stat
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.devcluster.killed_daemons import await_saved_state, fail_daemon, restore_daemon
from verl_slurm.base.errors import ConfigError, NotFound, SlurmMissing, SlurmRefused
from verl_slurm.base.processes import KnownProcess, known
from verl_slurm.slurm.devcluster import cluster as cluster_module
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.cluster_processes import end_all, list_members
from verl_slurm.slurm.devcluster.conf import ClusterOptions
from verl_slurm.slurm.devcluster.faults import fail_node, preempt, restore_node
from verl_slurm.slurm.facts import JobFacts
from verl_slurm.slurm.slurm_client import SlurmClient

pytestmark = pytest.mark.slurm

NOBODY = 65534


def submit(cluster: DevCluster, directory: Path, body: str, *options: str) -> int:
    script = directory / "job.sh"
    script.write_text(f"#!/bin/sh\n{body}\n")
    argv = ["sbatch", "--parsable", f"--output={directory}/out", "--open-mode=append", *options, str(script)]
    done = subprocess.run(argv, env=cluster.client_env(), capture_output=True, text=True, check=True)
    return int(done.stdout)


def until(cluster: DevCluster, job: int, test: Callable[[JobFacts], bool], timeout_s: float = 60) -> JobFacts:
    client = SlurmClient(cluster.client_env())
    deadline = time.monotonic() + timeout_s
    while not test(facts := asyncio.run(client.job(job))):
        assert time.monotonic() < deadline, facts
        time.sleep(0.05)
    return facts


def cancel(cluster: DevCluster, job: int) -> None:
    asyncio.run(SlurmClient(cluster.client_env()).cancel(job))
    until(cluster, job, lambda facts: facts.is_over)


TWO_STEPS = "srun sh -c 'sleep 600 & wait' &\nwait"


def test_it_is_up_soon_and_private(cluster: DevCluster) -> None:
    status = cluster.status()
    assert status.running
    assert set(status.nodes.values()) <= {"idle", "comp"}  # a job of the test before may still be leaving
    assert len(status.nodes) == 4
    assert stat.S_IMODE(cluster.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((cluster.directory / "munge" / "key").stat().st_mode) == 0o600


def test_a_second_start_leaves_the_running_cluster_alone(cluster: DevCluster) -> None:
    before = (cluster.directory / "state.json").read_bytes()
    assert cluster.start(ClusterOptions(nodes=2)).running
    assert (cluster.directory / "state.json").read_bytes() == before


def test_stop_leaves_nothing_of_a_running_job(
    make_cluster: Callable[..., DevCluster], tmp_path: Path
) -> None:
    cluster = make_cluster(nodes=2)
    job = submit(cluster, tmp_path, TWO_STEPS, "-N2")
    until(cluster, job, lambda facts: facts.state == "RUNNING")
    deadline = time.monotonic() + 20
    # munged, slurmctld and its script process, 2 slurmd, 3 slurmstepd, the batch shell, srun twice, 2 x 2
    while len(before := list_members(cluster.directory, cluster.slurm_conf)) < 15:
        assert time.monotonic() < deadline, before
        time.sleep(0.05)
    assert cluster.stop().left == []
    assert not [process for process in before if process.is_running()]
    assert list_members(cluster.directory, cluster.slurm_conf) == []
    assert not cluster.status().running
    assert cluster.stop().left == []


def test_stop_spares_a_shell_that_only_looks_at_the_cluster(make_cluster: Callable[..., DevCluster]) -> None:
    cluster = make_cluster(nodes=1)
    log = cluster.directory / "log" / "slurmd.node1.log"
    with (
        open(log) as reading,
        subprocess.Popen(["sleep", "60"], env=cluster.client_env(), stdin=reading) as shell,
    ):
        cluster.stop()
        assert shell.poll() is None
        shell.kill()


def test_a_pid_that_now_names_another_process_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        now = known(process.pid)
        assert now is not None
        boot, _, ticks = now.born.partition(":")
        end_all([KnownProcess(process.pid, f"{boot}:{int(ticks) - 1}")], wait_s=0)
        assert process.poll() is None
        process.kill()


def test_slurm_really_preempts_and_requeues(cluster: DevCluster, tmp_path: Path) -> None:
    # Requeue=0, as a lead sets it: Slurm 24.05 to 25.11 start a preempted job again even if it ends with 0.
    ends = "echo USR1; scontrol update JobId=$SLURM_JOB_ID Requeue=0; exit 0"
    body = f"trap '{ends}' USR1\necho start $SLURM_RESTART_COUNT\nsleep 600 & wait"
    job = submit(cluster, tmp_path, body, "-N2", "--signal=B:USR1@60")
    running = until(cluster, job, lambda facts: facts.state == "RUNNING")
    done = preempt(cluster, job, hold_s=1)
    assert done.seen == "preempt_time"
    assert done.deadline is not None
    assert running.node_list is not None
    # the script ends with 0 inside the grace time: never requeued; the urgent job gets its nodes
    until(cluster, job, lambda facts: facts.state in ("COMPLETED", "PREEMPTED"))
    urgent = until(cluster, done.urgent_job_id, lambda facts: facts.state == "COMPLETED")
    assert urgent.node_list == running.node_list
    assert "USR1" in (tmp_path / "out").read_text()


def test_what_cannot_be_preempted_is_refused(cluster: DevCluster, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        preempt(cluster, 4_000_000)
    job = submit(cluster, tmp_path, "exec sleep 600", "--partition=urgent")
    until(cluster, job, lambda facts: facts.state == "RUNNING")
    try:
        with pytest.raises(SlurmRefused, match="not preemptible"):
            preempt(cluster, job)
    finally:
        cancel(cluster, job)
    with pytest.raises(SlurmRefused, match="RUNNING"):
        preempt(cluster, job)


def test_a_failed_node_loses_everything_and_comes_back(
    make_cluster: Callable[..., DevCluster], tmp_path: Path
) -> None:
    cluster = make_cluster(nodes=3, cred_expire_s=5, slurmd_timeout_s=5, kill_wait_s=2)
    job = submit(cluster, tmp_path, TWO_STEPS, "-N2", "--requeue")
    facts = until(cluster, job, lambda facts: facts.state == "RUNNING")
    node = "node2"
    assert facts.node_list == "node[1-2]"
    deadline = time.monotonic() + 20
    while len(list_members(cluster.directory, cluster.slurm_conf, node)) < 4:  # slurmd, slurmstepd, sh, sleep
        assert time.monotonic() < deadline
        time.sleep(0.05)
    others = {process.pid for process in list_members(cluster.directory, cluster.slurm_conf, "node1")}
    failure = fail_node(cluster, node)
    assert len(failure.killed) >= 4
    assert not others & set(failure.killed)
    assert list_members(cluster.directory, cluster.slurm_conf, node) == []
    assert "slurmd dead" in cluster.status().nodes[node]
    again = until(cluster, job, lambda facts: facts.restarts == 1 and facts.state == "RUNNING", 120)
    assert again.node_list is not None
    assert "2" not in again.node_list
    assert restore_node(cluster, node) == "idle"


def test_a_controller_and_a_munged_that_were_killed_come_back_to_a_job_that_ran_on(
    make_cluster: Callable[..., DevCluster], tmp_path: Path
) -> None:
    cluster = make_cluster(nodes=1, cred_expire_s=5)
    job = submit(cluster, tmp_path, "exec sleep 600")
    before = until(cluster, job, lambda facts: facts.state == "RUNNING")
    await_saved_state(cluster, job)
    for which in ("munged", "slurmctld"):
        fail_daemon(cluster, which)
        assert not cluster.status().running
        with pytest.raises(NotFound):
            fail_node(cluster, "node1")
        restore_daemon(cluster, which)
        assert cluster.status().running
    after = until(cluster, job, lambda facts: facts.state == "RUNNING")
    assert after.start_time == before.start_time
    cancel(cluster, job)


def test_unknown_nodes_and_absent_clusters_are_named(cluster: DevCluster, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="node9"):
        fail_node(cluster, "node9")
    with pytest.raises(NotFound, match="devcluster start"):
        fail_node(DevCluster(tmp_path / "none"), "node1")
    assert not DevCluster(tmp_path / "none").status().running
    assert not DevCluster(tmp_path / "none").stop().running
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", ["x" * 100, "a b", "a,b", "a=b#c"])
def test_a_directory_that_slurm_cannot_use_is_refused_before_anything(name: str) -> None:
    cluster = DevCluster(Path("/tmp") / name)
    with pytest.raises(ConfigError, match="--dir"):
        cluster.start()
    assert not cluster.directory.exists()


def test_a_daemon_that_does_not_come_up_is_quoted_and_cleaned_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="vs-") as directory:
        monkeypatch.setattr(
            "verl_slurm.slurm.devcluster.conf.slurm_conf", lambda *_: "ClusterName=x\nNoSuchKey=1\n"
        )
        cluster = DevCluster(directory)
        with pytest.raises(SlurmRefused, match="slurmctld did not start"):
            cluster.start()
        assert list_members(cluster.directory, cluster.slurm_conf) == []


def test_without_the_programs_the_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("verl_slurm.slurm.devcluster.machine.EXTRA_PATH", "/nonexistent")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmMissing, match="apt-get install slurm-wlm munge"):
        DevCluster(tmp_path / "c").start()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(SlurmMissing, match="ask an administrator of this machine for: apt-get install"):
        DevCluster(tmp_path / "c").start()
    assert not (tmp_path / "c").exists()


@pytest.fixture
def nobodys_home() -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("already an ordinary user: every other test here shows it")
    with tempfile.TemporaryDirectory(prefix="vs-") as directory:
        os.chown(directory, NOBODY, NOBODY)
        yield Path(directory)


def test_an_ordinary_user_has_the_whole_of_it(nobodys_home: Path) -> None:
    """In a fork that has given up root for good: start, a job on two nodes, preemption, node loss, stop."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.environ.update(HOME=str(nobodys_home), PATH="/usr/bin:/bin")
            os.chdir(nobodys_home)
            _whole_story(DevCluster(nobodys_home / "c"), nobodys_home)
        except BaseException:  # noqa: BLE001 - the fork must not return into pytest
            (nobodys_home / "error").write_text(traceback.format_exc())
            os._exit(1)
        os._exit(0)
    _, code = os.waitpid(pid, 0)
    DevCluster(nobodys_home / "c").stop()
    error = nobodys_home / "error"
    assert code == 0, error.read_text() if error.exists() else code


def _whole_story(cluster: DevCluster, home: Path) -> None:
    try:
        status = cluster.start(ClusterOptions(cred_expire_s=5))
        assert set(status.nodes.values()) == {"idle"}, status
        job = submit(cluster, home, f"id -u\n{TWO_STEPS}", "-N2", "--signal=B:USR2@60")
        facts = until(cluster, job, lambda facts: facts.state == "RUNNING")
        assert facts.user_id == NOBODY
        assert preempt(cluster, job, hold_s=0).seen == "preempt_time"
        until(cluster, job, lambda facts: facts.state != "RUNNING")
        assert fail_node(cluster, "node4").killed
        assert restore_node(cluster, "node4") == "idle"
        assert (home / "out").read_text().startswith(f"{NOBODY}\n")
    finally:
        left = cluster.stop().left
    assert not left
    assert list_members(cluster.directory, cluster.slurm_conf) == []


def test_a_daemon_that_never_goes_to_the_background_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "_START_S", 0.2)
    cluster = DevCluster(tmp_path)
    (tmp_path / "log").mkdir()
    with pytest.raises(SlurmRefused, match="sleep"):
        cluster.spawn(["sleep", "600"], tmp_path / "pid", tmp_path / "log" / "slurmctld.log")
