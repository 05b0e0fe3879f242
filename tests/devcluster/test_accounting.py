"""The embedded cluster with accounting: slurmdbd and a database of its own, and QOS that preempt."""

import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.devcluster.test_conf import layout
from tests.processes import captured
from verl_slurm.base.errors import SlurmMissing, SlurmRefused
from verl_slurm.devcluster import cluster as cluster_module, conf, machine
from verl_slurm.devcluster.cluster import DevCluster
from verl_slurm.devcluster.cluster_processes import list_members
from verl_slurm.devcluster.conf import ClusterOptions, slurm_conf

NEEDS_SLURMDBD = pytest.mark.skipif(
    any(shutil.which(name, path=machine.EXTRA_PATH) is None for name in ("slurmdbd", "mariadbd")),
    reason="NOT RUN: no slurmdbd and MariaDB here (make accounting)",
)


def test_with_accounting_the_qos_decides_who_preempts_whom() -> None:
    lines = slurm_conf(ClusterOptions(accounting=True), layout()).splitlines()
    assert "PreemptType=preempt/qos" in lines
    assert "AccountingStoragePort=10005" in lines
    without = slurm_conf(ClusterOptions(), layout())
    assert "PreemptType=preempt/partition_prio\n" in without
    assert "Accounting" not in without
    options = ClusterOptions(accounting=True, grace_s=7, preempt_mode="CANCEL")
    said = [" ".join(argv) for argv in conf.sacctmgr_commands("sacctmgr", options, layout())]
    assert "sacctmgr --immediate modify qos normal set GraceTime=7 PreemptMode=cancel" in said
    assert "sacctmgr --immediate add qos urgent Priority=1000 Preempt=normal" in said


def test_missing_programs_are_named_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in (
        "munged",
        "slurmctld",
        "slurmd",
        "sinfo",
        "scontrol",
        "sbatch",
        "srun",
        "setsid",
        "sacctmgr",
    ):
        (programs / name).touch(mode=0o755)
    monkeypatch.setattr(machine, "EXTRA_PATH", "/nonexistent")
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(SlurmMissing, match="no slurmdbd, mariadbd, mariadb-install-db") as told:
        DevCluster(tmp_path / "c").start(ClusterOptions(accounting=True))
    assert "apt-get install slurmdbd mariadb-server-core (not to be started)" in told.value.one_line()
    assert not (tmp_path / "c").exists()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(
        SlurmMissing, match="ask an administrator of this machine for: apt-get install slurmdbd"
    ):
        machine.find_programs(accounting=True)


@pytest.mark.slurm
@NEEDS_SLURMDBD
@pytest.mark.scenario("EMB3")
def test_jobs_are_counted_and_only_this_machine_hears_of_it(make_cluster: Callable[..., DevCluster]) -> None:
    cluster = make_cluster(nodes=1, accounting=True)
    env = cluster.client_env()
    done = captured(["srun", "--qos=urgent", "true"], env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    refused = captured(["srun", "--qos=nosuch", "true"], env=env, timeout=60)
    assert "Invalid qos" in refused.stderr
    # slurmctld sends a job's record to slurmdbd after the job has ended: that is asked for, not waited for.
    for _ in range(100):
        told = captured(["sacct", "-nP", "-X", "-o", "jobid,account,qos,state"], env=env, timeout=60).stdout
        if "COMPLETED" in told:
            break
    assert told == "1|dev|urgent|COMPLETED\n"
    members = list_members(cluster.directory, cluster.slurm_conf)
    processes = [psutil.Process(member.pid) for member in members]
    by_name = {process.name(): process for process in processes}
    # The database has a socket in the private directory, and slurmdbd, which asks for munge, a port of the loopback.
    assert by_name["mariadbd"].net_connections("inet") == []
    heard = by_name["slurmdbd"].net_connections("inet")
    assert {each.laddr.ip for each in heard if each.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    conf = cluster.directory / "slurmdbd.conf"
    assert conf.stat().st_mode & 0o777 == 0o600
    password = conf.read_text().partition("StoragePass=")[2].split()[0]
    said = [word for process in processes for word in [*process.cmdline(), *process.environ().values()]]
    assert len(password) == 64
    assert not [word for word in said if password in word]
    assert not (cluster.directory / "database" / "init.sql").exists()
    assert cluster.stop().left == []
    assert not [member for member in members if member.is_running()]


@pytest.mark.slurm
@pytest.mark.long
@NEEDS_SLURMDBD
def test_a_database_that_does_not_start_is_quoted_and_nothing_is_left(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conf, "database_sql", lambda _: "GRANT NOTHING;\n")
    monkeypatch.setattr(cluster_module, "_START_S", 8)
    cluster = DevCluster(short_dir)
    with pytest.raises(SlurmRefused, match="slurmdbd did not start|mariadbd did not start"):
        cluster.start(ClusterOptions(nodes=1, accounting=True))
    assert list_members(cluster.directory, cluster.slurm_conf) == []
