"""The embedded cluster with accounting: slurmdbd and a database of its own, and QOS that preempt."""

import shutil
from collections.abc import Callable

import psutil
import pytest

from tests.devcluster.accounting import AccountedCluster
from tests.processes import captured
from verl_slurm.slurm.devcluster import machine
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.devcluster.cluster_processes import list_members

NEEDS_SLURMDBD = pytest.mark.skipif(
    any(shutil.which(name, path=machine.EXTRA_PATH) is None for name in ("slurmdbd", "mariadbd")),
    reason="NOT RUN: no slurmdbd and MariaDB here (make accounting)",
)


@pytest.mark.slurm
@NEEDS_SLURMDBD
@pytest.mark.scenario("EMB3")
def test_jobs_are_counted_and_only_this_machine_hears_of_it(make_cluster: Callable[..., DevCluster]) -> None:
    cluster = make_cluster(kind=AccountedCluster, nodes=1)
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
